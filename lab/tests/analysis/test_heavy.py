"""Heavy hitters: shares and laws of attention that was made to have them."""

import math

import pytest
import torch
from constructed import Axes, causal, context, show

from kvkeep_lab.analysis.groups.heavy import MassByRank


def measured(weights, tokens, **options):
    layers, heads = weights.shape[:2]
    return show(MassByRank(context(tokens, layers=layers, heads=heads)), weights, **options).result()


def test_uniform_attention_has_the_shares_of_harmonic_numbers():
    n = 200
    result = measured(causal(torch.ones(2, 2, n, n)), range(n))
    expected = sum(sum(1 / i for i in range(j, n + 1)) for j in range(1, 41)) / n
    assert result["tokens"]["20%"] == pytest.approx([expected] * 2)
    assert result["uniform"]["20%"] == pytest.approx([expected] * 2)
    assert MassByRank.reading(result).verdict == "differ"  # no heavy hitter, whatever the fit


def test_uniform_attention_under_a_window_is_called_uniform():
    """Without the window's part the heaviest fifth would hold half of it, and every real layer would look even."""
    n, windows = 200, (None, 20)
    weights = torch.stack([torch.ones(1, n, n).triu(1 - (window or n)) for window in windows])
    measurement = MassByRank(context(range(n), layers=2, windows=windows))
    result = show(measurement, causal(weights)).result()
    assert result["uniform"]["20%"] == pytest.approx(result["tokens"]["20%"])
    full, windowed = result["uniform"]["20%"]
    assert windowed < full - 0.2
    mean = (full + windowed) / 2
    assert f"of the mass ({mean:.0%} if attention were uniform)" in MassByRank.reading(result).here


def test_every_row_looks_at_one_token():
    n = 100
    weights = torch.zeros(1, 1, n, n)
    weights[..., 30:, 30] = 1.0
    weights[0, 0, range(30), range(30)] = 1.0
    result = measured(weights, range(n))
    assert result["tokens"]["1%"] == pytest.approx([0.7])
    assert result["tokens"]["5%"] == pytest.approx([0.74])
    # 70 % in one token, 80 % needs 10 more of 100
    assert result["tokens"]["for"]["80%"] == pytest.approx([0.11])
    # without token 0, which has 1: 70 of 99, and 4 of the 99 are a twentieth
    assert result["tokens_but_first"]["5%"] == pytest.approx([(70 + 3) / 99])


def test_shares_are_per_head_and_then_averaged():
    n = 60
    weights = torch.zeros(1, 2, n, n)
    weights[0, 0, :, 0] = 1.0
    weights[0, 1, range(n), range(n)] = 1.0
    result = measured(weights, range(n))
    assert result["tokens"]["20%"] == pytest.approx([(1.0 + 0.2) / 2])


def zipf_rows(kinds, slope):
    """Every token its own kind, each row the same: what key j gets from all rows it is seen by falls as a power law."""
    weights = torch.zeros(1, 1, 2 * kinds, 2 * kinds, dtype=torch.float64)
    wanted = torch.arange(1, kinds + 1, dtype=torch.float64) ** slope
    weights[0, 0, kinds:, :kinds] = wanted / wanted.sum()
    return weights


def test_a_power_law_over_kinds_is_found():
    kinds, slope = 300, -1.1
    order = torch.randperm(kinds, generator=torch.Generator().manual_seed(0))
    result = measured(
        zipf_rows(kinds, slope)[..., torch.cat([order, torch.arange(kinds, 2 * kinds)])], range(2 * kinds)
    )
    assert result["kinds"]["fit"]["slope"] == pytest.approx(slope, abs=1e-4)
    assert result["kinds"]["fit"]["r2"] == pytest.approx(1.0, abs=1e-6)
    assert (result["kinds"]["fit"]["first"], result["kinds"]["fit"]["last"]) == (10, kinds)
    k = kinds // 10
    assert result["kinds"]["hill"] == pytest.approx(1 / (-slope * (math.log(k + 1) - math.lgamma(k + 1) / k)), rel=1e-4)
    assert MassByRank.reading(result).verdict == "agree"


def test_a_kind_collects_the_mass_of_all_its_places_in_all_layers():
    n = 64
    weights = causal(torch.rand(3, 2, n, n, generator=torch.Generator().manual_seed(3)) + 0.01)
    tokens = torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(4))
    result = measured(weights, tokens.tolist())
    total = {v: float(weights.sum(dim=(0, 1, 2))[tokens == v].sum()) for v in range(5)}
    heaviest = max(total, key=total.get)
    assert result["heaviest"][0]["word"] == f"w{heaviest}"
    assert result["heaviest"][0]["share"] == pytest.approx(total[heaviest] / (3 * 2 * n))
    assert result["heaviest"][0]["count"] == int((tokens == heaviest).sum())
    assert result["curve"]["rank"] == [1, 2, 3, 4, 5]
    assert sum(result["curve"]["mass"]) == pytest.approx(1.0, abs=1e-5)
    assert MassByRank.reading(result).verdict == "cannot tell"  # five kinds make no law


def test_blocks_do_not_matter():
    n = 80
    weights = causal(torch.rand(2, 2, n, n, generator=torch.Generator().manual_seed(5)) ** 8 + 1e-6)
    one, other = measured(weights, range(n), block=80), measured(weights, range(n), block=9)
    assert one["tokens"]["5%"] == pytest.approx(other["tokens"]["5%"])


def test_the_picture_names_its_axes():
    axes = Axes()
    MassByRank.draw(measured(causal(torch.ones(1, 1, 70, 70)), range(70)), axes)
    assert {"set_xlabel", "set_ylabel", "legend"} <= {name for name, _, _ in axes.calls}

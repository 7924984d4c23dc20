"""Sums over the past and over all rows, under uniform attention: sets, attention held and losses in closed form."""

import pytest
import torch
from constructed import Axes, context
from uniform_model import loss_when, subject, tokens, uniform

from kvkeep_lab.analysis.groups import local_global
from kvkeep_lab.analysis.groups._ranks import chance_jaccard
from kvkeep_lab.analysis.groups.local_global import LocalGlobal

LENGTH, BUDGET, STRIDE = 40, 8, 4


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_global, "WINDOW", LENGTH)
        patch.setattr(local_global, "TEXTS", 1)
        patch.setattr(local_global, "STRIDE", STRIDE)
        patch.setattr(local_global, "EVERY", 5)
        text = tokens(LENGTH)
        measurement = LocalGlobal(context(text))
        measurement.runs(subject(uniform(), text), lambda share: None)
        return measurement.result()


def test_every_set_of_equal_size_holds_the_same_part_of_uniform_attention(result):
    expected = sum((BUDGET + 1) / (row + 1) for row in range(BUDGET, LENGTH)) / (LENGTH - BUDGET)
    assert result["budget"] == BUDGET
    for layers in result["held_by_layer"].values():
        assert layers == pytest.approx([expected] * 2, abs=1e-5)
    assert result["past_mass"] == pytest.approx(expected, abs=1e-5)


def test_sets_beyond_the_recent_window(result):
    # sums over the past and over all rows both fall with the position: the first four tokens
    assert result["jaccard_by_layer"]["past"] == pytest.approx([1.0] * 2)
    looks = [13, 18, 23, 28, 33, 38]
    shared = [len({0, 1, 2, 3} & set(range(row - 8, row - 4))) for row in looks]
    assert result["jaccard_by_layer"]["newest"] == pytest.approx([sum(n / (8 - n) for n in shared) / len(looks)] * 2)
    assert result["chance"] == pytest.approx(sum(chance_jaccard(row - 4, 4) for row in looks) / len(looks))


def visible(first, last):
    """What a row sees that is fed in pieces: what was kept when its piece came, and the piece up to itself."""

    def of(t, layer):
        start = t - t % STRIDE
        kept = range(start) if start <= BUDGET else [*range(first), *range(start - last, start)]
        return [*kept, *range(start, t + 1)]

    return of


def test_losses_of_the_free_run(result):
    text, model = tokens(LENGTH), uniform()
    assert result["loss"]["full"] == pytest.approx(loss_when(lambda t, layer: range(t + 1), text, model), abs=1e-5)
    assert result["loss"]["newest"] == pytest.approx(loss_when(visible(0, BUDGET), text, model), abs=1e-5)
    assert result["loss"]["past"] == pytest.approx(loss_when(visible(4, 4), text, model), abs=1e-5)
    assert result["loss"]["global"] == pytest.approx(result["loss"]["past"], abs=1e-6)


def test_overlap_leaves_the_recent_window_out():
    one, other = torch.zeros(2, 1, 1, 1, 10, dtype=torch.bool)
    one[..., [0, 1, 7, 8]] = True
    other[..., [1, 2, 7, 8]] = True
    assert local_global.overlap(one, other, [9], recent=2) == pytest.approx(1 / 3)
    assert local_global.overlap(one, other, [9], recent=0) == pytest.approx(3 / 5)


def judged(past, newest, noise):
    """Losses per token whose means differ as asked, and by chance from token to token."""
    draw = torch.Generator().manual_seed(0)
    chance = {name: noise * torch.randn(1000, generator=draw, dtype=torch.float64) for name in ("past", "newest")}
    chance = {name: values - values.mean() for name, values in chance.items()}
    whole = torch.full((1000,), 3.0, dtype=torch.float64)
    losses = {"past": past + chance["past"], "global": whole, "newest": newest + chance["newest"], "full": whole - 0.1}
    return local_global.judged(losses)


@pytest.mark.parametrize(
    ("past", "newest", "noise", "verdict"),
    [
        (3.02, 3.1, 0.1, "agree"),
        (2.9, 3.1, 0.1, "agree"),
        (3.05, 3.1, 0.1, "differ"),
        (3.05, 3.1, 1.0, "cannot tell"),  # what is left is within chance
        (3.02, 3.1, 2.0, "cannot tell"),  # the gap itself is
        (3.0, 3.01, 0.0, "cannot tell"),  # nothing to choose between
    ],
)
def test_verdicts(result, past, newest, noise, verdict):
    assert LocalGlobal.reading({**result, **judged(past, newest, noise)}).verdict == verdict


def test_errors_are_those_of_a_mean_of_differences():
    found = judged(3.05, 3.1, 0.5)
    assert found["gap"] == pytest.approx({"mean": 0.1, "error": 0.5 / 1000**0.5}, rel=0.1)
    assert found["left"]["mean"] == pytest.approx(0.05 - 0.25 * 0.1)
    assert found["left"]["error"] == pytest.approx(0.5 * (1 + 0.25**2) ** 0.5 / 1000**0.5, rel=0.1)


def test_the_picture_has_three_lines(result):
    axes = Axes()
    LocalGlobal.draw(result, axes)
    assert sum(name == "plot" for name, _, _ in axes.calls) == 3

"""What policies keep of a prompt: against the cache itself, and scores and spreads that are known."""

import pytest
import torch
from constructed import Axes
from shown import context, hide_future, llama, random_logits, show, subject

from kvkeep import BoundedCache
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups._ranks import uniform_mass
from kvkeep_lab.analysis.groups.retained import BINS, POLICIES, LayerPrompt, Retained, spread
from kvkeep_lab.analysis.walk import walk


def test_kept_tokens_are_those_of_the_cache():
    n, budget = 180, 50
    model = llama()
    given = subject(model, n)
    about = context(n, layers=2, heads=4, kv_heads=2)
    prompts = {name: [LayerPrompt(parse(name), about, budget, layer) for layer in range(2)] for name in POLICIES}

    class Sees:
        def rows(self, rows):
            for one in prompts.values():
                one[rows.layer].add(rows)

        def mlp(self, mlp):
            raise AssertionError("not asked for")

    walk(model, given.tokens, Sees(), reads=frozenset({"attention"}), block=77)
    for name, layers in prompts.items():
        cache = BoundedCache(model.config, name, budget)
        with torch.inference_mode():
            model(input_ids=given.tokens[None], past_key_values=cache, use_cache=True)
        for layer, prompt in enumerate(layers):
            positions = cache.positions(layer)[0].sort(dim=-1).values
            kept = [head.nonzero().flatten().tolist() for head in prompt.kept()]
            assert [[p for p in head if p >= 0] for head in positions.tolist()] == kept, (name, layer)


def test_h2o_chooses_the_largest_column_sums():
    n, budget = 300, 60
    logits = random_logits(1, 4, n, n, scale=2.0)
    prompt = LayerPrompt(parse("h2o"), context(n, heads=4, kv_heads=2), budget, 0)

    class Shown:
        context = context(n, heads=4, kv_heads=2)
        rows = staticmethod(prompt.add)

    show(Shown, logits)
    mass = hide_future(logits[0]).softmax(dim=-1).sum(dim=1).view(2, 2, n).mean(dim=1)
    for head in range(2):
        best = mass[head, : n - 30].topk(30).indices.tolist()
        assert prompt.kept()[head].nonzero().flatten().tolist() == sorted([*best, *range(n - 30, n)])
    torch.testing.assert_close(prompt.score(), mass)


def test_uniform_attention_gives_the_harmonic_curve_and_keeps_the_beginning():
    n = 400
    result = show(Retained(context(n)), torch.zeros(1, 1, n, n), torch.ones(1, 1, n, 2)).result()
    assert result["budget"] == 80
    assert result["curves"]["h2o"] == pytest.approx(result["curves"]["iid logits"], abs=1e-4)
    h2o = result["policies"]["h2o"]
    assert h2o["late"] == 0.0
    assert h2o["ks"] == pytest.approx(1 - 40 / 360)  # the first 40 of the 360 that are not protected
    assert h2o["histogram"] == pytest.approx([0.25, 0.25, *[0.0] * 16, 0.25, 0.25])
    tova = result["policies"]["tova"]
    assert tova["recent"] == 0


def test_the_curve_of_iid_logits_knows_windows():
    n, window = 400, 40
    place = torch.arange(n)
    logits = torch.zeros(1, 1, n, n).masked_fill(place[:, None] - place >= window, -torch.inf)
    result = show(Retained(context(n, windows=(window,))), logits, torch.ones(1, 1, n, 2)).result()
    assert result["curves"]["h2o"] == pytest.approx(result["curves"]["iid logits"], abs=1e-4)


def test_expected_mass_is_a_difference_of_harmonic_numbers():
    def harmonic(m):
        return sum(1 / i for i in range(1, m + 1))

    expected = [harmonic(50) - harmonic(j - 1) for j in range(1, 51)]
    assert uniform_mass(50, [None])[0].tolist() == pytest.approx(expected)
    assert uniform_mass(50, [None]).sum().item() == pytest.approx(50)  # every row hands out 1


def test_spreads():
    even = spread(torch.ones(240))
    assert even == pytest.approx({"ks": 0.0, "entropy": 1.0, "late": 1.0}, abs=1e-6)
    first = torch.zeros(240)
    first[:12] = 1.0  # one of 20 bins
    assert spread(first) == pytest.approx({"ks": 1 - 12 / 240, "entropy": 0.0, "late": 0.0}, abs=1e-6)
    last = torch.zeros(240)
    last[100:] = 2.0
    assert spread(last)["late"] == pytest.approx(240 / 140)


def result_of(h2o, ahakv):
    names = {name: {"ks": 0.3, "late": 1.0, "histogram": [1 / BINS] * BINS} for name in POLICIES}
    names["h2o"] |= dict(zip(("late", "ks"), h2o, strict=True))
    names["ahakv"] |= dict(zip(("late", "ks"), ahakv, strict=True))
    return {"policies": names}


@pytest.mark.parametrize(
    ("h2o", "ahakv", "verdict", "claims"),
    [
        ((0.1, 0.6), (0.9, 0.1), "agree", ["agree", "agree"]),
        ((0.1, 0.2), (0.9, 0.2), "cannot tell", ["agree", "cannot tell"]),
        ((1.0, 0.1), (1.2, 0.25), "differ", ["differ", "differ"]),
    ],
)
def test_the_reading_compares_h2o_and_ahakv(h2o, ahakv, verdict, claims):
    result = result_of(h2o, ahakv)
    assert Retained.reading(result).verdict == verdict
    assert [claim.verdict for claim in Retained.claims(result)] == claims


def test_it_draws_scores_and_kept_positions():
    scores, kept = Axes(), Axes()
    curves = {"h2o": [1.5, 0.5], "ahakv": [1.0, 1.0], "iid logits": [1.8, 0.2]}
    Retained.draw({**result_of((0.1, 0.6), (0.9, 0.1)), "curves": curves}, (scores, kept))
    drawn = [args for name, args, _ in scores.calls if name == "plot"]
    assert [list(values) for _, values in drawn] == list(curves.values())
    assert list(drawn[0][0]) == [0.25, 0.75]
    assert sum(name == "plot" for name, _, _ in kept.calls) == 4

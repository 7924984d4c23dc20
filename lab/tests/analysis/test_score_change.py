"""The change of attention scores: known cases, and exact identities on a random model's bounded layers."""

import pytest
import torch
from constructed import Axes
from shown import context, llama, subject

from kvkeep.attention_probe import TapeRecorder, tapes, wrap_layers
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep_lab.analysis.groups import score_change
from kvkeep_lab.analysis.groups.score_change import ScoreChange, change

ROWS = 24


def test_one_of_four_equal_keys_is_dropped():
    full = torch.full((2, 3, 4), 0.25)
    bounded = torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]).expand(2, 3, 4)
    found = change(full, bounded)
    assert found["lost_mass"] == pytest.approx(0.25)
    assert found["dropped"] == pytest.approx(0.25)
    assert found["median"] == pytest.approx(1 / 3)
    assert found["quantiles"] == pytest.approx([1 / 3] * 5)
    assert found["l1"] == pytest.approx(0.5)  # twice the lost mass
    assert [round(score_change.EDGES[i], 1) for i, share in enumerate(found["histogram"]) if share] == [0.3]


def test_quantiles_are_of_kept_keys_alone():
    full = torch.full((1, 1, 5), 0.2)
    bounded = torch.tensor([[[0.0, 0.1, 0.2, 0.3, 0.7]]])
    found = change(full, bounded)
    assert found["quantiles"][0] == pytest.approx(-0.5)
    assert found["quantiles"][2] == pytest.approx(0.5) or found["quantiles"][2] == pytest.approx(0.0)
    assert found["quantiles"][-1] == pytest.approx(2.5)
    assert sum(found["histogram"]) == pytest.approx(1.0)
    assert found["histogram"][-1] == pytest.approx(0.25)  # above the last edge


def test_negligible_scores_are_left_out():
    full = torch.tensor([[[0.5, 0.5, 1e-9, 1e-9]]])
    found = change(full, torch.tensor([[[0.0, 1.0, 0.1, 0.0]]]))
    assert (found["dropped"], found["median"]) == (0.5, pytest.approx(1.0))


def test_without_a_kept_key_there_is_no_change_to_report():
    found = change(torch.full((1, 2, 4), 0.25), torch.zeros(1, 2, 4))
    assert (found["dropped"], found["lost_mass"], found["median"]) == (1.0, pytest.approx(1.0), None)
    assert found["quantiles"] == [None] * 5
    assert sum(found["histogram"]) == 0.0


@pytest.fixture(scope="module")
def measured():
    """256 tokens through a random model; with the full cache's rows and those of the replay."""
    model = llama()
    given = subject(model, 256)
    measurement = ScoreChange(context(256, layers=2, heads=4, kv_heads=2))
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_change, "ROWS", ROWS)
        measurement.runs(given, shares.append)
    assert shares == sorted(shares)
    return model, given, measurement.result()


def test_same_inputs_only_renormalise(measured):
    """Kept keys gain 1 / (kept mass) - 1 in their row, and both sides differ by twice the lost mass."""
    model, given, result = measured
    first = tapes(model, given.tokens[None])[0]
    full = first.weights(256 - ROWS)[0].flatten(0, 1)
    bounded = score_change._replay(first, 256 - ROWS, 256 // 3, 0)
    kept = bounded > 0
    torch.testing.assert_close(bounded, full * kept / (full * kept).sum(dim=-1, keepdim=True), rtol=1e-4, atol=1e-7)
    assert result["forced"]["by_layer"]["median"][0] >= 0.0
    assert result["forced"]["l1"] == pytest.approx(2 * result["forced"]["lost_mass"], rel=1e-4)
    assert 0.0 < result["forced"]["lost_mass"] < 1.0
    assert int(kept.sum(dim=-1).max()) <= 256 // 3 + 1  # the budget, and the row's own token


def test_the_full_rows_are_those_of_the_model(measured):
    """Rows from recorded queries and keys give the attention that transformers computes itself."""
    model, given, _ = measured
    recorded = tapes(model, given.tokens[None])
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(input_ids=given.tokens[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("kvkeep")
    for tape, weights in zip(recorded.values(), expected, strict=True):
        found = tape.weights(200)[0].flatten(0, 1).float()
        torch.testing.assert_close(found, weights[0, :, 200:], rtol=1e-3, atol=1e-5)


def test_inputs_of_the_first_layer_are_the_same_both_ways(measured):
    _, _, result = measured
    assert result["free"]["by_layer"]["lost_mass"][0] == pytest.approx(result["forced"]["by_layer"]["lost_mass"][0])
    assert result["free"]["by_layer"]["median"][1] != result["forced"]["by_layer"]["median"][1]


def test_a_budget_for_all_changes_nothing(measured):
    model, given, _ = measured
    n = 128
    ids = given.tokens[None, :n]
    full = [tape.weights(100) for tape in tapes(model, ids).values()]
    cache = BoundedCache(model.config, "h2o", n)
    recorders = wrap_layers(cache, TapeRecorder)
    with torch.inference_mode():
        for piece in [ids[:, :100], *ids[:, 100:].split(1, dim=1)]:
            model(input_ids=piece, past_key_values=cache, use_cache=True)
    for recorder, expected in zip(recorders.values(), full, strict=True):
        torch.testing.assert_close(recorder.tape().bounded(), expected, rtol=1e-3, atol=1e-6)


def result_of(median, lost):
    found = {
        "median": median,
        "lost_mass": lost,
        "dropped": 0.5,
        "quantiles": [0.0, 0.0, median, 0.1, 0.2],
        "histogram": [1 / 30] * 30,
    }
    return {"free": found, "forced": found, "edges": score_change.EDGES}


@pytest.mark.parametrize(
    ("median", "lost", "verdict"),
    [(0.05, 0.05, "agree"), (0.3, 0.05, "differ"), (0.05, 0.3, "differ"), (None, 1.0, "cannot tell")],
)
def test_the_reading_wants_small_changes_and_small_losses(median, lost, verdict):
    assert ScoreChange.reading(result_of(median, lost)).verdict == verdict


def test_it_draws_both_ways():
    axes = Axes()
    ScoreChange.draw(result_of(0.1, 0.1), axes)
    assert sum(name == "plot" for name, _, _ in axes.calls) == 2
    assert [claim.verdict for claim in ScoreChange.claims(result_of(0.05, 0.3))] == ["agree", "differ"]

"""Small caches on a text: the run itself, with a random model whose losses are computed a second time here."""

import math

import pytest
import torch
from constructed import context
from uniform_model import subject, tokens, writer

from kvkeep.models import checkpoint
from kvkeep_lab.analysis.groups import budgets
from kvkeep_lab.analysis.groups.budgets import Budgets
from kvkeep_lab.analysis.measure import Skipped

ROOM = 100
PASSAGE = 10


@pytest.fixture(scope="module")
def made():
    """The text, the result and the shares of progress, in sizes for a model that was trained for 40 tokens."""
    text, shares = tokens(200), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "trained_length", lambda config: ROOM)
        patch.setattr(budgets, "PASSAGE", PASSAGE)
        patch.setattr(budgets, "STRIDE", 32)
        patch.setattr(budgets, "POLICIES", ("local", "h2o:recent=60"))
        patch.setattr(budgets, "BUDGETS", (0.1, 1.0))
        patch.setattr(Budgets, "least_tokens", 64)
        measurement = Budgets(context(text))
        measurement.runs(subject(writer(), text), shares.append)
    return text, measurement.result(), shares


@torch.inference_mode()
def losses(ids):
    logits = writer().model(input_ids=ids[None]).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


def test_the_full_cache_costs_what_the_model_alone_does(made):
    text, found, shares = made
    n_text = ROOM - PASSAGE * len(budgets.DEPTHS)
    starts = [int(depth * n_text) for depth in budgets.DEPTHS]
    expected = losses(torch.cat([text[:n_text], *(text[start : start + PASSAGE] for start in starts)]))
    assert (found["n_text"], found["n_tokens"]) == (n_text, ROOM)
    assert found["nll"] == pytest.approx(float(expected[: n_text - 1].mean()), abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert shares == sorted(shares)


def test_a_small_cache_changes_the_loss_and_one_for_everything_does_not(made):
    tenth, whole = made[1]["policies"]["local"]["excess"]
    assert abs(tenth) > 1e-3
    assert whole == pytest.approx(0.0, abs=1e-5)


def test_a_policy_that_cannot_run_has_no_number(made):
    found = made[1]["policies"]["h2o:recent=60"]  # protects more than a tenth
    assert [found[key][0] for key in ("excess", "error", "kept", "kept_by_depth")] == [None] * 4
    assert found["excess"][1] == pytest.approx(0.0, abs=1e-5)


def test_a_model_that_is_made_for_short_texts_is_skipped():
    text = tokens(600)
    with pytest.raises(Skipped, match="The model is made for 40 tokens; this needs 512"):
        Budgets(context(text)).runs(subject(writer(), text), lambda share: None)

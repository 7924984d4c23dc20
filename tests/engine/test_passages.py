"""What a memory keeps of its text, measured on passages: more tokens tell more, and all tokens tell all."""

import functools

import model_folders
import pytest
import torch

from kvkeep import BoundedCache
from kvkeep.engine import passages
from kvkeep.engine.passages import CUE, TOLD, Passages, places, smallest
from kvkeep.errors import InputError
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.models.tiny.documents import document
from kvkeep.models.tokenization import Writer

LENGTH = CUE + TOLD


# ------------------------------------------------------------------ the places


@pytest.mark.parametrize(
    ("tokens", "number"), [(1, 0), (LENGTH, 0), (2 * LENGTH, 2), (500, 5), (2240, 10), (10**5, 32)]
)
def test_a_longer_text_has_more_passages(tokens, number):
    starts = places(list(range(tokens)))
    assert len(starts) == number
    assert starts == sorted(set(starts))
    assert all(0 <= start <= tokens - LENGTH for start in starts)


def test_they_are_spread_and_tell_rare_tokens():
    ids = [1, 2, 3] * 300
    ids[40:46] = ids[400:406] = range(100, 106)  # twice
    ids[500:506] = range(200, 206)  # once
    first, second, third = places(ids, 3)
    assert (first + CUE, second + CUE) == (40, 500)
    assert third >= 580


# ------------------------------------------------------------------ the measurement


@functools.cache
def writer():
    with quiet():
        checkpoint = find(embedded())
        return Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))


@functools.cache
def text():
    tokenizer = writer().checkpoint.tokenizer
    made = document(3, n_facts=16, n_questions=1, tokens=400, count=lambda text: len(tokenizer.encode(text)))
    return tuple(tokenizer.encode(made.text))


@functools.cache
def quoted():
    return Passages(writer(), text(), number=8)


def memory(policy, budget, **settings):
    cache = BoundedCache(writer().model.config, policy, budget, **settings)
    with torch.inference_mode():
        writer().model(**cache.continue_with(list(text())))
    return cache.snapshot(), cache.policy


@pytest.mark.long
def test_all_tokens_tell_all_and_few_tell_little():
    told = quoted().measure(*memory("full", 2 * len(text())))
    assert told.share > 0.7
    assert (told.passages, len(quoted())) == (8, 8)
    shares = [quoted().measure(*memory("reread", budget)).share for budget in (16, 100, 300)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[2]


@pytest.mark.slow
def test_a_measurement_changes_nothing_and_repeats():
    snapshot, policy = memory("h2o", 100)
    before = [layer.positions.clone() for layer in snapshot.contents.layers]
    assert quoted().measure(snapshot, policy) == quoted().measure(snapshot, policy)
    assert all(torch.equal(a, b.positions) for a, b in zip(before, snapshot.contents.layers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"kv_bits": "8"}, {"positions": "slot"}, {"prefill_chunk": 64}, {"head_budget": "ada:0.2"}],
    ids=str,
)
def test_memories_of_every_setting_are_measured(settings):
    assert 0 <= quoted().measure(*memory("h2o", 64, **settings)).share <= 1


@pytest.mark.slow
def test_copies_are_measured_a_few_at_a_time(monkeypatch):
    snapshot, policy = memory("h2o", 100)
    together = quoted().measure(snapshot, policy)
    monkeypatch.setattr(passages, "_COPIED_BYTES", 3 * snapshot.nbytes)
    assert quoted().measure(snapshot, policy).share == pytest.approx(together.share, abs=1e-5)
    monkeypatch.setattr(passages, "_COPIED_BYTES", 1)
    assert quoted().measure(snapshot, policy).share == pytest.approx(together.share, abs=1e-5)


def test_what_cannot_be_measured():
    with pytest.raises(InputError, match="a text of 20 tokens has no two passages"):
        Passages(writer(), text()[:20])
    with quiet():
        checkpoint = find(model_folders.folder())
        other = Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))  # of random weights
    with pytest.raises(InputError, match="does not quote what it has just read"):
        Passages(other, [3 + i % 40 for i in range(100)])


def test_a_text_up_to_the_end_of_learned_positions_is_not_quoted():
    with quiet():
        checkpoint = find(model_folders.folder("gpt2"))
        other = Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))
    with pytest.raises(InputError, match="learned positions for 32 tokens"):
        Passages(other, [3] * 31 + [4] * 20)


# ------------------------------------------------------------------ the search


@pytest.mark.parametrize("needed", [1, 2, 3, 40, 41, 999, 1000])
def test_the_smallest_budget_up_to_a_factor(needed):
    asked = []

    def reaches(budget):
        asked.append(budget)
        return budget >= needed

    found = smallest(reaches, 1, 1000)
    assert needed <= found <= max(needed + 1, 1.1 * needed)
    assert len(asked) <= 8
    assert 1000 not in asked
    assert smallest(lambda budget: budget >= needed, 1, 1000, factor=1.0) == needed


def test_a_range_of_one_budget_asks_nothing():
    assert smallest(lambda budget: pytest.fail(f"{budget} was asked"), 7, 7) == 7

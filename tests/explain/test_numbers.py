"""Every number of the page is that of `cache.positions()` and of reference attention, computed again without the
recorder."""

import random

import pytest
import torch

import kvkeep
from explain.records import CHUNK, POLICIES, record, shown, tables, text
from kvkeep.attention_probe import TapeRecorder, members, wrap_layers
from kvkeep.backends import reference
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import encode
from kvkeep.types import Phase

CELLS = 200
HALF_STEP = 0.5 / 255 + 4e-3
"""The rounding of a shade, and that of keys in bfloat16: the recorder's attention is float32, that of the second run is
not, and some CPUs round otherwise than others."""


@pytest.fixture(scope="module")
def model():
    return kvkeep.load()


def fed(model, policy, budget, ids, answer):
    """Run the steps of a record again: the tape of each layer, and which tokens each head holds after each step."""
    model, _ = model
    cache = kvkeep.BoundedCache(model.config, policy, budget, prefill_chunk=CHUNK)
    recorders, held = wrap_layers(cache, TapeRecorder), []
    steps = [(piece, Phase.PREFILL) for piece in ids.split(CHUNK)]
    steps += [(torch.tensor([token]), Phase.DECODE) for token in answer]
    length = len(ids) + len(answer)
    with torch.inference_mode():
        for piece, phase in steps:
            cache.phase = phase
            model(input_ids=piece[None], past_key_values=cache, use_cache=True)
            held.append(torch.cat([members(cache.positions(i)[0][None], length)[0] for i in recorders]))
    return {i: one.tape() for i, one in recorders.items()}, torch.stack(held), [len(piece) for piece, _ in steps]


def attention(tapes, first, last, held):
    """Reference attention of the rows from first to last over the held tokens and their own."""
    rows = []
    for number, tape in enumerate(tapes.values()):
        heads = tape.keys.shape[1]
        places = torch.arange(last).expand(heads, last)
        if held is not None:
            own = held[number * heads : (number + 1) * heads, :last] | (torch.arange(last) >= first)
            places = places.masked_fill(~own, -1)
        query, keys = tape.query[:, :, first:last], tape.keys[:, :, :last]
        now = torch.arange(first, last)[None]
        rows.append(reference.probabilities(query, keys, now, places[None], tape.options)[0].mean(dim=1))
    return torch.cat(rows)


@pytest.fixture(scope="module", params=range(len(POLICIES)), ids=POLICIES)
def both(request, model):
    """A run of the page's data, and the same steps computed again."""
    data = shown(record().to_html())
    run = data["runs"][request.param]
    checkpoint = Checkpoint("", model[0].config, model[1], None, allow_pickle=False)
    ids = encode(checkpoint, text())[0]
    assert len(ids) == len(data["tokens"])
    tapes, held, sizes = fed(model, POLICIES[request.param], data["budget"], ids, run["answer_ids"])
    whole, _, _ = fed(model, "full", len(ids) + 60, ids, run["answer_ids"])
    return run, tables(run), tapes, whole, held, sizes


def close(shade, largest, true):
    return abs((shade / largest) ** 0.5 - (float(true) / largest) ** 0.5) < HALF_STEP


def test_what_heads_hold_is_what_the_slots_hold(both):
    _, found, _, _, held, sizes = both
    rng = random.Random(0)
    heads, n = found["dropped"].shape
    assert n == sum(sizes)
    assert len(found["mass"]) == len(sizes)
    for _ in range(CELLS):
        moment, head = rng.randrange(len(sizes)), rng.randrange(heads)
        token = rng.randrange(sum(sizes[: moment + 1]))
        assert bool(found["dropped"][head, token] > moment) == bool(held[moment, head, token])


def test_mass_is_that_of_reference_attention(both):
    run, found, tapes, _, held, sizes = both
    rng = random.Random(1)
    total = torch.zeros(found["total"].shape, dtype=torch.float64)
    for moment, size in enumerate(sizes):
        first = sum(sizes[:moment])
        rows = attention(tapes, first, first + size, held[moment - 1] if moment else None)
        mass = rows.sum(dim=1)
        total[:, : mass.shape[1]] += mass
        for token in rng.choices(range(mass.shape[1]), k=CELLS // len(sizes) + 1):
            assert close(found["mass"][moment, token], run["mass"]["largest"], mass[:, token].mean())
    for _ in range(CELLS):
        head, token = rng.randrange(total.shape[0]), rng.randrange(total.shape[1])
        assert close(found["total"][head, token], run["total"]["largest"], total[head, token])


def test_the_answer_looks_where_reference_attention_looks(both):
    run, found, tapes, whole, held, sizes = both
    prompt = sum(sizes) - len(run["answer_ids"])
    chunks = len(sizes) - len(run["answer_ids"])
    for place in range(len(run["answer_ids"])):
        now, before = prompt + place, held[chunks - 2 + place] if place or chunks > 1 else None
        start = sum(sizes[: chunks - 1 + place])
        kept = attention(tapes, start, now, before)[:, -1]
        full = attention(whole, start, now, None)[:, -1]
        gone = torch.zeros_like(full, dtype=torch.bool)
        gone[:, :start] = ~before[:, :start]
        for name, true in (("attended", kept), ("full", full), ("missed", full * gone)):
            for token in range(now):
                assert close(found[name][place, token], run[name]["largest"], true.mean(dim=0)[token]), name


def test_lost_mass_is_the_full_caches_attention_to_dropped_tokens(both):
    _, found, _, whole, held, sizes = both
    for moment in range(1, len(sizes)):
        first, last = sum(sizes[:moment]), sum(sizes[: moment + 1])
        mass = attention(whole, first, last, None).sum(dim=1)
        gone = ~held[moment - 1][:, :first]
        true = (mass[:, :first] * gone).sum(dim=1) / mass.sum(dim=1)
        assert torch.allclose(found["lost"][moment].double(), true, rtol=0.02, atol=2e-3)


def test_a_dropped_score_is_below_the_lowest_that_stayed(both):
    _, found, _, _, held, _ = both
    compared = 0
    for head, token in torch.nonzero(found["dropped"] < 255).tolist():
        moment = int(found["dropped"][head, token])
        rival = int(found["rivals"][moment, head])
        if rival >= 0 and not found["scores"][head, token].isnan():
            compared += 1
            assert held[moment, head, rival]
            assert found["scores"][head, token] <= found["rival_scores"][moment, head]
    assert compared or record().runs[2].policy == "local"


def test_a_full_cache_loses_nothing():
    found = kvkeep.explain(None, text(80), policies=["full"], max_new_tokens=4)
    assert found.runs[0].agreement == 1.0
    assert float(found.runs[0].missed.lost.max()) == 0.0
    assert not (found.runs[0].ledger.dropped >= 0).any()

"""Records of layers: attention against sums written out by hand, and what was held against what is in the slots."""

import itertools
import math

import pytest
import torch

import kvkeep
from kvkeep.attention_probe import LayerTape, TapeRecorder, members
from kvkeep.types import AttentionOptions


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_causal_softmax_averaged_over_the_group(window, softcap):
    torch.manual_seed(0)
    query, keys, sinks = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(4)
    options = AttentionOptions(scaling=0.3, softcap=softcap, window=window, sinks=sinks)
    found = LayerTape(query, keys, keys, options).weights(3).mean(dim=2).float()
    for head, row in itertools.product(range(2), range(2)):
        mean = torch.zeros(5)
        for member in (2 * head, 2 * head + 1):
            t = 3 + row
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            logits = {j: float(query[0, member, t] @ keys[0, head, j]) * 0.3 for j in seen}
            if softcap:
                logits = {j: softcap * math.tanh(x / softcap) for j, x in logits.items()}
            total = math.exp(float(sinks[member])) + sum(map(math.exp, logits.values()))
            for j, x in logits.items():
                mean[j] += math.exp(x) / total / 2
        torch.testing.assert_close(found[0, head, row], mean)


@pytest.mark.parametrize("window", [None, 9])
def test_a_recorder_remembers_what_a_bounded_layer_held(window):
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    given = LayerTape(query, keys, values, AttentionOptions(scaling=0.5, window=window))
    layer, twin = (kvkeep.Layer(kvkeep.parse("h2o:recent=2"), 6, window=window) for _ in range(2))
    recorder, held = TapeRecorder(layer), []
    for start, stop in itertools.pairwise([0, *range(15, 21)]):
        held.append(None if start == 0 else twin.store.positions.clone())
        given.feed(recorder, start, stop)
        given.feed(twin, start, stop)
    tape = recorder.tape()
    assert (tape.length, tape.options) == (20, given.options)
    for name in ("query", "keys", "values"):
        assert torch.equal(getattr(tape, name), getattr(given, name))
    assert torch.equal(layer.store.positions, twin.store.positions)
    found = tape.bounded()
    for row, head, t in itertools.product(range(2), range(2), range(15, 20)):
        slots = {j for j in held[t - 14][row, head].tolist() if j >= 0} | {t}
        seen = [j for j in sorted(slots) if window is None or t - j < window]
        for member in range(2):
            logits = (query[row, 2 * head + member, t] @ keys[row, head, seen].mT).double() * 0.5
            expected = torch.zeros(20, dtype=torch.float64)
            expected[seen] = logits.softmax(dim=-1)
            torch.testing.assert_close(found[row, head, member, t - 15], expected, rtol=1e-5, atol=1e-7)


def test_members_of_slots():
    positions = torch.tensor([[[3, -1, 0, -1]]], dtype=torch.int32)
    assert members(positions, 5).tolist() == [[[True, False, False, True, False]]]

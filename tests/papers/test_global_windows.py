"""One budget for the layers with full attention, in a model that has layers with sliding windows between them.

A model runs, and `rules_prompt.AdaKV` gets the queries, keys and values of all its layers with full attention, as those
of one layer with all their heads.
"""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import kvkeep
from kvkeep import BoundedCache, Layer, parse
from kvkeep.cache import shared_budget
from kvkeep.types import Phase

from .lockstep import retained
from .loops import Sequence, TooCloseError
from .oracles import rule

FULL, OTHERS, WINDOW = (1, 3, 4), (0, 2, 5), 7
OPTIONS = "window=2,kernel=3"
CONFIG = Gemma3TextConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=WINDOW,
    layer_types=["full_attention" if layer in FULL else "sliding_attention" for layer in range(6)],
)


@functools.cache
def model():
    torch.manual_seed(3)
    return kvkeep.attach(AutoModelForCausalLM.from_config(CONFIG).eval())


@torch.inference_mode()
def run(seed, budgets, pads, turns, monkeypatch):
    """What the layers got in each turn, by layer, and what they held after it."""
    cache = BoundedCache(CONFIG, f"snapkv:{OPTIONS}", budgets, head_budget="global:0.3")
    generator, step, got = torch.Generator().manual_seed(seed), Layer.step, {}

    def noting(layer, *new, **given):
        got[layer._index] = (new, {**given, "out": step(layer, *new, **given)})
        return got[layer._index][1]["out"]

    mask = torch.ones(len(pads), 0, dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setattr(Layer, "step", noting)
        for number, turn in enumerate(turns):
            ids, real = torch.randint(61, (len(pads), turn), generator=generator), torch.ones(len(pads), turn).long()
            for row, pad in enumerate(pads if not number else ()):
                real[row, :pad] = 0
            mask, cache.phase = torch.cat([mask, real], dim=1), Phase.PREFILL if turn > 1 else Phase.DECODE
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -turn:]
            model()(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache)
            held = {number: retained(layer) for number, layer in cache.bounded_layers().items()}
            yield real.bool(), dict(got), held


def by_hand(sequence, row, real, got):
    """Feed a row of the loops its tokens of a turn, of all layers that share; the outputs of these layers."""
    parts = [[x[row][:, real[row]] for x in (*got[layer][0], got[layer][1]["out"])] for layer in FULL]
    queries, keys, values, found = (torch.cat(each) for each in zip(*parts, strict=True))
    out = sequence.feed(*(x.tolist() for x in (queries, keys, values)), decode=got[FULL[0]][1]["phase"] is Phase.DECODE)
    torch.testing.assert_close(found.double(), torch.tensor(out, dtype=torch.float64), atol=2e-5, rtol=1e-5)


def compare(seed, budgets, pads, turns, monkeypatch):
    """Compare a model's layers with full attention with the loops, and the others with layers that know of no rule."""
    sequences = [
        Sequence(rule(f"adakv:{OPTIONS},alpha=0.3", budget, 2 * len(FULL)), CONFIG.query_pre_attn_scalar**-0.5)
        for budget in budgets
    ]
    plain = {layer: Layer(parse(f"snapkv:{OPTIONS}"), budgets, index=layer, window=WINDOW) for layer in OTHERS}
    for real, got, held in run(seed, budgets, pads, turns, monkeypatch):
        for row, sequence in enumerate(sequences):
            by_hand(sequence, row, real, got)
            assert [head for layer in FULL for head in held[layer][row]] == sequence.kept
        for number, layer in plain.items():
            new, given = got[number]
            layer.step(*new, **{name: x for name, x in given.items() if name != "out"})
            assert retained(layer) == held[number]
    assert all(len({len(head) for head in sequence.kept}) > 1 for sequence in sequences)
    return held


@pytest.mark.parametrize(
    ("budgets", "pads", "turns"),
    [
        ([5], (0,), (30, *(1,) * 6)),
        ([12, 5], (0, 9), (30, *(1,) * 5)),
        ([4, 9], (3, 0), (11, 13, 1, 1, 12, 1)),
    ],
)
def test_layers_with_full_attention_share_what_the_loops_share(budgets, pads, turns, monkeypatch):
    """Whether tokens that cannot stay go early or not."""
    monkeypatch.setattr(shared_budget, "WORTH", 1.0)
    for at_once in (0, 1e9):
        monkeypatch.setattr(shared_budget, "AT_ONCE", at_once)
        held = clear(budgets, pads, turns, monkeypatch)
        for layer in OTHERS:
            for row, budget in zip(held[layer], budgets, strict=True):
                assert all(len(head) == min(budget, WINDOW - 1) for head in row)


def clear(*case):
    """Compare on the first seed under which every decision of the loops is clear; what the layers hold at the end."""
    for seed in range(20):
        try:
            return compare(seed, *case)
        except TooCloseError:
            continue
    raise AssertionError("no seed keeps the decisions apart")

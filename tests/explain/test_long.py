"""A long text: the recorder's work and memory grow as attention itself does, counted and not timed."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvkeep
from explain.records import text
from kvkeep import attention_probe
from kvkeep.backends import choose, layer_ops

pytestmark = pytest.mark.skipif(
    choose(torch.device("cpu"), torch.float32).name != "native",
    reason="without a compiler torch's own operations attend, and are counted as well",
)
BUDGET = 64
NEW_TOKENS = 2


class Made(TorchDispatchMode):
    """Counts the elements that torch's operations write, apart from views."""

    def __init__(self):
        super().__init__()
        self.all = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            for one in tree_leaves(found):
                size = one.numel() if isinstance(one, torch.Tensor) else 0
                self.all, self.largest = self.all + size, max(self.largest, size)
        return found


def recorded(monkeypatch, tokens, moments):
    """A record in so many moments of the prompt: torch's elements, and the products of queries and keys in watches."""
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: False)  # else products of many rows have copies of weights
    model, tokenizer = kvkeep.load()
    said = text(tokens)
    chunk = math.ceil(len(tokenizer(said)["input_ids"]) / moments)
    products = {"bounded": 0, "full": 0}
    backend = choose(torch.device("cpu"), torch.float32)

    class Counting:
        def attend(self, inputs):
            query, slots, *_ = inputs
            seen = slots.keys.shape[2]
            bounded = slots.keys is slots.values
            assert not bounded or seen <= BUDGET + chunk + 1
            products["bounded" if bounded else "full"] += query.shape[2] * seen
            return backend.attend(inputs)

    monkeypatch.setattr(attention_probe, "choose", lambda device, dtype: Counting())
    with Made() as made:
        found = kvkeep.explain(
            model,
            said,
            tokenizer=tokenizer,
            policies=["h2o", "local"],
            budget=BUDGET,
            prefill_chunk=chunk,
            max_new_tokens=NEW_TOKENS,
        )
    return found, made, products


@pytest.mark.slow
def test_work_grows_no_faster_than_attention(monkeypatch):
    moments = 16
    short, few, seen = recorded(monkeypatch, 1000, moments)
    long, many, more = recorded(monkeypatch, 4000, moments)
    times = len(long.tokens) / len(short.tokens)
    assert times > 3.5
    assert many.all < 1.2 * times * few.all  # linear: the moments are as many
    for found, made in ((short, few), (long, many)):
        widest = max(256 * 3, len(found.heads) * 64)  # numbers of one token in one tensor: layers of the model, heads
        assert made.largest <= 4 * widest * len(found.tokens)
    chunks = [one.chunk for one in (short, long)]
    assert more["bounded"] / seen["bounded"] < 1.1 * times * (BUDGET + chunks[1]) / (BUDGET + chunks[0])
    layers = len({layer for layer, _ in long.heads})
    answers = [len(run.answer) for run in long.runs] + [len(long.answer)]
    n = len(long.tokens)
    assert more["full"] <= layers * (n * (n + long.chunk) / 2 + sum(answers) * (n + NEW_TOKENS))  # each token once

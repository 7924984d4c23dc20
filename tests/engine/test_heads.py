"""State that a KV head has once: rows of the engine carry it, whatever policies share them."""

from typing import ClassVar

import pytest
import torch

from kvkeep.engine import Engine, Request
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import PolicyError
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep.types import bytes_of

from .models import alone, model
from .test_equal import prompt_of

POLICY = "leverage:recent=3,sinks=2"


class Twice(Policy):
    """Two states of the same axes beside one of others and a state of slots."""

    slots: ClassVar = {"mine": 0.0}
    summaries: ClassVar = {"one": "D", "two": "D", "number": "", "values": "D E"}

    def score(self, view, state):
        return view.positions.float()


def run(engine, requests):
    numbers, found = [engine.add(request) for request in requests], {}
    while engine.busy:
        found |= {event.id: event.result.token_ids for event in engine.step() if event.result}
    return [found[number] for number in numbers]


@pytest.mark.parametrize("own", ["local", POLICY, "h2o:recent=2"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_row_gets_what_it_gets_alone_beside_other_policies(own, chunk):
    """More requests than rows, so that rows are moved, released and used again."""
    policies = [POLICY, "local", POLICY, "h2o:recent=2", POLICY, POLICY, "local"]
    requests = [
        Request(
            prompt=prompt_of(i, 8 + 5 * i % 23), sampling=SamplingParams(max_new_tokens=4 + i), policy=policy, budget=9
        )
        for i, policy in enumerate(policies)
    ]
    found = run(Engine(model("llama"), policy=own, budget=9, rows=3, prefill_chunk=chunk), requests)
    for request, got in zip(requests, found, strict=True):
        assert got == alone("llama", request.prompt, request.sampling.max_new_tokens, request.policy, 9, chunk)


def test_the_memory_of_heads_is_counted_and_refused_where_there_is_none():
    rows = KVManager(model("llama"), parse("local"), 9)
    rows.allocate(2, most_bytes=2 * rows.row_bytes)
    assert not rows.takes(parse(POLICY))
    rows = KVManager(model("llama"), parse("local"), 9)
    more = 4 * 2 * 3 * 2 * (8 * 8 + 8 + 1)  # float32, rows, layers, KV heads
    rows.allocate(2, most_bytes=2 * rows.row_bytes + more)
    assert rows.takes(parse(POLICY))
    before = rows.memory().allocated_bytes
    rows.begin(1, budget=9, policy=parse(POLICY))
    assert rows.memory().allocated_bytes == before + more
    rows.begin(0, budget=9, policy=parse(POLICY))
    assert rows.memory().allocated_bytes == before + more
    assert KVManager(model("llama"), parse(POLICY), 9).row_bytes == rows.row_bytes + more // 2


def test_policies_share_tensors_of_the_same_axes():
    rows = KVManager(model("llama"), Twice(), 9)
    rows.allocate(2)
    held = bytes_of(tensor for block in rows._blocks for tensor in block.per_row().values())
    rows.begin(0, budget=9, policy=parse(POLICY))
    block = rows._blocks[0]
    mine, other = block.under(Twice.slots, Twice.summaries), block.under({}, parse(POLICY).summaries)
    assert list(mine.state) == ["mine", "one", "two", "number", "values"]
    assert mine.state["one"] is other.state["mean"]
    assert mine.state["two"] is not mine.state["one"]
    assert mine.state["number"] is other.state["count"]
    added = bytes_of(tensor for one in rows._blocks for tensor in one.per_row().values()) - held
    assert added == 4 * 2 * 3 * 2 * 8 * 8  # the scatter alone
    block.state["D#0"].fill_(7.0)
    rows.begin(1, budget=9)
    assert block.state["D#0"][1].eq(0).all()
    assert block.state["D#0"][0].eq(7).all()
    assert torch.equal(block.part(0, 1).state["D#0"], block.state["D#0"][:1])


class Wrong(Policy):
    """An axis that heads do not have."""

    summaries: ClassVar = {"one": "D G"}

    def score(self, view, state):
        return view.positions.float()


def test_an_axis_that_does_not_exist_is_refused():
    with pytest.raises(PolicyError, match=r"has the axes 'D G', and a head has no 'G'\. An axis is D"):
        KVManager(model("llama"), Wrong(), 9)

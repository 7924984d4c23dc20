"""A row is copied out of all layers at once, and put back: as if every layer were copied by itself."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kvkeep.engine import Request
from kvkeep.kv.row_copy import take_row, take_rows
from kvkeep.snapshot.contents import put

from .session_models import engine_of, short
from .test_equal import prompt_of


def engine_with(policy="h2o", name="gemma2"):
    """An engine with a sequence in each of its rows."""
    engine = engine_of(policy, 10, name=name, rows=3)
    for i in range(3):
        engine.add(Request(prompt=prompt_of(i, 30 + i), sampling=short(50)))
    for _ in range(6):
        engine.step()
    return engine


def blocks_of(engine):
    under = engine.policy
    return [block.under(under.slots, under.summaries) for block in engine._kv._blocks]


def same(one, other):
    assert (one.cut, one.capacity, one.budget, one.pins) == (other.cut, other.capacity, other.budget, other.pins)
    assert one.tensors.keys() == other.tensors.keys()
    assert torch.equal(one.positions, other.positions)
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "adakv:window=2", "leverage:recent=2"])
@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_row_of_all_layers_is_what_the_rows_of_its_layers_are(policy, name):
    engine = engine_with(policy, name)
    for row in range(3):
        found = engine._kv.take(row)
        assert all(same(one, take_row(block, row)) for one, block in zip(found.layers, blocks_of(engine), strict=True))
        assert engine._kv.memory_of(row) == sum(
            (block.memory() for block in engine._kv.blocks_of(row)), type(engine._kv.memory())()
        )


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_copy_goes_back_as_a_whole_or_layer_by_layer(name):
    engine = engine_with(name=name)
    rows = engine._kv
    found = rows.take(1)
    apart = replace(found, layers=tuple(replace(one, tensors=dict(one.tensors)) for one in found.layers))
    for contents in (found, apart):
        rows.begin(2, budget=10, contents=contents)
        again = rows.take(2)
        assert all(same(*pair) for pair in zip(found.layers, again.layers, strict=True))
    changed = dict(found.layers[0].tensors, **{"store.keys": found.layers[0].tensors["store.keys"] + 1})
    other = replace(found, layers=(replace(found.layers[0], tensors=changed), *found.layers[1:]))
    rows.begin(2, budget=10, contents=other)
    assert torch.equal(rows.take(2).layers[0].tensors["store.keys"], changed["store.keys"])
    put(found, blocks_of(engine), 0)  # into blocks that know of no stack
    assert all(same(*pair) for pair in zip(found.layers, rows.take(0).layers, strict=True))


def test_layers_that_differ_in_occupied_slots_share_no_tensors():
    engine = engine_with(name="llama")
    block = engine._kv._blocks[0].under(engine.policy.slots, {})
    assert len({id(copy.pack) for copy in take_rows(block, slice(0, 3))}) == 1
    block.store.positions[1, :, 3:] = -1
    copies = take_rows(block, slice(0, 3))
    assert copies[1].used == 3
    assert len({id(copy.pack) for copy in copies}) == 3
    assert sum(copy.tensors["store.keys"].untyped_storage().nbytes() for copy in copies) == sum(
        copy.tensors["store.keys"].nbytes for copy in copies
    )


def test_a_copy_that_nobody_needs_is_freed_at_once():
    contents = engine_with()._kv.take(0)
    held = [weakref.ref(one.pack) for one in contents.layers]
    gc.disable()
    try:
        del contents
        assert all(one() is None for one in held)
    finally:
        gc.enable()

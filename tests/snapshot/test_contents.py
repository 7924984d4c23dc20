"""A row that is taken out of layers and put back goes on bit for bit as before."""

import itertools

import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep.cache.layer import Layer
from kvkeep.cache.row_snapshot import new_block
from kvkeep.errors import ShapeError
from kvkeep.kv.block import Block
from kvkeep.snapshot.contents import put, take
from kvkeep.testing import Case, Tape
from kvkeep.types import Phase

CASE = Case(rows=2, prompt=20, steps=14, budget=8, padding=3)
SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
POLICIES = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in kvkeep.available_policies()]


def made(policy, case=CASE):
    budget = case.budget if policy.evicts else case.prompt + case.steps
    return Layer(policy, budget, index=1, prefill_chunk=case.chunk)


def feed(layer, tape, start, stop, case=CASE):
    phase = Phase.PREFILL if start == 0 else Phase.DECODE
    real = tape.real[:, start:stop]
    out = layer.step(*tape.at(slice(start, stop)), options=case.options, phase=phase, real=real)
    return out.masked_fill(~real[:, None, :, None], 0)


def run(layer, tape, start, stop):
    bounds = [0, *range(CASE.prompt, stop + 1)] if start == 0 else range(start, stop + 1)
    return [feed(layer, tape, a, b) for a, b in itertools.pairwise(bounds)]


def same(one, other):
    """Whether two layers hold the same tokens in the same slots, with the same state."""
    held = one.store.positions >= 0
    ours, theirs = one.block.opened().per_row(), other.block.opened().per_row()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if name in one.block.opened().per_slot():
            assert torch.equal(tensor[held], theirs[name][held]), name
        else:
            assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(one.store.positions, other.store.positions)


STOPS = [(name, stop) for name in POLICIES for stop in (20, 21, 27)]


@pytest.mark.parametrize(("name", "stop"), sweep(STOPS, lambda case: STOPS.index(case) % 4 == 0))
def test_rows_go_on_in_a_new_layer_as_in_the_old_one(name, stop):
    policy, tape = kvkeep.parse(name), Tape.random(CASE)
    old, new = made(policy), made(policy)
    run(old, tape, 0, stop)
    rows = [take([old.block], row) for row in range(CASE.rows)]
    want = run(old, tape, stop, CASE.prompt + CASE.steps)
    new.hold(new_block(new, [row.layers[0] for row in rows], CASE.rows), columns=stop)
    for number, row in enumerate(rows):
        put(row, [new.block], number)
    got = run(new, tape, stop, CASE.prompt + CASE.steps)
    assert all(torch.equal(*pair) for pair in zip(want, got, strict=True))
    same(old, new)


@pytest.mark.parametrize("name", ["h2o:recent=2", "scissorhands", "adakv:window=2", "tova", "full"])
def test_a_row_can_be_rewound(name):
    """The row ran on, and other tokens lie in its slots. The other row is not touched."""
    policy, tape = kvkeep.parse(name), Tape.random(CASE)
    layer = made(policy)
    run(layer, tape, 0, 22)
    kept = [take([layer.block], row) for row in range(CASE.rows)]
    want = run(layer, tape, 22, 30)
    for again in range(2):
        put(kept[0], [layer.block], 0)
        before = {name: tensor[1].clone() for name, tensor in layer.block.per_row().items()}
        put(kept[1], [layer.block], 1)
        got = run(layer, tape, 22, 30)
        assert all(torch.equal(*pair) for pair in zip(want, got, strict=True)), again
    assert before["seen"] == 30 - CASE.padding


def test_rows_of_an_engine_take_part_through_their_policys_names():
    """The engine's blocks have more rows, more slots, and state under general names."""
    policy, tape = kvkeep.parse("h2o:recent=2"), Tape.random(Case(rows=1, prompt=20, steps=14, padding=0))
    layer = made(policy)
    run(layer, tape, 0, 25)
    kept = take([layer.block], 0)
    like = torch.zeros(4, CASE.heads, 1, CASE.dim)
    block = Block(like, like, numbers=[12], starts={"0": 0.0, "1": 0.0})
    block.store.positions[:] = 7
    block.budget = block.seen.new_full((4, 1), 12)
    places = {name: tensor.data_ptr() for name, tensor in block.per_row().items()}
    put(kept, [block.under(policy.slots, policy.summaries)], 2)
    assert {name: tensor.data_ptr() for name, tensor in block.per_row().items()} == places
    assert block.budget.flatten().tolist() == [12, 12, 8, 12]
    assert (block.store.positions[[0, 1, 3]] == 7).all()
    again = take([block.under(policy.slots, policy.summaries)], 2)
    for name, tensor in kept.layers[0].tensors.items():
        assert torch.equal(tensor, again.layers[0].tensors[name]), name
    assert again.layers[0].budget == 8


def test_a_copy_shares_no_memory_and_has_only_slots_in_use():
    layer = made(kvkeep.parse("h2o"))
    tape = Tape.random(CASE)
    feed(layer, tape, 0, 6)
    copy = take([layer.block], 1).layers[0]
    assert copy.seen == 3
    assert copy.used == 3
    assert copy.tensors["store.keys"].shape == (CASE.heads, 3, CASE.dim)
    places = {tensor.untyped_storage().data_ptr() for tensor in layer.block.per_row().values()}
    assert not places & {tensor.untyped_storage().data_ptr() for tensor in copy.tensors.values()}
    before = copy.tensors["store.keys"].clone()
    feed(layer, tape, 6, 7)
    assert torch.equal(before, copy.tensors["store.keys"])


def test_contents_that_do_not_fit_change_nothing():
    tape = Tape.random(CASE)
    layers = {name: made(kvkeep.parse(name)) for name in ("h2o", "tova", "full")}
    for layer in layers.values():
        feed(layer, tape, 0, 20)
    target = layers["h2o"].block
    before = {name: tensor.clone() for name, tensor in target.per_row().items()}
    wrong = [
        ([take([layers["tova"].block], 0)], "another policy or store"),
        ([take([layers["h2o"].block] * 2, 0)], "belongs to another model"),
        (
            [take([layers["h2o"].block.over({**target.per_row(), "store.keys": target.store.keys.double()})], 0)],
            "float64",
        ),
    ]
    for (contents,), message in wrong:
        with pytest.raises(ShapeError, match=message):
            put(contents, [target], 0)
    wide = made(kvkeep.parse("h2o"), Case(budget=30))
    feed(wide, tape, 0, 20)
    with pytest.raises(ShapeError, match=r"A row of 20 slots was given to a block of 9"):
        put(take([wide.block], 0), [target], 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.per_row().items())


def test_a_row_that_loses_nothing_is_itself():
    layer, tape = made(kvkeep.parse("h2o")), Tape.random(CASE)
    feed(layer, tape, 0, 7)
    row = take([layer.block], 0).layers[0]
    assert row.cut_back(row.seen) is row
    assert row.without(((50, 60),)) is row
    shorter = row.cut_back(3).without(((1, 2),))
    assert (shorter.seen, shorter.positions.tolist()) == (3, [[0, 2]] * CASE.heads)


def test_more_slots_keep_their_content():
    layer, tape = made(kvkeep.parse("h2o")), Tape.random(CASE)
    feed(layer, tape, 0, 20)
    before = take([layer.block], 1).layers[0]
    layer.block.widen(20)
    assert layer.block.store.capacity == 20
    after = take([layer.block], 1).layers[0]
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())

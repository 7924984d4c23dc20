"""Chunks of a prompt beside slots that are read in place: the same as beside copies, bit for bit."""

import gc
import weakref

import pytest
import torch

import kvkeep
from kvkeep.backends import SWITCH
from kvkeep.cache.layer import Layer
from kvkeep.kv.block import Block, settle
from kvkeep.kv.slot_codec import Beside, at, pieces
from kvkeep.kv.store import DenseStore
from kvkeep.rotary import Rotation
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots

B, HQ, HK, D, BUDGET = 3, 4, 2, 8, 12
STEPS = [(Phase.PREFILL, n) for n in (5, 4, 1)] + [(Phase.DECODE, 1)] * 2
STEPS += [(Phase.PREFILL, 7), *[(Phase.DECODE, 1)] * 5, (Phase.PREFILL, 2), (Phase.PREFILL, 23), (Phase.PREFILL, 1)]
STEPS += [(Phase.PROBE, 3), (Phase.DECODE, 1), (Phase.PREFILL, 6)]
POLICIES = [
    "h2o",
    "tova",
    "keydiff",
    "snapkv:window=4",
    "scissorhands",
    "ahakv:recent=3",
    "reread:recent=3",
    "random",
    "local",
]
OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "wide window": {"window": 30},
    "pins": {"pins": [((1, 3),), (), ((0, 1), (6, 8))]},
    "slot positions": {"rotation": Rotation(1.0 / 10_000 ** (torch.arange(0, D, 2) / D))},
    "small chunks": {"prefill_chunk": 3},
}


class Copying(DenseStore):
    """A dense store that shows no slots in place."""

    def lying(self, used):
        return None


class InPlace(DenseStore):
    """A dense store whose slots nobody copies for a chunk. Probes have no room and are joined."""

    def beside(self, keys, values, *, used):
        raise AssertionError("slots were copied")


def layer_over(kind, policy, dtype, **options):
    asked = kvkeep.parse(policy)
    like = torch.zeros(B, HK, 1, D, dtype=dtype)
    pins = options.get("pins", ())
    layer = Layer(asked, BUDGET, **options)
    block = Block(like, like, numbers=layer.budgets, starts=asked.slots, heads=asked.summaries, store=kind, pins=pins)
    return layer.over(block, columns=0)


def run(kind, policy, dtype, options, seed=0):
    """The layer and its output after every step; the same numbers each time."""
    layer, g = layer_over(kind, policy, dtype, **options), torch.Generator().manual_seed(seed)
    asked = AttentionOptions(scaling=0.4, window=options.get("window"))
    for phase, T in STEPS:
        query, keys, values = (torch.randn(B, T, h, D, generator=g).to(dtype).transpose(1, 2) for h in (HQ, HK, HK))
        real = torch.rand(B, T, generator=g) < 0.8
        real[0] = True
        yield layer, layer.step(query, keys, values, options=asked, phase=phase, real=real), real


@pytest.mark.long
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_is_the_same_as_beside_copies(policy, options, dtype, backend, monkeypatch):
    monkeypatch.setenv(SWITCH, backend)
    steps = zip(run(InPlace, policy, dtype, options), run(Copying, policy, dtype, options), strict=True)
    for (layer, out, real), (other, wanted, _) in steps:
        there = real[:, None, :, None]
        assert torch.equal(out * there, wanted * there)
        held, want = layer.store.slots(), other.store.slots()
        assert torch.equal(held.positions, want.positions)
        for mine, its in zip(held[:2], want[:2], strict=True):
            assert torch.equal(mine[held.positions >= 0], its[held.positions >= 0])
        for name, numbers in layer.state.items():
            occupied = slice(None) if name in layer.block.heads else held.positions >= 0
            assert torch.equal(numbers[occupied], other.state[name][occupied])
        assert torch.equal(layer.block.lost, other.block.lost)
        assert torch.equal(layer.seen, other.seen)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_lies_in_empty_slots_does_not_matter(backend, monkeypatch):
    monkeypatch.setenv(SWITCH, backend)
    found = [[], []]
    for outs, junk in zip(found, (0.0, torch.nan), strict=True):
        for layer, out, real in run(DenseStore, "h2o", torch.float32, {}):
            outs.append(out * real[:, None, :, None])
            empty = (layer.store.positions < 0)[..., None]
            for held in layer.store.slots()[:2]:
                held.masked_fill_(empty, junk)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def block_with(positions, capacity):
    """A block of one row and head that holds these positions; key and value of a token are its position."""
    like = torch.zeros(1, 1, 1, 1)
    block = Block(like, like, numbers=[capacity - 1], starts={"mass": 0.0})
    held = torch.tensor(positions, dtype=torch.int32)[None, None]
    block.store.fill(held[..., None].float(), held[..., None].float(), held)
    block.state["mass"][..., : held.shape[-1]] = held
    return block


@pytest.mark.parametrize(
    ("held", "new", "goes", "wanted"),
    [
        ([], [0, 1, 2], [], [0, 1, 2, -1, -1, -1]),
        ([], [-1, 0, 1], [], [0, 1, -1, -1, -1, -1]),
        ([0, 1], [2, 3], [], [0, 1, 2, 3, -1, -1]),
        ([4, -1, 2], [-1, 5, 6], [], [4, 5, 2, 6, -1, -1]),
        ([4, 1, 2, 0, 3], [5, 6, 7], [1, 4, 6], [5, 7, 2, 0, 3, -1]),
        ([4, 1, 2, 0, 3], [5, 6, 7], [1, 2, 4, 5, 6], [0, 3, 7, -1, -1, -1]),
        ([4, -1, 2, 0, 3], [5, 6], [5, 6], [4, 3, 2, 0, -1, -1]),
        ([4, 1, 2, 0, 3], [5, 6], [0, 1, 2, 3, 4], [5, 6, -1, -1, -1, -1]),
        ([4, 1, 2], [5, 6], [5, 6], [4, 1, 2, -1, -1, -1]),
    ],
)
@pytest.mark.parametrize("kind", [DenseStore, Copying])
def test_tokens_keep_their_slots_and_new_ones_fill_the_first_empty_ones(held, new, goes, wanted, kind):
    block = block_with(held, 6)
    block.store.__class__ = kind
    positions = torch.tensor([*held, *new], dtype=torch.int32)[None, None]
    numbers = positions[..., None].float()
    chunk = Slots(*(part[:, :, len(held) :] for part in (numbers, numbers, positions)))
    stays = (positions >= 0) & ~torch.isin(positions, torch.tensor(goes, dtype=torch.int32))
    settle(block, Slots(numbers, numbers, positions), stays, {"mass": numbers[..., 0]}, used=len(held), chunk=chunk)
    assert block.store.positions[0, 0].tolist() == wanted
    for tensor in (block.store.keys[..., 0], block.store.values[..., 0], block.state["mass"]):
        there = block.store.positions >= 0
        assert torch.equal(tensor[there], block.store.positions[there].float())


def test_slots_beside_a_chunk_are_copied_once_for_all_who_read_them():
    keys, values = torch.ones(1, 1, 3, 2), torch.full((1, 1, 3, 2), 2.0)
    held = Slots(keys, values, torch.tensor([[[7, EMPTY, 8]]], dtype=torch.int32))
    new = Slots(3 * keys[:, :, :1], values[:, :, :1], torch.tensor([[[9]]], dtype=torch.int32))
    both = Beside.of(held, new)
    other = at(both, both.positions - 1)
    for one in (both, other):
        one.forget()  # a checker of annotations may have read them
    assert [piece.keys.data_ptr() for piece in pieces(other)] == [keys.data_ptr(), new.keys.data_ptr()]
    assert other.keys[0, 0, :, 0].tolist() == [1.0, 0.0, 1.0, 3.0]
    assert other.keys is both.keys
    assert [tuple(tensor.shape) for tensor in both] == [(1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4)]
    assert other.positions[0, 0].tolist() == [6, -2, 7, 8]
    gone = weakref.ref(both.values)
    gc.disable()
    try:
        del both, other, one
        assert gone() is None  # no cycle holds it
    finally:
        gc.enable()


def test_a_step_that_fails_in_attention_leaves_the_slots_as_they_were(monkeypatch):
    layer = layer_over(DenseStore, "h2o", torch.float32)
    data = [torch.randn(B, h, 5, D) for h in (HQ, HK, HK)]
    layer.step(*data, options=AttentionOptions(scaling=0.4), phase=Phase.PREFILL)
    before = [tensor.clone() for tensor in (*layer.store.slots(), layer.state["mass"])]

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(layer._backend, "attend", fails)
    with pytest.raises(MemoryError):
        layer.step(*data, options=AttentionOptions(scaling=0.4), phase=Phase.PREFILL)
    assert layer.broken
    after = (*layer.store.slots(), layer.state["mass"])
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

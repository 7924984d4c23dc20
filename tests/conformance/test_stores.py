"""Every store against plain loops: what is filled, gathered, moved and counted; and a layer over it."""

import itertools
from dataclasses import replace

import pytest
import torch
from phases import phase_of

import kvkeep
from kvkeep import backends
from kvkeep.errors import BudgetError, ShapeError
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import POOLED, PooledStore, kind_of
from kvkeep.kv.row_copy import put_row, take_row
from kvkeep.kv.slot_codec import CODES
from kvkeep.kv.store import QUANTIZED, DenseStore
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import EMPTY, AttentionOptions

from .dummy_store import DummyStore

POOLS = [PooledStore, *POOLED.values()]
STORES = [DenseStore, DummyStore, *QUANTIZED.values(), *POOLS]
B, HK, D, E, SLOTS = 3, 2, 8, 6, 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=STORES)
def kind(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype)[6:])
def dtype(request):
    return request.param


def tokens(n, dtype=torch.float32, seed=0):
    """Keys and values of ``n`` tokens."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, HK, n, dim, generator=g).to(dtype) for dim in (D, E))


def filled(kind, dtype=torch.float32, n=5):
    """A store of seven slots with five tokens and a hole, what it was filled with, and its places one by one."""
    keys, values = tokens(n, dtype)
    positions = torch.arange(B * HK * n, dtype=torch.int32).view(B, HK, n) % 11
    positions[1, :, 2] = EMPTY
    store = kind(keys, values, SLOTS)
    store.fill(keys, values, positions)
    return store, (keys, values, positions)


def places():
    return itertools.product(range(B), range(HK), range(SLOTS))


def alike(kind, found, wanted, part):
    """Whether a store of this kind gives back a vector; ``part``: 0 for a key, 1 for a value.

    Codes err by at most half a step of the channels' range in each channel, before a key is turned back.
    """
    if kind.bits is None:
        return torch.equal(found.to(wanted.dtype), wanted)
    least, greatest = CODES[kind.bits[part]]
    step = 2 * wanted.float().norm() / (greatest - least)
    rounding = 2 * torch.finfo(found.dtype).eps * wanted.float().norm()
    return bool((found.float() - wanted.float()).norm() <= 0.505 * step * len(wanted) ** 0.5 + rounding)


def same(store, keys, values, positions):
    """Whether the store holds these tokens in these slots, and nothing else."""
    found, n = store.slots(), positions.shape[-1]
    for row, head, slot in places():
        wanted = int(positions[row, head, slot]) if slot < n else EMPTY
        assert int(found.positions[row, head, slot]) == wanted
        if wanted != EMPTY:
            for part, held in enumerate((keys, values)):
                assert alike(type(store), found[part][row, head, slot], held[row, head, slot], part)


def test_a_new_store_is_empty(kind, dtype):
    store = kind(*tokens(3, dtype), SLOTS)
    keys, values, positions = store.slots()
    assert (keys.shape, values.shape, positions.shape) == ((B, HK, SLOTS, D), (B, HK, SLOTS, E), (B, HK, SLOTS))
    assert (positions == EMPTY).all()
    assert positions.dtype == torch.int32
    opened = store.opened()
    assert opened.slots().positions is opened.positions
    assert (store.capacity, store.used()) == (SLOTS, 0)


def test_fill_replaces_everything(kind, dtype):
    store, held = filled(kind, dtype)
    same(store, *held)
    keys, values = tokens(SLOTS, dtype, seed=1)
    store.fill(keys, values, torch.full((B, HK, SLOTS), 40, dtype=torch.int32))
    store.fill(keys[:, :, :2], values[:, :, :2], torch.full((B, HK, 2), 9, dtype=torch.int32))
    same(store, keys, values, torch.full((B, HK, 2), 9))


@pytest.mark.parametrize("kind", [DenseStore, DummyStore], indirect=True)
def test_slots_are_live(kind):
    store, (keys, values, positions) = filled(kind)
    slots = store.slots()
    new = torch.arange(float(D)), torch.arange(float(E)), torch.tensor(90)
    for held, one in zip(slots, new, strict=True):
        held[2, 1, 3] = one
    keys[2, 1, 3], values[2, 1, 3], positions[2, 1, 3] = new
    same(store, keys, values, positions)


@pytest.mark.parametrize("used", [0, 3, 5, SLOTS])
def test_beside_puts_new_tokens_behind_copies(kind, dtype, used):
    store, (keys, values, positions) = filled(kind, dtype)
    for held in store.slots()[:2]:
        held[(store.positions < 0)[..., None].expand_as(held)] = torch.nan
    new = tokens(4, dtype, seed=2)
    found = store.beside(*new, used=used)
    for part, (joined, held, after) in enumerate(zip(found, (keys, values), new, strict=True)):
        assert joined.shape == (B, HK, used + 4, held.shape[-1])
        for row, head, slot in itertools.product(range(B), range(HK), range(used + 4)):
            place = (row, head, slot)
            if slot >= used:
                want = after[row, head, slot - used]
            else:
                is_held = slot < 5 and positions[place] >= 0
                want = held[place] if is_held else torch.zeros_like(held[0, 0, 0])
            assert torch.equal(joined[place].to(dtype), want) or (
                slot < used and alike(kind, joined[place], want, part)
            )
        joined.zero_()
    same(store, keys, values, positions)  # the copies were copies


@pytest.mark.parametrize("last", [None, 0, 3, 6])
def test_used_ends_at_the_last_occupied_slot(kind, last):
    store = kind(*tokens(1), SLOTS)
    opened = store.opened()
    if last is not None:
        opened.positions[1, 1, last] = 0
        opened.positions[0, 0, : last // 2] = 5
    assert opened.used() == (0 if last is None else last + 1)
    opened.close()
    assert store.used() == (0 if last is None else last + 1)


def test_fits_rows_heads_dims_dtype(kind, dtype):
    keys, values = tokens(3, dtype)
    store = kind(keys, values, SLOTS)
    other = torch.float16 if dtype is not torch.float16 else torch.float32
    assert store.fits(keys, values)
    assert store.fits(keys[:, :, :1], values[:, :, :1])  # of any length
    wrong = [
        (keys[1:], values[1:]),
        (keys[:, 1:], values[:, 1:]),
        (keys[..., 1:], values),
        (keys, values[..., 1:]),
        (keys.to(other), values.to(other)),
        (keys.to("meta"), values.to("meta")),
    ]
    assert not any(store.fits(*one) for one in wrong)


def test_wider_is_empty_and_for_the_same_rows(kind, dtype):
    store, held = filled(kind, dtype)
    wide = store.wider(SLOTS + 4)
    assert type(wide) is kind
    assert (wide.capacity, wide.used()) == (SLOTS + 4, 0)
    assert wide.fits(*tokens(1, dtype))
    assert wide.slots().keys.shape == (B, HK, SLOTS + 4, D)
    same(store, *held)


def test_bytes_of_a_token_are_those_of_the_model(kind, dtype):
    assert kind(*tokens(1, dtype), SLOTS).token_bytes == sum(x[0].nbytes for x in tokens(1, dtype))


def test_a_store_over_other_tensors_is_the_same_over_them(kind):
    store, (keys, values, positions) = filled(kind)
    assert all(len(tensor) == B for tensor in store.per_row().values())
    turned = store.over({name: tensor.flip(0) for name, tensor in store.per_row().items()})
    assert type(turned) is kind
    same(turned, keys.flip(0), values.flip(0), positions.flip(0))
    same(store, keys, values, positions)
    part = store.over({name: tensor[1:2] for name, tensor in store.per_row().items()})
    part.clear(slice(None))  # the same memory
    positions[1] = EMPTY
    same(store, keys, values, positions)


def block_of(kind, dtype=torch.float32, **options):
    keys, values = tokens(1, dtype)
    return Block(keys, values, numbers=[SLOTS - 1], starts={"mass": 0.0}, store=kind, **options)


def test_rows_of_a_block_are_moved_selected_shared_and_cleared(kind):
    block, (keys, values, positions) = block_of(kind), filled(kind)[1]
    block.store.fill(keys, values, positions)
    block.move_row(0, 2)
    keys[2], values[2], positions[2] = keys[0], values[0], positions[0]
    same(block.store, keys, values, positions)
    block.part(1, 3).clear_row(0)
    positions[1] = EMPTY
    same(block.store, keys, values, positions)
    block.select_rows(torch.tensor([2, 1, 0]))
    same(block.store, keys.flip(0), values.flip(0), positions.flip(0))
    assert block.memory().allocated_bytes == sum(tensor.nbytes for tensor in block.per_row().values())
    block.clear()
    assert block.store.used() == 0


@pytest.mark.parametrize(
    "kind", [DenseStore, DummyStore, *POOLS], indirect=True
)  # no layer gives codes such budgets elsewhere
def test_heads_with_budgets_of_their_own_get_a_wider_store(kind):
    block = block_of(kind)
    opened = block.opened()
    opened.spread(torch.tensor([[3, 9]] * B))
    assert type(block.store) is kind
    assert (opened.store.capacity, opened.state["mass"].shape[-1]) == (10, 10)
    block.close(opened)
    assert block.opened().state["mass"].shape == (B, HK, 10)


@pytest.mark.parametrize("kind", POOLS, indirect=True)
def test_a_pool_does_not_grow_and_refuses_more_than_it_holds(kind):
    block, g = block_of(kind), torch.Generator().manual_seed(3)
    before, addresses = block.memory().allocated_bytes, [x.data_ptr() for x in block.per_row().values()]
    for _ in range(20):
        first = torch.randint(0, 2 * SLOTS - 1, (B, 1), generator=g)
        opened = block.opened()
        opened.spread(torch.cat([first, 2 * SLOTS - 2 - first], dim=1))
        block.close(opened)
        sizes = block.store.sizes
        assert (sizes.sum(dim=1) == 2 * SLOTS).all()
        assert torch.equal(block.store.starts, sizes.cumsum(dim=1) - sizes)
        assert block.store.capacity == sizes.max()
    assert block.memory().allocated_bytes == before
    assert [x.data_ptr() for x in block.per_row().values()] == addresses
    with pytest.raises(ShapeError, match=r"The heads of a row need 15 slots, and its pool has 14\."):
        block.opened().spread(torch.tensor([[6, 7]] * B))


def test_a_pool_is_as_large_as_the_largest_row_of_budgets():
    like = tokens(1)
    numbers = [(3, 9), (2, 2), (7, 1)]
    block = Block(*like, numbers=numbers, starts={}, store=PooledStore)
    assert block.store.entries.shape == (B, 2 * 7 + 1)
    assert torch.equal(block.store.sizes, torch.tensor(numbers) + 1)
    assert torch.equal(block.budget, torch.tensor(numbers))
    assert Block(*like, numbers=[(3, 10)], starts={}, store=PooledStore).store.entries.shape == (B, 17)  # rounded up
    with pytest.raises(BudgetError, match="3 budgets were given for 2 KV heads"):
        Block(*like, numbers=[(1, 2, 3)], starts={}, store=PooledStore)


@pytest.mark.parametrize("kind", POOLS, indirect=True)
def test_rows_of_other_divisions_share_a_pooled_block(kind):
    block = block_of(kind)
    sizes = torch.tensor([[3, 11], [13, 1], [7, 7]])
    opened = block.opened()
    opened.spread(sizes - 1)
    keys, values = tokens(13)
    positions = torch.arange(13, dtype=torch.int32).repeat(B, HK, 1)
    positions = positions.masked_fill(positions >= sizes[..., None] - 1, EMPTY)
    opened.store.fill(keys, values, positions)
    opened.state["mass"].copy_(torch.arange(B * HK * 13.0).view(B, HK, 13))
    wanted = {name: held.clone() for name, held in opened.per_row().items()}
    block.close(opened)
    block.move_row(1, 0)
    wanted = {name: held[[1, 1, 2]] for name, held in wanted.items()}
    copies = [take_row(block, row) for row in range(B)]
    block.select_rows(torch.tensor([2, 0, 1]))
    for row, copy in zip((1, 2, 0), copies, strict=True):
        put_row(block, row, copy)
    found, real = block.opened().per_row(), wanted["store.positions"][[2, 0, 1]] >= 0
    for name, held in wanted.items():
        one, other = found[name], held[[2, 0, 1]]
        of_slots = name in block.opened().per_slot()
        assert torch.equal(one[real], other[real]) if of_slots else torch.equal(one, other)
    with pytest.raises(ShapeError, match="of head 1, and its budget has 1"):
        put_row(block, 0, replace(copies[1], positions=copies[1].positions.clamp(min=0)))
    with pytest.raises(ShapeError, match="A row of 15 slots was given to a block with 14 slots for all heads"):
        put_row(block, 0, replace(copies[1], budget=(12, 1)))


POLICIES = ["local", "h2o:recent=3", "scissorhands", "snapkv:window=4", "adakv:window=4", "tova"]
BUDGET = 12


def run(kind, policy, dtype, chunk):
    """Prompts with padding and single tokens through a layer over a store of this kind; each row's tokens beside it."""
    g = torch.Generator().manual_seed(4)
    asked = kvkeep.parse(policy)
    block = Block(*tokens(1, dtype), numbers=[BUDGET], starts=asked.slots, store=kind)
    layer = kvkeep.Layer(asked, BUDGET, prefill_chunk=chunk).over(block, columns=0)
    seen = [[torch.empty(HK, 0, dim, dtype=dtype) for dim in (D, E)] for _ in range(B)]
    for T in (23, 1, 1, 1, 6, 1, 1):
        query = torch.randn(B, 2 * HK, T, D, generator=g).to(dtype)
        new = [torch.randn(B, HK, T, dim, generator=g).to(dtype) for dim in (D, E)]
        real = torch.ones(B, T, dtype=torch.bool)
        real[1, : T // 3] = False
        out = layer.step(query, *new, options=AttentionOptions(scaling=0.3), phase=phase_of(query), real=real)
        for row, held in enumerate(seen):
            held[:] = (torch.cat([old, one[row][:, real[row]]], dim=1) for old, one in zip(held, new, strict=True))
        yield layer, [out[row][:, real[row]] for row in range(B)], seen


@pytest.mark.long
@pytest.mark.parametrize(("policy", "chunk"), [("local", None), ("local", 5), ("h2o", None), ("scissorhands", 5)])
def test_a_layer_over_a_store_holds_the_originals(kind, policy, dtype, chunk):
    if kind in POOLS and policy == "scissorhands":
        pytest.skip("its heads hold equally many tokens")
    for layer, _, seen in run(kind, policy, dtype, chunk):
        keys, values, positions = layer.store.slots()
        for row, head in itertools.product(range(B), range(HK)):
            at = positions[row, head]
            held, n = at[at >= 0].tolist(), seen[row][0].shape[1]
            assert len(held) == len(set(held)) <= BUDGET
            if policy == "local":
                assert sorted(held) == list(range(max(0, n - BUDGET), n))
            for part, (found, original) in enumerate(zip((keys, values), seen[row], strict=True)):
                pairs = zip(found[row, head, at >= 0], original[head, held], strict=True)
                assert all(alike(kind, one, want, part) for one, want in pairs)


OF_BITS = [tuple(kind_of(bits, pooled=pooled) for pooled in (True, False)) for bits in (None, *KV_BITS)]


@pytest.mark.parametrize(("kind", "like"), [(DummyStore, DenseStore), *OF_BITS])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_does_the_same_over_any_store(kind, like, policy, dtype, monkeypatch):
    """To the bit: the definition computes in float64, and what was rounded on its way in would show."""
    monkeypatch.setenv(backends.SWITCH, "reference")
    if kind in POOLS and policy == "scissorhands":
        pytest.skip("its heads hold equally many tokens")
    if like.bits is not None and kvkeep.parse(policy).spreads:
        pytest.skip("codes side by side have equally many slots in every head")
    for (layer, outs, _), (dense, wanted, _) in zip(
        run(kind, policy, dtype, 5), run(like, policy, dtype, 5), strict=True
    ):
        assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))
        assert torch.equal(layer.store.positions, dense.store.positions)
        real = dense.store.positions >= 0
        assert all(torch.equal(layer.state[name][real], held[real]) for name, held in dense.state.items())


def test_a_layer_that_starts_anew_keeps_its_kind_of_store(kind):
    *_, (layer, _, _) = run(kind, "h2o", torch.float32, None)
    layer.select_rows(torch.tensor([0, 0, 1, 2]))
    layer.reset()
    query, new = torch.randn(2, 2 * HK, 4, D), [torch.randn(2, HK, 4, dim) for dim in (D, E)]
    layer.step(query, *new, options=AttentionOptions(scaling=0.3), phase=phase_of(query))
    assert type(layer.store) is kind
    assert layer.store.slots().keys.shape[:3] == (2, HK, BUDGET + 1)


def test_a_store_elsewhere_does_not_wait_to_count_its_slots(kind):
    store, (keys, values, _) = filled(kind)
    assert store.used() == 5
    assert store.capacity == SLOTS
    assert kind(keys.to("meta"), values.to("meta"), SLOTS).used() == SLOTS

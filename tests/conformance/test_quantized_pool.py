"""Slots of codes in a pool: every backend does over ranges what it does over codes side by side."""

import dataclasses

import pytest
import torch

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import Added, AttentionInputs, FusedStep, SlotLimits, in_codes, in_pool
from kvkeep.kv.pooled_store import PoolSlots, indices
from kvkeep.kv.slot_codec import LazySlots, Vectors, encode, encode_keys
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import AttentionOptions, Ranges

from .cases import BACKENDS, NOW, OF_TOKEN, ON_TOKEN, SLOW, backend_of, check_alike, on, token
from .test_pool import ASKED, PLAIN, ROTATION, SIZES, S


def laid(slots, kv_bits, sizes=SIZES):
    """The same slots as codes in a pool, with other codes everywhere else, and as codes side by side."""
    bits, (B, _, _, D), E = KV_BITS[kv_bits], slots.keys.shape, slots.values.shape[-1]
    keys, values = encode_keys(slots.keys.nan_to_num(0.0), bits[0]), encode(slots.values.nan_to_num(0.0), bits[1])
    held = {"keys": keys.numbers, "key_scales": keys.scales, "values": values.numbers, "value_scales": values.scales}
    P = int(sizes.sum(dim=1).max()) + 1
    starts = P - 1 - sizes.flip(1).cumsum(dim=1).flip(1)  # the last head ends where the pool does
    index = indices(starts, sizes, width=S, pool=P)
    positions = slots.positions.masked_fill(torch.arange(S) >= sizes[..., None], -1)
    blank = Vectors.blank(*(slots.keys.new_zeros(B, 1, dim) for dim in (D, E)), P, bits)
    pools = {name: (x.view(torch.uint8) + 119).view(x.dtype) for name, x in blank.tensors.items()}  # scales are not NaN
    for row, head in torch.cartesian_prod(*map(torch.arange, sizes.shape)).tolist():
        start, size = int(starts[row, head]), int(sizes[row, head])
        for name, pool in pools.items():
            pool[row, start : start + size] = held[name][row, head, :size]
    dtypes = slots.keys.dtype, slots.values.dtype
    pool = PoolSlots.of(Vectors(pools, dtypes, bits), positions.clone(), Ranges(starts, sizes.clone()), index)
    return pool, Vectors(held, dtypes, bits).slots(positions)


def moved(slots, name):
    """Slots where a backend works."""
    if not isinstance(slots, PoolSlots):
        parts = slots.coded_keys, slots.coded_values
        tensors = {"keys": parts[0].numbers, "key_scales": parts[0].scales}
        tensors |= {"values": parts[1].numbers, "value_scales": parts[1].scales}
        vectors = Vectors(tensors, (slots.dtype, slots.dtype), (parts[0].bits, parts[1].bits))
        return _there(vectors, name).slots(*on(name, slots.positions))
    parts = on(name, slots.positions, Ranges(slots.starts, slots.sizes), slots.entries)
    return PoolSlots.of(_there(slots.pool, name), *parts)


def _there(vectors, name):
    return vectors.each(lambda x: on(name, x)[0])


def given(kv_bits, D=32, dtype=torch.float32):
    query, slots, now = token(S, D, 3, dtype)
    return query, *laid(slots, kv_bits), now


def over(backend, slots, *, turned=False):
    """A backend as a layer has it over such slots."""
    backend = in_codes(backend, turned=turned)
    return in_pool(backend) if isinstance(slots, PoolSlots) else backend


@pytest.mark.long
@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "dummy"])
@pytest.mark.parametrize(("option", "statistic"), ASKED)
def test_attention_over_ranges_is_that_over_codes_side_by_side(name, option, statistic, kv_bits):
    query, pool, plain, now = given(kv_bits)
    sees = now[:, :, None] - plain.positions < (OF_TOKEN[option].window or NOW + 1)
    sees = ((plain.positions >= 0) & sees).any(dim=-1).repeat_interleave(3, dim=1)  # the output of others is undefined
    backend, pool, plain = backend_of(name), moved(pool, name), moved(plain, name)
    query, now, sees, asked = on(name, query, now, sees, (ON_TOKEN[statistic], OF_TOKEN[option]))
    asked = {"statistic": asked[0], "options": asked[1]}
    out, report = over(backend, pool).attend(AttentionInputs(query, pool, now, **asked))
    want, want_report = over(backend, plain).attend(AttentionInputs(query, plain, now, **asked))
    real = sees & (now >= 0)
    torch.testing.assert_close(out[real], want[real], rtol=1e-5, atol=1e-6)
    assert report.sums.keys() == want_report.sums.keys()
    for field, held in report.sums.items():
        torch.testing.assert_close(held, want_report.sums[field], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [8, 32, 80, 128])
def test_the_kernel_reads_codes_of_ranges_bit_for_bit_where_they_lie(D, dtype, kv_bits, monkeypatch):
    monkeypatch.setattr(PoolSlots, "laid", property(lambda slots: pytest.fail("the pool was copied")))
    query, pool, plain, now = given(kv_bits, D, dtype)
    backend = backend_of("native")
    out, report = over(backend, pool).attend(AttentionInputs(query, pool, now, statistic=Low(), options=PLAIN))
    want, want_report = backend.attend(AttentionInputs(query, plain, now, statistic=Low(), options=PLAIN))
    assert torch.equal(out, want)
    assert all(torch.equal(held, want_report.sums[field]) for field, held in report.sums.items())


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in SLOW])
def test_keys_of_ranges_are_turned_to_their_ranks(name, kv_bits):
    query, pool, plain, now = given(kv_bits)
    for slots in (pool, plain):
        slots.positions.copy_(torch.where(slots.positions >= 0, torch.arange(S, dtype=torch.int32), -1))
    backend, now = backend_of(name).at_ranks(ROTATION), now.clamp(max=S)
    found, want = (
        over(backend, slots, turned=True).attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
        for slots in (pool, plain)
    )
    check_alike(found, want, now, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_token_is_coded_into_the_range_of_its_head_and_nowhere_else(name, kv_bits):
    _, pool, _, _ = given(kv_bits)
    pool.positions[:, :, 0] = -1  # every head has an empty slot
    pool = moved(pool, name)
    assert pool.keys.shape == (6, 2, S, 32)  # a copy that is old when the token has been written
    before = {name: held.clone() for name, held in pool.pool.tensors.items()}
    new = [torch.randn(6, 2, 1, 32).to(pool.starts.device) for _ in range(2)]
    new[1][4, 1, 0, 7] = torch.inf
    now = torch.tensor([NOW + 1, -1, NOW + 1, NOW + 1, NOW + 1, NOW + 1])[:, None].to(pool.starts.device)
    slot = over(backend_of(name), pool).append(pool, *new, now)
    assert (slot[..., 0] < pool.sizes).all()
    entries = pool.entries.gather(-1, slot)[..., 0] % pool.pool.tensors["keys"].shape[1]
    want = Vectors.of(*new, KV_BITS[kv_bits])[0].tensors
    positions = pool.positions.gather(-1, slot)[..., 0]
    for row, place in enumerate(now[:, 0].tolist()):
        assert positions[row].tolist() == [place, -1 if row == 4 else place]
        for name, held in pool.pool.tensors.items():
            if place >= 0:
                assert torch.equal(held[row, entries[row]], want[name][row, :, 0])
            rest = torch.ones(held.shape[1], dtype=torch.bool, device=held.device)
            rest[entries[row]] = False
            assert torch.equal(held[row, rest], before[name][row, rest])
    assert torch.allclose(pool.values.gather(2, slot[..., None].expand(-1, -1, -1, 32))[5], new[1][5], atol=0.5)


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("rotation", [None, ROTATION], ids=["true", "slot"])
@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_a_fused_step_over_ranges_is_that_over_codes_side_by_side(kv_bits, window, rotation):
    query, pool, plain, now = given(kv_bits)
    where = [pool.sizes - 1, torch.zeros_like(pool.sizes)][window is None]
    for slots in (pool, plain):
        slots.positions.scatter_(-1, where[..., None], -1)
    options = dataclasses.replace(PLAIN, window=window)
    seen, stay = now[:, 0] + 1, (pool.positions >= 0).sum(dim=-1).clamp(min=1)
    limits = SlotLimits(seen, 1, stay // 2, stay, window)  # recent tokens of each head, too
    new, backend, found = (torch.randn(6, 2, 1, 32), torch.randn(6, 2, 1, 32)), backend_of("native"), []
    new[0][4, 0, 0, 3] = torch.nan
    backend = backend if rotation is None else backend.at_ranks(rotation)
    for slots in (pool, plain):
        sums, lost = torch.ones(6, 2, S), torch.zeros(6, 2, 2)
        added = Added((sums,), is_score=True, lost=lost)
        out = over(backend, slots).step(FusedStep(query, slots, new, now, Mass(), options, added, limits))
        assert out is not None
        assert isinstance(slots, LazySlots)
        found.append((out, sums, lost, slots.positions))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    held = plain.positions == NOW
    assert torch.equal(pool.keys[held], plain.keys[held])
    assert torch.equal(pool.values[held], plain.values[held])


@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_a_batch_of_ranges_is_each_row_alone(kv_bits):
    query, pool, _, now = given(kv_bits)
    backend = backend_of("native")
    out, report = backend.attend(
        AttentionInputs(query, pool, now, statistic=Mass(), options=AttentionOptions(scaling=0.2))
    )
    for row in range(6):
        rows = slice(row, row + 1)
        ranges, held = Ranges(pool.starts[rows], pool.sizes[rows]), pool.pool.each(lambda x, rows=rows: x[rows])
        index = indices(*ranges[:2], width=S, pool=held.tensors["keys"].shape[1])
        one = PoolSlots.of(held, pool.positions[rows], ranges, index)
        got, mass = backend.attend(AttentionInputs(query[rows], one, now[rows], statistic=Mass(), options=PLAIN))
        assert torch.equal(got, out[rows])
        assert torch.equal(mass.mass, report.mass[rows])

"""Slots of codes: every backend does over them what it does over the vectors that they stand for."""

import pytest
import torch

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, in_codes
from kvkeep.kv.slot_codec import CodedSlots, encode, encode_keys
from kvkeep.kv_bits import KV_BITS
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions

from .cases import BACKENDS, NOW, OF_TOKEN, ON_TOKEN, backend_of, check_alike, on, token

PLAIN = AttentionOptions(scaling=0.2)
ROTATION = Rotation(1.0 / 100 ** (torch.arange(0, 32, 2) / 32), scaling=1.1)
S = 70
DTYPES = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (0.04, 0.02), torch.float16: (6e-3, 3e-3)}
"""Tolerances, relative and absolute: the query is turned in float32 and rounded to its dtype once more."""


def coded(slots, kv_bits):
    """The same slots as codes, and the vectors that these stand for, side by side."""
    key_bits, value_bits = KV_BITS[kv_bits]
    keys, values = slots.keys.nan_to_num(0.0), slots.values.nan_to_num(0.0)
    parts = encode_keys(keys, key_bits), encode(values, value_bits)
    found = CodedSlots.of(*parts, slots.positions.clone(), slots.keys.dtype)
    return found, found.copied()


def moved(slots, name):
    """Slots of codes where a backend works."""
    (keys, scales, bits), (values, value_scales, value_bits) = slots.coded_keys, slots.coded_values
    keys, scales, values, value_scales, positions = on(name, keys, scales, values, value_scales, slots.positions)
    kinds = type(slots.coded_keys)
    return CodedSlots.of(kinds(keys, scales, bits), kinds(values, value_scales, value_bits), positions, slots.dtype)


ASKED = [("plain", statistic) for statistic in ON_TOKEN] + [(options, "mass") for options in OF_TOKEN]


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("option", "statistic"), ASKED)
def test_attention_over_codes_is_that_over_their_vectors(name, option, statistic, kv_bits):
    query, slots, now = token(S, 32, 3, torch.float32)
    slots, plain = coded(slots, kv_bits)
    backend, slots = backend_of(name), moved(slots, name)
    query, plain, now, asked = on(name, query, plain, now, (ON_TOKEN[statistic], OF_TOKEN[option]))
    asked = {"statistic": asked[0], "options": asked[1]}
    out, report = in_codes(backend, turned=False).attend(AttentionInputs(query, slots, now, **asked))
    want, want_report = backend.attend(AttentionInputs(query, plain, now, **asked))
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real], want[real], rtol=2e-4, atol=2e-5)
    assert report.sums.keys() == want_report.sums.keys()
    for field, held in report.sums.items():
        if not field.startswith("low"):  # counts, which rounding may change next to the threshold
            torch.testing.assert_close(held, want_report.sums[field], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_queries_and_codes_of_any_dtype(D, dtype, kv_bits):
    query, slots, now = token(S, D, 3, dtype)
    slots, plain = coded(slots, kv_bits)
    backend = backend_of("torch")
    out, report = in_codes(backend, turned=False).attend(
        AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN)
    )
    want, want_report = backend.attend(AttentionInputs(query, plain, now, statistic=Mass(), options=PLAIN))
    rtol, atol = DTYPES[dtype]
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real], want[real], rtol=rtol, atol=atol)
    torch.testing.assert_close(report.mass, want_report.mass, rtol=10 * rtol, atol=atol)


@pytest.mark.parametrize("name", BACKENDS)
def test_keys_of_codes_are_turned_back_before_they_are_turned_to_their_ranks(name):
    query, slots, now = token(S, 32, 3, torch.float32)
    held = torch.where(slots.positions >= 0, torch.arange(S, dtype=torch.int32), -1)
    slots, plain = coded(slots._replace(positions=held), "4")
    slots, now = moved(slots, name), now.clamp(max=S)
    query, plain, now = on(name, query, plain, now)
    backend = backend_of(name).at_ranks(ROTATION)
    found = in_codes(backend, turned=True).attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    want = backend.attend(AttentionInputs(query, plain, now, statistic=Mass(), options=PLAIN))
    check_alike(found, want, now, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_token_is_coded_into_an_empty_slot_and_nowhere_else(name, kv_bits):
    _, slots, _ = token(S, 32, 3, torch.float32)
    slots, _ = coded(slots, kv_bits)
    slots.positions[:, :, 5] = -1  # every head has an empty slot
    slots = moved(slots, name)
    device, (rows, heads) = slots.positions.device, slots.positions.shape[:2]
    assert slots.keys.shape == (rows, heads, S, 32)  # a copy that is old when the token has been written
    before = [part.clone() for part in (*slots.coded_keys[:2], *slots.coded_values[:2])]
    new = [torch.randn(rows, heads, 1, 32).to(device) for _ in range(2)]
    new[0][1, 1, 0, 3] = torch.nan
    now = torch.full((rows, 1), NOW + 1).to(device)
    now[0] = -1
    slot = in_codes(backend_of(name), turned=False).append(slots, *new, now)
    keys, values = encode_keys(new[0], KV_BITS[kv_bits][0]), encode(new[1], KV_BITS[kv_bits][1])
    written = torch.zeros(rows, heads, S, dtype=torch.bool, device=device).scatter_(2, slot, True)
    for old, held, one in zip(
        before, (*slots.coded_keys[:2], *slots.coded_values[:2]), (*keys[:2], *values[:2]), strict=True
    ):
        assert torch.equal(held[~written], old[~written])
        assert torch.equal(held[1:][written[1:]].flatten(), one[1:].flatten())
    positions = slots.positions.gather(-1, slot)[..., 0]
    assert (positions[0] == -1).all()
    assert positions[1, 1] == -1  # a key that is no number: the slot is worth nothing
    assert positions[1, 0] == NOW + 1
    assert (positions[2:] == NOW + 1).all()
    assert torch.allclose(slots.values.gather(2, slot[..., None].expand(-1, -1, -1, 32)), new[1], atol=0.5)


def test_a_policy_that_looks_at_keys_sees_them_turned_back():
    _, slots, _ = token(S, 32, 3, torch.float32)
    original = slots.keys.nan_to_num(0.0)
    slots, plain = coded(slots, "8")
    error = (plain.keys - original).norm() / original.norm()
    assert error < 0.02
    assert torch.equal(slots._replace(positions=plain.positions).keys, plain.keys)
    assert [x.shape for x in slots] == [x.shape for x in plain]

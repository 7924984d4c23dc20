"""Codes of keys and values: their layout, their error, and what the Hadamard matrix is for."""

import math

import pytest
import torch

from kvkeep.kv.slot_codec import CodedSlots, KeyTransform, decode, encode, finite, hadamard
from kvkeep.kv_bits import group_size
from kvkeep.types import Slots

DIMS = [64, 128, 80, 96, 48, 16, 144, 576]


def relative_error(x, bits):
    return float(((decode(encode(x, bits), torch.float32) - x) ** 2).mean() / (x**2).mean())


def expected_error(group, bits, samples=1000):
    """A step's variance is step² / 12, and a step is the largest or the range of ``group`` Gaussian numbers over codes.

    E[x²] = ∫ 2 x P(X > x) dx. With 8 bits P(max <= x) = erf(x / √2) ** group. With 4 bits P(range <= x) is
    group · ∫ φ(y) (Φ(y + x) - Φ(y)) ** (group - 1) dy.
    """
    x = torch.linspace(0, 12, samples, dtype=torch.float64)
    if bits == 8:
        below = torch.erf(x / math.sqrt(2)) ** group
    else:
        y = torch.linspace(-8, 8, samples, dtype=torch.float64)
        density, inside = (-(y**2) / 2).exp() / math.sqrt(2 * math.pi), phi(y + x[:, None]) - phi(y)
        below = group * torch.trapezoid(density * inside ** (group - 1), y)
    steps = {8: 127, 4: 15}[bits]
    return float(torch.trapezoid(2 * x * (1 - below), x)) / steps**2 / 12


def phi(x):
    return (1 + torch.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_of_gaussian_vectors_is_that_of_the_closed_form(dim, bits):
    x = torch.randn(1, 2, 3000, dim, generator=torch.Generator().manual_seed(dim))
    # the channels at the ends have no error: below the form by about 1 / group, and with 4 bits 2 / group
    wanted = expected_error(group_size(dim), bits)
    assert relative_error(x, bits) == pytest.approx(wanted, rel=0.03 + {8: 1.5, 4: 2.5}[bits] / group_size(dim))


@pytest.mark.parametrize(
    ("dim", "group"),
    [(64, 64), (128, 64), (160, 32), (576, 64), (80, 80), (112, 112), (144, 144), (200, 200), (81, 81)],
)
def test_the_channels_that_share_a_scale(dim, group):
    assert group_size(dim) == group
    assert encode(torch.randn(1, 1, 2, dim), 8).scales.shape[-1] == dim // group
    assert encode(torch.randn(1, 1, 2, dim), 8).group == group
    if dim % 2 == 0:
        assert encode(torch.randn(1, 1, 2, dim), 4).scales.shape[-1] == 2 * dim // group
        assert encode(torch.randn(1, 1, 2, dim), 4).group == group


def reference_of_a_group(x):
    """Code one group at 4 bits in plain Python: the numbers, the scale and the offset."""
    half = lambda value: torch.tensor(value).clamp(-65504.0, 65504.0).half().float()  # noqa: E731
    if not all(map(math.isfinite, x)):
        return [0] * len(x), 0.0, 0.0
    x = torch.tensor(x)
    offset = half(float(x.min()) + 0.0)
    scale = half(max(float((x.max() - offset) / 15), 0.0))
    if scale == 0:
        return [0] * len(x), 0.0, float(offset)
    return [min(max(round(float((value - offset) / scale)), 0), 15) for value in x], float(scale), float(offset)


@pytest.mark.parametrize("dim", [64, 128, 96, 80, 6, 2])
def test_codes_of_4_bits_are_those_of_the_definition(dim):
    g = torch.Generator().manual_seed(dim)
    x = torch.randn(12, dim, generator=g) * torch.logspace(-9, 5, 12)[:, None]
    x[0], x[1], x[2, 1], x[3, 0], x[4], x[5] = 0.0, -0.0, torch.nan, -torch.inf, 3.7, -3.3e38
    x[6, -1] = 3e38
    codes, group = encode(x[None, None], 4), group_size(dim)
    for row, bytes_of_row, halves in zip(x, codes.numbers[0, 0], codes.scales[0, 0], strict=True):
        parts = zip(row.split(group), bytes_of_row.split(group // 2), halves.split(2), strict=True)
        for part, packed, (scale, offset) in parts:
            numbers = [*(packed & 15).tolist(), *(packed >> 4).tolist()]
            assert (numbers, float(scale), float(offset)) == reference_of_a_group(part.tolist())
            assert not (offset == 0 and (part == 0).all() and offset.signbit())


def test_a_group_of_equal_channels_costs_nothing():
    x = torch.full((1, 1, 2, 64), -2.5)
    assert torch.equal(decode(encode(x, 4), torch.float32), x)


def test_two_codes_of_a_group_share_a_byte_as_the_layout_says():
    x = torch.randint(-8, 8, (1, 1, 2, 128)).float()
    x[..., ::64], x[..., 1::64] = -8.0, 7.0  # the scale of each group is 1, and its offset -8
    codes = encode(x, 4)
    assert codes.numbers.dtype == torch.uint8
    assert codes.numbers.shape == (1, 1, 2, 64)
    assert codes.scales[0, 0].tolist() == [[1, -8, 1, -8]] * 2
    groups = codes.numbers.view(1, 1, 2, 2, 32)
    low, high = (groups & 15).int() - 8, (groups >> 4).int() - 8
    assert torch.equal(low, x.view(1, 1, 2, 2, 64)[..., :32].int())
    assert torch.equal(high, x.view(1, 1, 2, 2, 64)[..., 32:].int())
    assert torch.equal(decode(codes, torch.float32), x)


@pytest.mark.parametrize("dim", [*DIMS, 5, 1])
def test_the_hadamard_matrix_is_orthonormal_symmetric_and_its_own_inverse(dim):
    matrix = hadamard(torch.eye(dim))
    assert torch.allclose(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(dim), atol=1e-6)


def test_an_odd_head_dim_has_codes_of_8_bits():
    x = torch.randn(1, 1, 4, 5)
    assert relative_error(x, 8) < 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_of_any_size_are_coded_as_finite_ones(bits):
    x = torch.randn(1, 1, 8, 64) * torch.logspace(-40, 36, 8)[:, None]
    x[0, 0, 7, :] = torch.finfo(torch.float32).max
    found = decode(encode(x, bits), torch.float32)
    assert found.isfinite().all()
    assert encode(x, bits).scales.isfinite().all()
    fits = x.abs().amax(dim=-1) < 6e4
    assert ((found - x).abs().amax(dim=-1) <= x.abs().amax(dim=-1) / 7 + 1e-6)[fits].all()


@pytest.mark.parametrize("bits", [8, 4])
def test_copies_in_float16_are_finite_where_the_tokens_were(bits):
    """Rounded up, codes of the largest numbers stand for larger ones than float16 holds."""
    x = torch.full((1, 1, 4, 64), torch.finfo(torch.float16).max)
    x[..., 1] *= -1
    keys, values = encode(hadamard(x), bits), encode(x, bits)
    assert decode(values, torch.float32).max() >= 65520 or bits == 8  # rounds to infinity
    copies = CodedSlots.of(keys, values, torch.zeros(1, 1, 4, dtype=torch.int64), torch.float16)
    assert copies.keys.isfinite().all()
    assert copies.values.isfinite().all()
    assert copies.transformed().keys.isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_without_meaning_is_coded_as_zeros_and_its_neighbours_as_they_are(wrong, bits):
    x = torch.randn(1, 1, 3, 128)
    clean = decode(encode(x, bits), torch.float32)
    x[0, 0, 1, 70] = wrong
    found = decode(encode(x, bits), torch.float32)
    assert (found[0, 0, 1, 64:] == 0).all()
    clean[0, 0, 1, 64:] = 0
    assert torch.equal(found, clean)


def test_a_token_with_nan_in_one_head_may_not_take_a_slot_in_this_head():
    keys, values = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    keys[0, 1, 0, 3], values[1, 0, 0, 0] = math.nan, math.inf
    assert finite(keys, values).squeeze(-1).tolist() == [[True, False], [False, True]]


def logits_error(keys, query, bits, *, turn):
    """Error of attention's logits relative to their spread."""
    if turn:
        keys, query = hadamard(keys), hadamard(query)
    exact = query @ keys.mT
    return float((query @ decode(encode(keys, bits), torch.float32).mT - exact).std() / exact.std())


def test_outlier_channels_ruin_codes_of_4_bits_unless_keys_are_turned():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 500, 128, generator=generator)
    query = torch.randn(1, 1, 50, 128, generator=generator)
    keys[..., [3, 77]] += 40.0  # channels as they are seen in real keys: large, and equal in all tokens
    query[..., [3, 77]] = 0.05  # which the queries hardly use
    plain, turned = (logits_error(keys, query, 4, turn=turn) for turn in (False, True))
    assert plain > 0.75  # a step is 3 times the spread of the other channels
    assert turned < 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "most"),
    [(128, 0.08), (96, 0.08), (160, 0.08), (64, 0.12), (80, 0.23), (112, 0.22), (40, 0.35), (24, 0.4), (100, 0.55)],
)
def test_a_large_channel_anywhere(dim, most):
    """At 4 bits, one channel 30 times as large; where it is in a small block of the matrix, it costs most."""
    generator = torch.Generator().manual_seed(0)
    turned = unturned = 0.0
    for channel in range(dim):
        keys, query = (torch.randn(256, dim, generator=generator) for _ in range(2))
        others = keys.clone()
        keys[:, channel], others[:, channel] = 30 * keys[:, channel], 0.0
        exact, spread = (query * keys).sum(dim=-1), (query * others).sum(dim=-1).var()
        for turns in (True, False):
            codes = encode(hadamard(keys) if turns else keys, 4)
            found = ((hadamard(query) if turns else query) * decode(codes, torch.float32)).sum(dim=-1)
            error = float((found - exact).var() / spread)
            turned, unturned = (max(turned, error), unturned) if turns else (turned, max(unturned, error))
    assert turned < most
    assert turned < unturned


@pytest.mark.parametrize("exponents", [None, 0, 1, -3])
def test_a_transform_changes_no_product_and_can_be_undone(exponents):
    made = torch.Generator().manual_seed(0)
    keys, query = torch.randn(2, 3, 5, 80, generator=made), torch.randn(2, 6, 1, 80, generator=made)
    transform = KeyTransform.blank(keys, (8 if exponents is None else 4, 8))
    assert (transform.exponents is None) == (exponents is None)
    if transform.exponents is not None:
        transform.exponents[:] = exponents
        transform.exponents[1, 2, ::3] = -1
        transform.normals.normal_().div_(transform.normals.norm(dim=-1, keepdim=True)).mul_(2**0.5)
    found, wanted = (
        q.view(2, 3, 2, 80) @ k.mT for q, k in ((transform.query(query), transform.keys(keys)), (query, keys))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(transform.restored(transform.keys(keys)), keys, rtol=1e-4, atol=1e-5)
    assert torch.equal(transform.scaled(transform.scaled(keys, -1), 1), keys)


def test_writing_a_token_changes_its_slot_only_and_is_what_coding_gives():
    made = torch.Generator().manual_seed(1)
    shape = 2, 3, 10, 64
    held = Slots(*(torch.randn(shape, generator=made) for _ in range(2)), torch.arange(10).expand(2, 3, 10))
    slots = CodedSlots.of(encode(hadamard(held.keys), 8), encode(held.values, 4), held.positions, torch.float32)
    before = [x.clone() for x in (*slots.coded_keys[:2], *slots.coded_values[:2])]
    slot = torch.randint(0, 10, (2, 3, 1), generator=made)
    key, value = torch.randn(2, 3, 1, 64, generator=made), torch.randn(2, 3, 1, 64, generator=made)
    assert slots.write(slot, key, value).all()
    touched = torch.zeros(2, 3, 10, dtype=torch.bool).scatter_(2, slot, True)
    for old, new in zip(before, (*slots.coded_keys[:2], *slots.coded_values[:2]), strict=True):
        assert torch.equal(old[~touched], new[~touched])
    assert torch.equal(slots.values[touched][:, None].view(value.shape), decode(encode(value, 4), torch.float32))
    assert torch.allclose(slots.keys[touched].view(key.shape), key, atol=0.03)
    assert torch.allclose(slots.transformed().keys, hadamard(slots.keys), atol=1e-5)

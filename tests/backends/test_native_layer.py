"""A decoder layer's work beside its attention in the native kernel, against torch's operators."""

import pytest
import torch
from torch import nn

from kvkeep.backends import layer_ops
from kvkeep.backends.native import native

Norm = layer_ops.Norm

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def linear(inputs, outputs, dtype, *, bias=False):
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def norm(width, dtype, plus=0.0):
    return Norm(nn.Parameter(torch.rand(width).to(dtype)), 1e-5, plus)


def layer_norm(width, dtype):
    weight, bias = (nn.Parameter(torch.randn(width).to(dtype)) for _ in range(2))
    return Norm(weight, 1e-5, bias=bias, is_centred=True)


def normed(x, by):
    """The norm of the last axis in double precision."""
    if by.is_centred:
        return nn.functional.layer_norm(x, x.shape[-1:], by.weight.double(), by.bias.double(), by.epsilon)
    return x / (x.square().mean(-1, keepdim=True) + by.epsilon).sqrt() * (by.weight.double() + by.plus)


def product(x, layer):
    return x @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())


def assert_near(found, expected):
    limit = TOLERANCE[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)


def before(x, first, linears, each, angles, *, scale=1.0):
    """What a layer computes before attention, with weights that are packed for this call."""
    dim = linears[0].out_features // 4
    rotary_dim = 0 if angles is None else angles[0].shape[-1]
    return layer_ops.Before(first, linears, each, dim, rotary_dim, scale)(x, angles)


def behind_it(x, attention, *weights):
    """What it computes behind it."""
    return layer_ops.Behind(*weights)(x, attention)


def heads_of(dim, dtype, *, kind="plain", width=48, rows=3):
    """Arguments of `before` with 4 query heads and 2 KV heads."""
    x = torch.randn(rows, 1, width, dtype=torch.float64).to(dtype)
    qkv = [linear(width, heads * dim, dtype, bias=kind == "bias") for heads in (4, 2, 2)]
    each = [norm(dim, dtype, plus) if kind == "norms" else None for plus in (0.0, 1.0)]
    angles = [torch.randn(1 if kind == "shared" else rows, 1, dim).to(dtype) for _ in range(2)]
    return x, norm(width, dtype, 1.0 if kind == "norms" else 0.0), qkv, each, tuple(angles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["plain", "bias", "norms", "shared"])
def test_before_attention(dtype, dim, kind):
    given = heads_of(dim, dtype, kind=kind)
    x, first, qkv, each, (cosines, sines) = given
    found = before(*given)
    rows = normed(x.double(), first)
    for part, layer, by in zip(found, qkv, (*each, None), strict=True):
        expected = product(rows, layer).view(3, 1, -1, dim).transpose(1, 2)
        if by is not None:
            expected = normed(expected, by)
        if layer is not qkv[2]:
            half = torch.cat((-expected[..., dim // 2 :], expected[..., : dim // 2]), dim=-1)
            expected = expected * cosines.double()[:, None] + half * sines.double()[:, None]
        assert part.shape == expected.shape
        assert_near(part, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_queries_that_are_scaled_and_heads_that_are_not_rotated(dtype, dim, scale, is_rotated):
    x, _, qkv, each, angles = heads_of(dim, dtype, kind="bias")
    first = layer_norm(48, dtype)
    found = before(x, first, qkv, each, angles if is_rotated else None, scale=scale)
    rows = normed(x.double(), first)
    for part, layer in zip(found, qkv, strict=True):
        expected = product(rows, layer).view(3, 1, -1, dim).transpose(1, 2)
        if is_rotated and layer is not qkv[2]:
            cosines, sines = (angle.double()[:, None] for angle in angles)
            half = torch.cat((-expected[..., dim // 2 :], expected[..., : dim // 2]), dim=-1)
            expected = expected * cosines + half * sines
        assert_near(part, expected * (scale if layer is qkv[0] else 1))


def behind_of(dtype, rows=3, *, width=48, inner=100, attended=64, bias=False):
    """Arguments of `behind_it`."""
    x, attention = torch.randn(rows, 1, width).to(dtype), torch.randn(rows, 1, attended).to(dtype)
    shapes = [(attended, width), (width, inner), (width, inner), (inner, width)]
    output, *gated = (linear(*shape, dtype, bias=bias) for shape in shapes)
    return x, attention, output, norm(width, dtype), *gated


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 48, 100), (16, 33, 7), (3, 64, 1), (5, 320, 160)])
@pytest.mark.parametrize("bias", [False, True])
def test_behind_attention(dtype, rows, width, inner, bias):
    given = behind_of(dtype, rows, width=width, inner=inner, bias=bias)
    x, attention, output, second, gate, up, down = given
    y = x.double() + product(attention.double(), output)
    n = normed(y, second)
    expected = y + product(nn.functional.silu(product(n, gate)) * product(n, up), down)
    assert_near(behind_it(*given), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_behind_attention_without_a_gate(dtype):
    x, attention, output, _, first, _, down = behind_of(dtype, bias=True)
    second = layer_norm(48, dtype)
    y = x.double() + product(attention.double(), output)
    expected = y + product(nn.functional.relu(product(normed(y, second), first)), down)
    behind = layer_ops.Behind(output, second, first, None, down, activation=layer_ops.RELU)
    assert_near(behind(x, attention), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_what_it_gets_alone(dtype):
    x, first, qkv, each, angles = heads_of(64, dtype, kind="norms", rows=16)
    behind = behind_of(dtype, 16)
    together, after = before(x, first, qkv, each, angles), behind_it(*behind)
    for rows in ([0], [3, 4], list(range(5, 12)), list(range(1, 16))):
        alone = before(x[rows], first, qkv, each, tuple(part[rows].contiguous() for part in angles))
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one, all_rows[rows])
        assert torch.equal(behind_it(behind[0][rows], behind[1][rows], *behind[2:]), after[rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_matter(threads):
    given, behind = heads_of(64, torch.float32, width=768), behind_of(torch.float32, width=768, inner=2048)
    expected = [*before(*given), behind_it(*behind)]
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [*before(*given), behind_it(*behind)]
    finally:
        torch.set_num_threads(usual)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def replaced(given, index, value):
    return *given[:index], value, *given[index + 1 :]


def test_what_the_kernel_cannot_read_is_left_to_torch():
    dtype = torch.bfloat16
    given = heads_of(16, dtype)
    x, _, (query, key, value), _, (cosines, sines) = given
    assert before(*given) is not None
    many = heads_of(16, dtype, rows=layer_ops.most_rows(dtype) + 1)
    wrong = {
        "too many rows": many,
        "angles in another dtype": replaced(given, 4, (cosines.float(), sines)),
        "angles of other rows": replaced(given, 4, (cosines[:2], sines)),
        "angles of two tokens": replaced(given, 4, (cosines.repeat(1, 2, 1), sines.repeat(1, 2, 1))),
        "angles of part of the dims": replaced(given, 4, (cosines, sines[..., :10])),
        "an odd number of dims": replaced(given, 4, (cosines[..., :15], sines[..., :15])),
        "rows that are not dense": replaced(given, 0, x.repeat(1, 1, 2)[..., ::2]),
        "a norm of another width": replaced(given, 1, norm(47, dtype)),
        "a norm of heads of another width": replaced(given, 3, [norm(15, dtype), None]),
        "weights in another dtype": replaced(given, 2, [query, key.float(), value]),
        "values of another width": replaced(given, 2, [query, key, linear(48, 64, dtype)]),
        "weights of another width": replaced(given, 2, [query, key, linear(47, 32, dtype)]),
    }
    for what, arguments in wrong.items():
        assert before(*arguments) is None, what
    given = behind_of(dtype)
    x, attention, output, _, _, _, down = given
    assert behind_it(*given) is not None
    wrong = {
        "too many rows": behind_of(dtype, layer_ops.most_rows(dtype) + 1),
        "attention in another dtype": replaced(given, 1, attention.float()),
        "attention of other rows": replaced(given, 1, attention[:2]),
        "attention of another width": replaced(given, 1, attention[..., :63].contiguous()),
        "an output of another width": replaced(given, 2, linear(64, 47, dtype)),
        "a norm of another width": replaced(given, 3, norm(47, dtype)),
        "a gate of another width": replaced(given, 4, linear(48, 99, dtype)),
        "a result of another width": replaced(given, 6, linear(100, 47, dtype)),
        "no dtype of its own": replaced(given, 6, down.double()),
    }
    del x, output
    for what, arguments in wrong.items():
        assert behind_it(*arguments) is None, what


def test_autograd_and_autocast_are_left_to_torch():
    given, behind = heads_of(16, torch.float32), behind_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert before(*given) is None
        assert behind_it(*behind) is None
    with torch.inference_mode(False), torch.enable_grad():
        given, behind = heads_of(16, torch.float32), behind_of(torch.float32)
        assert before(*given) is None
        assert behind_it(*behind) is None


def test_numbers_that_are_none_stay_in_their_row():
    given, behind = heads_of(16, torch.float32), behind_of(torch.float32)
    found = before(*given)[0], behind_it(*behind)
    for x, result, again in ((given[0], found[0], lambda: before(*given)[0]), (behind[0], found[1], None)):
        x[1, 0, 5] = torch.nan
        found = again() if again else behind_it(*behind)
        assert found[1].isnan().any()
        assert torch.equal(found[[0, 2]], result[[0, 2]])

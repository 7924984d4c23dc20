"""The operators between two attentions in the native kernel, against torch's."""

import pytest
import torch
from torch import nn

from kvkeep.backends import layer_ops
from kvkeep.backends.native import native

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def layer(inputs, outputs, dtype=torch.float32, *, bias=False):
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def assert_near(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    limit = TOLERANCE[found.dtype] * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=limit)


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (2, 7), (3, 100), (7, 320), (16, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(dtype, rows, width, bias):
    layers = [layer(width, n, dtype, bias=bias) for n in (64, 1, 35)]
    x = torch.randn(rows, 1, width, dtype=dtype)
    for found, plain in zip(layer_ops.products(x, layers), layers, strict=True):
        assert_near(found, plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (16, 320), (17, 320), (33, 33), (300, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_added_up_in_float32_and_stay_so(dtype, rows, width, bias, monkeypatch):
    monkeypatch.setattr(layer_ops, "MOST_ROWS_OF_LOGITS", 300)
    head, x = layer(width, 45, dtype, bias=bias), torch.randn(rows, width).to(dtype)
    head.weight.data[3, 2], head.weight.data[4, 1] = torch.nan, torch.inf
    found, expected = layer_ops.logits(x, head), head.float()(x.float())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("bias", [False, True])
def test_where_torch_is_slow_products_are_for_more_rows(dtype, bias, monkeypatch):
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: True)
    plain = layer(320, 35, dtype, bias=bias)
    x = torch.randn(layer_ops.MOST_ROWS_OF_SLOW, 1, 320, dtype=dtype)
    found = layer_ops.products(x, [plain])[0]
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    assert_near(found, exact.to(dtype))
    assert torch.equal(found[100:101], layer_ops.products(x[100:101], [plain])[0])
    assert layer_ops.products(torch.cat((x, x[:1])), [plain]) is None
    between = layer(35, 320, dtype)
    expected = between(nn.functional.silu(plain(x)) * plain(x))
    assert_near(layer_ops.gated(x, plain, plain, between), expected)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 64, 1), (300, 33, 100), (2, 4096, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_are_widened_piece_by_piece(dtype, rows, width, outputs, bias, monkeypatch):
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: True)
    monkeypatch.setattr(layer_ops, "WIDE_BYTES", 4 * 33 * 7)  # several pieces, or one row for each
    plain, x = layer(width, outputs, dtype, bias=bias), torch.randn(2, rows, width, dtype=dtype)
    found = layer_ops.widened(x, plain)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    assert_near(found, exact.to(dtype))


def test_weights_are_not_widened_where_torch_is_fast_or_must_see_the_product(monkeypatch):
    plain, x = layer(32, 16, torch.bfloat16), torch.randn(200, 32, dtype=torch.bfloat16)
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: False)
    assert layer_ops.widened(x, plain) is None
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: True)
    assert layer_ops.widened(x, plain) is not None
    assert layer_ops.widened(x, layer(32, 16)) is None
    assert layer_ops.widened(x[:, :31].contiguous(), plain) is None
    with torch.autocast("cpu"):
        assert layer_ops.widened(x, plain) is None
    with torch.inference_mode(False), torch.enable_grad():
        assert layer_ops.widened(torch.randn(2, 32).bfloat16(), plain) is None


def test_float32_is_never_slow():
    assert not layer_ops.slow(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 64, 96), (5, 31, 45)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_is_that_of_torch(dtype, rows, width, inner, bias):
    gate, up, down = (layer(*shape, dtype, bias=bias) for shape in ((width, inner), (width, inner), (inner, width)))
    x = 4 * torch.randn(1, rows, width, dtype=dtype)
    assert_near(layer_ops.gated(x, gate, up, down), down(nn.functional.silu(gate(x)) * up(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 64), (300, 48), (2, 3, 5, 7)])
def test_a_norm_is_that_of_torch(dtype, plus, shape):
    x, weight = torch.randn(shape, dtype=dtype), nn.Parameter(torch.randn(shape[-1]).to(dtype))
    expected = nn.functional.rms_norm(x.float(), shape[-1:], weight.float() + plus, 1e-5).to(dtype)
    assert_near(layer_ops.norm(x, layer_ops.Norm(weight, 1e-5, plus)), expected)


ACTIVATIONS = {
    layer_ops.SILU: nn.functional.silu,
    layer_ops.GELU: lambda x: nn.functional.gelu(x, approximate="tanh"),
    layer_ops.RELU: nn.functional.relu,
    layer_ops.RELU_SQUARED: lambda x: nn.functional.relu(x).square(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", layer_ops.ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_feed_forward_layer_with_each_activation(dtype, activation, is_gated):
    gate, up, down = (layer(*shape, dtype, bias=True) for shape in ((33, 45), (33, 45), (45, 33)))
    x = 4 * torch.randn(1, 5, 33, dtype=dtype)
    inner = ACTIVATIONS[activation](gate(x)) * (up(x) if is_gated else 1)
    assert_near(layer_ops.gated(x, gate, up if is_gated else None, down, activation), down(inner))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (300, 48), (2, 3, 5, 7), (2, 1)])
def test_a_layer_norm_is_that_of_torch(dtype, bias, shape):
    x = (torch.randn(shape) + 100).to(dtype)  # far from 0, where sums of squares less squares of sums are wrong
    by = nn.LayerNorm(shape[-1], bias=bias).to(dtype)
    for weight in by.parameters():
        nn.init.normal_(weight)
    found = layer_ops.norm(x, layer_ops.Norm(by.weight, by.eps, bias=by.bias, is_centred=True))
    weights = [None if part is None else part.double() for part in (by.weight, by.bias)]
    expected = nn.functional.layer_norm(x.double(), shape[-1:], *weights, by.eps)
    limit = 5e-5 if dtype is torch.float32 else TOLERANCE[dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)


def test_a_row_and_the_number_of_threads_change_no_bit():
    plain, x = layer(512, 1000), torch.randn(9, 512)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer_ops.products(row[None], [plain])[0] for row in x])
        torch.set_num_threads(3)
        torch.testing.assert_close(layer_ops.products(x, [plain])[0], alone, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


def test_nan_and_infinity_stay():
    gate, up, down = layer(32, 32), layer(32, 32), layer(32, 32)
    for x in (torch.full((1, 32), torch.nan), torch.full((1, 32), torch.inf)):
        assert not layer_ops.products(x, [gate])[0].isfinite().any()
        assert not layer_ops.gated(x, gate, up, down).isfinite().any()
        for centred in (False, True):
            by = layer_ops.Norm(nn.Parameter(torch.ones(32)), 1e-5, is_centred=centred)
            assert layer_ops.norm(x, by).isnan().any()
        for activation in (layer_ops.RELU, layer_ops.RELU_SQUARED):
            assert not layer_ops.gated(x, gate, None, down, activation).isfinite().any()


def test_what_the_kernel_cannot_do_is_left_to_torch():
    plain, x = layer(32, 16), torch.randn(2, 32)
    assert layer_ops.products(x, [plain]) is not None
    assert layer_ops.products(torch.randn(layer_ops.MOST_ROWS + 1, 32), [plain]) is None
    assert layer_ops.products(torch.randn(32, 2).T, [plain]) is None
    assert layer_ops.products(torch.randn(0, 32), [plain]) is None
    assert layer_ops.products(x.double(), [plain]) is None
    assert layer_ops.products(x.bfloat16(), [plain]) is None
    assert layer_ops.products(torch.randn(2, 31), [plain]) is None
    assert layer_ops.products(x.to("meta"), [plain]) is None
    with torch.autocast("cpu"):
        assert layer_ops.products(x, [plain]) is None
    with torch.inference_mode(False), torch.enable_grad():
        assert layer_ops.products(torch.randn(2, 32), [plain]) is None
    plain.out_features = 17  # no longer what the weight is
    assert layer_ops.products(x, [plain]) is None
    plain.out_features, plain.weight = 16, nn.Parameter(torch.randn(32, 16).T)
    assert layer_ops.products(x, [plain]) is None


def test_parts_of_a_gated_layer_must_fit():
    x = torch.randn(1, 32)
    assert layer_ops.gated(x, layer(32, 16), layer(32, 17), layer(16, 32)) is None
    assert layer_ops.gated(x, layer(32, 16), layer(32, 16), layer(17, 32)) is None
    assert layer_ops.gated(x, layer(32, 16), layer(32, 16), layer(16, 32).bfloat16()) is None
    assert layer_ops.gated(x, layer(32, 16), None, layer(17, 32)) is None
    assert layer_ops.gated(x, layer(31, 16), None, layer(16, 32)) is None
    weight, bias = (nn.Parameter(torch.ones(n)) for n in (32, 31))
    assert layer_ops.norm(x, layer_ops.Norm(bias, 1e-5)) is None
    assert layer_ops.norm(x, layer_ops.Norm(weight, 1e-5, bias=bias)) is None
    assert layer_ops.norm(x, layer_ops.Norm(weight, 1e-5, bias=nn.Parameter(weight.double()))) is None

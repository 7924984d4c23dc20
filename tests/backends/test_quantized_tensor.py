"""Matrices of weights in 4 to 8 bits: what they stand for, and products with them."""

import copy
import ctypes
import pickle
import platform
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn.functional import embedding, linear

from kvkeep.backends import QuantizedTensor, layer_ops
from kvkeep.backends.native import build, native
from kvkeep.backends.quantized_tensor import FORMATS
from kvkeep.errors import UnsupportedOperationError

needs_the_kernel = pytest.mark.skipif(native().library is None, reason=native().detail)
formats = pytest.mark.parametrize(("bits", "group"), sorted(FORMATS))
LARGEST_CODE = 0x7F7F  # of an input


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def parts(rows, columns, bits, group):
    """Codes, scales and minimums that float16 holds, and the numbers that they make."""
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    scales, minimums = (torch.randn(rows, columns // group).half().float() for _ in range(2))
    numbers = codes.view(rows, -1, group) * scales[..., None] + minimums[..., None]
    return codes, scales, minimums, numbers.view(rows, columns)


def matrix(rows, columns, bits=4, group=32, dtype=torch.float32):
    *made, numbers = parts(rows, columns, bits, group)
    tensor = QuantizedTensor.blank((rows, columns), bits, group, dtype)
    tensor.set_rows(0, *made)
    return nn.Parameter(tensor, False), numbers


def rounded(x):
    """Inputs as the kernel rounds them."""
    groups = x.double().unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / LARGEST_CODE
    return ((groups / scales).round() * scales).flatten(-2)


@formats
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (1, 64), (35, 96), (70, 256)])
def test_it_stands_for_scales_times_codes_plus_minimums(bits, group, rows, columns):
    tensor, numbers = matrix(rows, columns, bits, group)
    torch.testing.assert_close(tensor.dequantize(), numbers, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tensor._unpacked(None), numbers, rtol=1e-6, atol=1e-6)
    assert tensor.packed.nbytes == -(-rows // 16) * (64 + columns * 2 * bits + columns // group * 64)


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9])
def test_numbers_of_any_size_keep_their_precision(size):
    codes, scales, minimums, numbers = parts(20, 64, 4, 32)
    tensor = QuantizedTensor.blank((20, 64), 4, 32, torch.float32)
    tensor.set_rows(0, codes, scales * size, minimums * size)
    limit = 2**-10 * size * (15 * scales.abs() + minimums.abs()).repeat_interleave(32, 1)
    assert bool(((tensor.dequantize() - numbers * size).abs() <= limit).all())


def test_rows_of_subnormal_numbers_stay_near_zero():
    weight = torch.randn(20, 64)
    for row, size in ((3, 1e-37), (4, 1e-41), (5, 1e-45)):
        weight[row] *= size
    found = QuantizedTensor.quantize(weight, 8).dequantize()
    assert float(found[3:6].abs().max()) <= 1e-36
    torch.testing.assert_close(found, weight, rtol=0, atol=0.02)


def test_rows_are_set_piece_by_piece():
    whole, _ = matrix(50, 64, 6, 16)
    torch.manual_seed(0)
    *made, _ = parts(50, 64, 6, 16)
    pieces = QuantizedTensor.blank((50, 64), 6, 16, torch.float32)
    for first in (0, 16, 48):
        pieces.set_rows(first, *(part[first : {0: 16, 16: 48, 48: 50}[first]] for part in made))
    assert torch.equal(pieces.packed, whole.packed)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_errs_by_half_a_step(bits):
    weight = torch.randn(40, 96)
    weight[3] = 0
    weight[5, :32] = 7.0
    tensor = QuantizedTensor.quantize(weight, bits)
    groups = weight.unflatten(1, (-1, 32))
    step = ((groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)).repeat_interleave(32, 1)
    error = (tensor.dequantize() - weight).abs()
    assert bool((error <= 0.5 * step + 2e-3 * weight.abs().amax()).all())
    assert not tensor.dequantize()[3].any()


@needs_the_kernel
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_numbers(bits, group, dtype, bias):
    weight, numbers = matrix(35, 96, bits, group, dtype)
    added = nn.Parameter(torch.randn(35).to(dtype), False) if bias else None
    for rows in (1, 2, 3, 7, 8):
        x = torch.randn(2, rows, 96).to(dtype)
        assert layer_ops.products(x, [layer_ops.Linear(weight, added)]) is not None
        exact = linear(rounded(x), numbers.double(), None if added is None else added.double())
        found = linear(x, weight, added)
        assert found.dtype == dtype
        limit = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * float(exact.abs().max())
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=limit)
        near = linear(x.double(), numbers.double(), None if added is None else added.double())
        torch.testing.assert_close(exact, near, rtol=0, atol=1e-3 * float(near.abs().max()))


@needs_the_kernel
@formats
@pytest.mark.parametrize("rows", [33, 64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_many_rows_are_those_of_the_rounded_numbers(bits, group, rows, dtype):
    """With tiles of halves, as with unpacked weights, rounding the weights comes before the product."""
    weight, numbers = matrix(35, 96, bits, group, torch.bfloat16)
    added = nn.Parameter(torch.randn(35).bfloat16(), False)
    x = torch.randn(rows, 96).bfloat16()
    (found,) = layer_ops._products(x, [layer_ops.Linear(weight, added)], dtype)
    assert found.dtype is dtype
    exact = linear(x.double(), numbers.bfloat16().double(), added.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=8e-3 * float(exact.abs().max()))


@needs_the_kernel
def test_a_row_of_many_is_the_same_alone_whatever_the_threads():
    weight, _ = matrix(300, 512, 4, 32, torch.bfloat16)
    x, layers = torch.randn(150, 512).bfloat16(), [layer_ops.Linear(weight, None)] * 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer_ops._products(x, layers, x.dtype)
        torch.set_num_threads(3)
        again = layer_ops._products(x.flip(0), layers, x.dtype)
        assert all(torch.equal(one, other.flip(0)) for one, other in zip(alone, again, strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_the_kernel
@formats
def test_a_row_and_the_number_of_threads_change_no_bit(bits, group):
    weight, _ = matrix(300, 512, bits, group)
    x, threads = torch.randn(31, 512), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None], weight) for row in x])
        torch.set_num_threads(3)
        plain = nn.Linear(512, 300, bias=False)
        both = layer_ops.products(x[:15], [layer_ops.Linear(weight, None), plain])
        assert torch.equal(linear(x[:15], weight), alone[:15])
        assert torch.equal(both[0], alone[:15])
        assert torch.equal(both[1], layer_ops.products(x[:15], [plain])[0])
    finally:
        torch.set_num_threads(threads)


@needs_the_kernel
def test_more_rows_are_multiplied_with_unpacked_weights(monkeypatch):
    weight, numbers = matrix(48, 64, 8)
    monkeypatch.setattr(layer_ops, "most_rows_of_quantized", lambda: 4)
    x = torch.randn(5, 64)
    assert layer_ops.products(x, [layer_ops.Linear(weight, None)]) is None
    torch.testing.assert_close(linear(x, weight), linear(x, numbers))


@needs_the_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_torch_is_slow_they_are_unpacked_to_float32(dtype, monkeypatch):
    weight, numbers = matrix(48, 64, 8, dtype=dtype)
    monkeypatch.setattr(layer_ops, "most_rows_of_quantized", lambda: 4)
    monkeypatch.setattr(layer_ops, "slow", lambda dtype: True)
    x, bias = torch.randn(5, 64).to(dtype), torch.randn(48).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), linear(x.float(), numbers, bias.float()).to(dtype))


@pytest.mark.parametrize(("has_bytes", "has_tiles", "rows"), [(True, False, 128), (True, True, 32), (False, False, 16)])
def test_how_many_rows_are_few_depends_on_the_processor(has_bytes, has_tiles, rows, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_bytes)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert layer_ops.most_rows_of_quantized.__wrapped__() == rows


@needs_the_kernel
def test_a_gated_layer_is_that_of_the_numbers():
    gate, up, down = (nn.Linear(*shape, bias=False) for shape in ((64, 96), (64, 96), (96, 64)))
    x = torch.randn(3, 1, 64)
    for bits in ((4, 8, 5), (0, 8, 4), (8, 0, 0)):
        for layer, count in zip((gate, up, down), bits, strict=True):
            numbers = torch.randn(layer.out_features, layer.in_features)
            layer.weight = nn.Parameter(numbers, False)
            if count:
                layer.weight, numbers = matrix(*layer.weight.shape, count)
            layer.numbers = numbers
        between = nn.functional.silu(linear(x, gate.numbers)) * linear(x, up.numbers)
        expected = linear(between, down.numbers)
        found = layer_ops.gated(x, gate, up, down)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@needs_the_kernel
def test_nan_and_infinity_stay():
    weight, _ = matrix(32, 64)
    for value in (torch.nan, torch.inf):
        x = torch.zeros(2, 64)
        x[0, 40] = value
        found = linear(x, weight)
        assert not found[0].isfinite().any()
        assert bool((found[1] == 0).all())


def test_tokens_are_looked_up():
    table, numbers = matrix(40, 64, 8)
    ids = torch.tensor([[0, 39, 17], [5, 5, 0]])
    torch.testing.assert_close(embedding(ids, table), numbers[ids])
    assert embedding(ids[:0], table).shape == (0, 3, 64)
    layer = nn.Embedding(40, 64)
    layer.weight = table
    torch.testing.assert_close(layer(ids), numbers[ids])
    for wrong in (40, -1):
        with pytest.raises(IndexError, match="there are 40 rows"):
            embedding(torch.tensor([wrong]), table)


def test_other_operators_get_the_numbers():
    tensor, numbers = matrix(20, 64)
    torch.testing.assert_close(tensor + 1, numbers + 1)
    torch.testing.assert_close(tensor.T @ torch.ones(20), numbers.T @ torch.ones(20))
    torch.testing.assert_close(tensor[3], numbers[3])
    torch.testing.assert_close(tensor.float().norm(), numbers.norm())
    half = tensor.to(torch.bfloat16)
    assert isinstance(half, QuantizedTensor)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.dequantize(), numbers.bfloat16())


def test_functions_of_torch_take_it_wherever_they_take_a_tensor():
    tensor, numbers = matrix(20, 64)
    x, other = torch.randn(3, 64), torch.randn(5, 64)
    near = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(linear(input=x, weight=tensor), linear(x, numbers), **near)
    torch.testing.assert_close(linear(tensor, other), linear(numbers, other), **near)
    torch.testing.assert_close(linear(tensor, tensor), linear(numbers, numbers), **near)
    ids = torch.tensor([4, 7])
    torch.testing.assert_close(embedding(input=ids, weight=tensor), numbers[ids])
    torch.testing.assert_close(torch.embedding(tensor, ids), numbers[ids])


def test_torchs_default_device_is_not_its_own():
    tensor, numbers = matrix(20, 64)
    with torch.device("meta"):
        found, made = tensor.dequantize(), QuantizedTensor.quantize(numbers, 8)
    torch.testing.assert_close(found, numbers)
    assert made.device.type == "cpu"


def test_it_cannot_be_changed():
    tensor, _ = matrix(20, 64)
    for change in (
        lambda: tensor.mul_(2),
        lambda: tensor.zero_(),
        lambda: tensor.copy_(torch.zeros(20, 64)),
        lambda: torch.add(torch.ones(20, 64), 1, out=tensor),
        lambda: torch._foreach_mul_([tensor], 2.0),
    ):
        with pytest.raises(UnsupportedOperationError, match="cannot be changed or trained"):
            change()


def test_copies_have_weights_of_their_own():
    tensor, numbers = matrix(20, 64, 5)
    layer = nn.Linear(64, 20, bias=False)
    layer.weight = tensor
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied.weight) is QuantizedTensor
        assert isinstance(copied.weight, nn.Parameter)
        assert copied.weight.data_ptr() != tensor.data_ptr()
        torch.testing.assert_close(copied.weight.dequantize(), numbers)
    pair = nn.ModuleList([layer, nn.Linear(64, 20, bias=False)])
    pair[1].weight = tensor
    copied = copy.deepcopy(pair)
    assert copied[0].weight is copied[1].weight


def test_a_module_moves_as_it_is():
    layer = nn.Linear(64, 20, bias=False)
    layer.weight, numbers = matrix(20, 64)
    before = layer.weight.packed
    layer.to("cpu")
    assert layer.weight.packed is before
    place = layer.weight.place
    layer.bfloat16()
    assert layer.weight.place != place
    assert layer.weight.dtype == torch.bfloat16
    assert torch.ones(2).to(layer.weight).dtype == torch.bfloat16
    assert torch.equal(layer.weight.dequantize(), numbers.bfloat16())


@pytest.mark.parametrize("shape", [(4, 48), (4,), (2, 3, 32), (4, 0)])
def test_shapes_that_do_not_fit(shape):
    assert not QuantizedTensor.can_have(shape)


@pytest.mark.slow
@needs_the_kernel
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="compiles for x86-64")
@pytest.mark.parametrize("processor", sweep(["x86-64", "x86-64-v3"], lambda processor: processor == "x86-64"))
def test_processors_without_products_of_bytes_compute_the_same(processor, tmp_path, monkeypatch):
    source = tmp_path / "products.cpp"
    source.write_text(
        '#include "small.h"\n'
        'extern "C" int64_t kvkeep_products(const Products *p) { return products_as<Float32>(*p); }\n'
        'extern "C" int64_t kvkeep_unpack(const Unpack *u) { return unpack(*u); }\n'
    )
    flags = [*(flag for flag in build.FLAGS if flag != "-march=native"), f"-march={processor}", "-O1"]
    command = ["g++", *flags, f"-I{build.HEADERS[0].parent}", str(source), "-o", str(tmp_path / "products.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "products.so"))
    for bits, group in sorted(FORMATS):
        weight, _ = matrix(35, 96, bits, group)
        x = 10 * torch.randn(13, 96)
        expected, numbers = linear(x, weight), weight.dequantize()
        with monkeypatch.context() as patch:
            patch.setattr(layer_ops, "native", lambda: SimpleNamespace(library=library))
            patch.setattr("kvkeep.backends.quantized_tensor.library_for", lambda *_: library)
            torch.testing.assert_close(linear(x, weight), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
            torch.testing.assert_close(weight.dequantize(), numbers)


@formats
def test_parts_of_a_layer_are_views(bits, group):
    weight, numbers = matrix(70, 64, bits, group)
    layer = nn.Linear(64, 70, bias=False)
    layer.weight = weight
    parts_of_it = layer_ops.split(layer, [32, 16, 22])
    for part, expected in zip(parts_of_it, numbers.split([32, 16, 22]), strict=True):
        torch.testing.assert_close(part.weight.dequantize(), expected, rtol=1e-6, atol=1e-6)
    assert parts_of_it[1].weight.packed.data_ptr() == weight.packed[2:].data_ptr()
    for sizes in ([32, 16, 21], [31, 39], [70, 0], [86, -16]):  # too few, within a block, none, less than none
        assert layer_ops.split(layer, sizes) is None

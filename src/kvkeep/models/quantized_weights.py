"""Quantised weights: formats that weights can be loaded in, and checkpoints that are quantised already.

On a CPU the native kernel multiplies with weights of 4 and 8 bits. Everywhere else the work is done by transformers
with a package for each format. What is missing is said before weights are read.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TorchAoConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvkeep.backends import QuantizedTensor, choose, why
from kvkeep.errors import InputError, ModelFileError, closest, one_line

EXTRA = "kvkeep[quantized]"


@dataclass(frozen=True)
class _Format:
    """A format for the weights of linear layers, which a package makes.

    Attributes:
        packages: packages that it needs.
        make: makes the configuration that transformers takes.
        cuda_only: whether it needs CUDA.
    """

    packages: tuple[str, ...]
    make: Callable[[], Any]
    cuda_only: bool


def _int8() -> TorchAoConfig:
    """Return torchao's configuration for int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _fp8() -> TorchAoConfig:
    """Return torchao's configuration for fp8 weights."""
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def _4bit() -> BitsAndBytesConfig:
    """Return bitsandbytes' configuration for 4-bit weights."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


FORMATS = {
    "4bit": _Format(("bitsandbytes", "accelerate"), _4bit, True),
    "8bit": _Format(("bitsandbytes", "accelerate"), lambda: BitsAndBytesConfig(load_in_8bit=True), True),
    "int8": _Format(("torchao",), _int8, False),
    "fp8": _Format(("torchao",), _fp8, False),
}
"""Formats that packages make."""

PACKED = {"int4": 4, "int8": 8}
"""Formats that the native kernel reads, with the bits of a weight of a linear layer. Embeddings, of which the output
layer often is one, have 8: they lose most by fewer."""

UNPACKED = "unpacked"
"""Leaves no weights of a GGUF file packed."""

KNOWN = (*PACKED, UNPACKED, *(name for name in FORMATS if name not in PACKED))


def is_packable(device: torch.device) -> bool:
    """Return whether weights stay packed on this device: on a CPU for which there is the native kernel."""
    return device.type == "cpu" and choose(device, torch.float32).has_layer_ops


def check_format(name: str | None, device: torch.device) -> None:
    """Refuse a format of weights that is unknown, or cannot be used on this device.

    Raises:
        InputError: the format is unknown, or a package, the native kernel or CUDA is missing.
    """
    if name is None:
        return
    if not isinstance(name, str) or name not in KNOWN:
        close = closest(str(name), KNOWN)
        hint = f" Did you mean {close!r}?" if close else ""
        raise InputError(f"Weights cannot be loaded in {name!r:.40}.{hint} Known: {', '.join(KNOWN)}.")
    if name == UNPACKED or (name in PACKED and is_packable(device)):
        return
    if name not in FORMATS:
        reason = why(device, torch.float32) if device.type == "cpu" else f"the model goes to {device}"
        raise InputError(f"`load_in={name}` needs a CPU and kvkeep's native kernel ({reason:.200}). Leave it out.")
    missing = [package for package in FORMATS[name].packages if find_spec(package) is None]
    if missing:
        raise InputError(
            f"`load_in={name}` needs {' and '.join(missing)}: pip install {' '.join(missing)} (extra: {EXTRA})."
        )
    if FORMATS[name].cuda_only and device.type != "cuda":
        raise InputError(f"`load_in={name}` needs CUDA, and the model goes to {device}. Take `load_in=int8` there.")


def options(name: str | None, config: PreTrainedConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments for ``from_pretrained`` that quantize weights while they are loaded; ``{}`` for ``None``.

    Args:
        name: one of `KNOWN`.
        config: the model's configuration.
        device: where the model will run.

    Raises:
        InputError: the format is unknown, only for GGUF files or cannot be used here, or the checkpoint is quantised
            already.
    """
    if name is None:
        return {}
    check_format(name, device)
    if name == UNPACKED:
        raise InputError(f"`load_in={name}` is for GGUF files, and this is none. Leave it out.")
    if (method := method_of(config)) is not None:
        raise InputError(f"The checkpoint is quantised already ({method:.40}); leave `load_in={name}` out.")
    if name in PACKED and is_packable(device):
        return {"quantization_config": PackedConfig(PACKED[name])}
    chosen = FORMATS[name]
    # bitsandbytes quantises weights on their way to the device; the others go there afterwards
    placed = {"device_map": {"": device}} if chosen.cuda_only else {}
    return {"quantization_config": chosen.make(), **placed}


# Weights that the native kernel reads packed, in the terms of transformers.

METHOD = "kvkeep"
_ROUTERS = {"gate", "router", "router_gate", "shared_expert_gate"}
"""Names of layers that choose experts, or of modules around them as in ``router.proj``: they are small, and an error of
theirs sends a token to another expert."""


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Says that weights are a `QuantizedTensor`.

    Args:
        bits: of a weight of a linear layer; ``None``: weights are such tensors before they are loaded, or stay plain.
    """

    def __init__(self, bits: int | None = None, **_: object) -> None:
        self.quant_method: Any = METHOD  # transformers lists its own methods
        self.bits = bits


@register_quantizer(METHOD)
class _Packing(HfQuantizer):
    """Quantizes weights of linear layers and embeddings, each when it is read."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: object) -> bool:
        """Return whether a parameter is the matrix of a linear layer or an embedding that can be packed, and of no
        router.
        """
        name, _dot, own = param_name.rpartition(".")
        weight = getattr(module := model.get_submodule(name), own, None)
        is_matrix = own == "weight" and isinstance(module, nn.Linear | nn.Embedding)
        if not _ROUTERS.isdisjoint(name.split(".")):
            return False
        return is_matrix and isinstance(weight, Tensor) and QuantizedTensor.can_have(weight.shape)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that packs a weight when it is read."""
        config: Any = self.quantization_config
        return _Pack(config.bits)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> PreTrainedModel:
        """Remove the packing from the model's configuration, and copy weights that stay plain, beside those packed
        here, out of the file's mapped memory. Return the same model.
        """
        # the checkpoint says nothing of it, and memories of the model compare its configuration
        for part in (model.config, model.config.get_text_config(decoder=True)):
            for name in ("quantization_config", "_is_quantized"):
                vars(part).pop(name, None)
        config: Any = self.quantization_config
        for weight in model.parameters():
            if config.bits is not None and not isinstance(weight, QuantizedTensor):
                weight.data = weight.data.clone()  # as it lies in the checkpoint, it keeps the whole file in memory
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Pack(ConversionOps):
    """Packs a weight with ``bits``, or with 8 if it is a table of embeddings; ``None``: leaves it as it is."""

    def __init__(self, bits: int | None) -> None:
        self._bits = bits

    def convert(  # type: ignore[override]  # one of many keyword arguments is used
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, full_layer_name: str, **_: object
    ) -> dict[str, Tensor]:
        """Return the one weight that is given under its full name, packed if ``bits`` are given and it is not packed
        yet.
        """
        (value,) = input_dict.values()
        weight: Tensor = value[0] if isinstance(value, list) else value
        if self._bits is not None and not isinstance(weight, QuantizedTensor):
            module = model.get_submodule(full_layer_name.rpartition(".")[0])
            is_table = isinstance(module, nn.Embedding) or module is model.get_output_embeddings()
            weight = QuantizedTensor.quantize(weight, 8 if is_table else self._bits, _let_go)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


def _let_go(weight: Tensor) -> None:
    """Let the pages on which a tensor lies leave this process's memory, if they are those of a mapped checkpoint.

    Else the peak would be that of all plain weights. Nothing is lost: the pages hold what the file holds, from which
    they come again if somebody asks. Memory that is no such mapping stays, as does everything without ``/proc``.
    """
    page = mmap.PAGESIZE
    begin, end = -(-weight.data_ptr() // page) * page, (weight.data_ptr() + weight.nbytes) // page * page
    if weight.is_cpu and begin < end and _is_mapped(begin, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _is_mapped(begin: int, end: int) -> bool:
    """Return whether all addresses from ``begin`` to ``end`` lie in one mapping of a file. Memory of no file has the
    inode 0.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        addresses, _rights, _offset, _device, inode = line.split()[:5]
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= begin and end <= high:
            return inode != "0"
    return False


def kept_packed() -> dict[str, Any]:
    """Return the arguments for ``from_pretrained`` under which weights that are packed already stay so."""
    return {"quantization_config": PackedConfig()}


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether a model has quantised weights, which no adapter can be merged into."""
    packed = any(isinstance(weight, QuantizedTensor) for weight in model.parameters())
    return packed or method_of(model.config) is not None


def describe(model: nn.Module) -> str:
    """Return a phrase for how a model's weights are stored: their megabytes, how many matrices are packed with how many
    bits, and the dtypes of the others.
    """
    weights = list(model.parameters())
    bits = Counter(weight.bits for weight in weights if isinstance(weight, QuantizedTensor))
    counts = [
        f"{count} {'matrix' if count == 1 else 'matrices'} of {width} bits" for width, count in sorted(bits.items())
    ]
    packed = ", ".join(counts)
    rest = ", ".join(
        sorted({str(w.dtype).removeprefix("torch.") for w in weights if not isinstance(w, QuantizedTensor)})
    )
    return f"{weight_bytes(model) / 1e6:.0f} MB: " + (f"{packed} stay packed, the rest in {rest}" if packed else rest)


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the method by which a checkpoint is quantized; ``None`` if it is not."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    found = fields.get("quant_method") if isinstance(fields, dict) else getattr(fields, "quant_method", None)
    return str(getattr(found, "value", found) or "unknown")  # a member of an enum, or a text


def check_readable(name: str, config: PreTrainedConfig) -> None:
    """Refuse a quantised checkpoint whose package or hardware is missing. Others are not checked.

    Raises:
        ModelFileError: the checkpoint cannot be read here.
    """
    method = method_of(config)
    if method is None:
        return
    start = f"{name} has quantised weights ({method:.40}), which cannot be read here"
    try:
        fields = copy.deepcopy(config.quantization_config)
        if isinstance(fields, dict) and not AutoHfQuantizer.supports_quant_method(fields):
            raise ModelFileError(f"{start}: transformers does not know the method. Update it, or take other weights.")
        AutoHfQuantizer.from_config(fields, pre_quantized=True).validate_environment(device_map=None)
    except ModelFileError:
        raise
    except ImportError as error:
        line = str(error).strip().partition("\n")[0]
        raise ModelFileError(f"{start}: {line.rstrip('.'):.300}.") from error
    except Exception as error:  # whatever a method's own checks raise for fields of the wrong type
        raise ModelFileError(f"{start}: {one_line(error).rstrip('.'):.300}. Check its quantization_config.") from error


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: itself, or the data and scales of a quantized one.

    Of a tensor that processes share, yield this process's part.
    """
    to_local = getattr(tensor, "to_local", None)
    tensor = tensor if to_local is None else to_local()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from parts(getattr(tensor, name))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes that a model's weights and buffers take in memory. Shared weights count once."""
    tensors = (part for tensor in (*model.parameters(), *model.buffers()) for part in parts(tensor))
    return sum(tensor.nbytes for tensor in tensors)

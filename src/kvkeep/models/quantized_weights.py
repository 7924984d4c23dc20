"""Quantised weights: formats that weights can be loaded in, and checkpoints that are quantised already.

The work is done by transformers with a package for each format. What is missing is said before weights are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, TorchAoConfig
from transformers.quantizers.auto import AutoHfQuantizer

from kvkeep.errors import InputError, ModelFileError, closest, one_line

EXTRA = "kvkeep[quantized]"


@dataclass(frozen=True)
class _Format:
    """A format for the weights of linear layers.

    Attributes:
        packages: packages that it needs.
        make: makes the configuration that transformers takes.
        cuda_only: whether it needs CUDA.
    """

    packages: tuple[str, ...]
    make: Callable[[], Any]
    cuda_only: bool


def _int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _fp8() -> TorchAoConfig:
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def _4bit() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


FORMATS = {
    "4bit": _Format(("bitsandbytes", "accelerate"), _4bit, True),
    "8bit": _Format(("bitsandbytes", "accelerate"), lambda: BitsAndBytesConfig(load_in_8bit=True), True),
    "int8": _Format(("torchao",), _int8, False),
    "fp8": _Format(("torchao",), _fp8, False),
}


def check_format(name: str | None) -> None:
    """Refuse a format that is unknown, or whose packages are missing. ``None`` is no format.

    Raises:
        InputError: the format is unknown, or a package is missing.
    """
    if name is None:
        return
    if not isinstance(name, str) or name not in FORMATS:
        close = closest(str(name), FORMATS)
        hint = f" Did you mean {close!r}?" if close else ""
        raise InputError(f"Weights cannot be loaded in {name!r:.40}.{hint} Known: {', '.join(FORMATS)}.")
    missing = [package for package in FORMATS[name].packages if find_spec(package) is None]
    if missing:
        raise InputError(
            f"`load_in={name}` needs {' and '.join(missing)}: pip install {' '.join(missing)} (extra: {EXTRA})."
        )


def options(name: str | None, config: PreTrainedConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments with which transformers quantizes weights while it loads them; an empty mapping for
    ``None``.

    Args:
        name: one of `FORMATS`.
        config: the model's configuration.
        device: where the model will run.

    Raises:
        InputError: the format is unknown, cannot be used here, or the checkpoint is quantised already.
    """
    if name is None:
        return {}
    check_format(name)
    if (method := method_of(config)) is not None:
        raise InputError(f"The checkpoint is quantised already ({method:.40}); leave `load_in={name}` out.")
    chosen = FORMATS[name]
    if chosen.cuda_only and device.type != "cuda":
        raise InputError(f"`load_in={name}` needs CUDA, and the model goes to {device}. Take `load_in=int8` there.")
    # bitsandbytes quantises weights on their way to the device; the others go there afterwards
    placed = {"device_map": {"": device}} if chosen.cuda_only else {}
    return {"quantization_config": chosen.make(), **placed}


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method with which a checkpoint is quantized; ``None`` if it is not."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    found = fields.get("quant_method") if isinstance(fields, dict) else getattr(fields, "quant_method", None)
    return str(getattr(found, "value", found) or "unknown")


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
    """Yield the plain tensors of a tensor: itself, or the data and scales of a quantized one.

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

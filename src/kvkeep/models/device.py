"""Devices and dtypes by name, and clear errors when a device's memory is too small.

Importing this module imports torch, and not transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvkeep.errors import InputError, UnsupportedModelError, one_line
from kvkeep.models.dtype_names import DTYPE_NAMES, check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Dtypes that a model can be loaded in, by name."""

_LESS = "Lower `budget` or `rows`, set `prefill_chunk`, or take a smaller dtype or model."


def parse_dtype(text: str) -> torch.dtype | str:
    """Return the dtype of this name; ``auto`` stays as it is.

    Raises:
        InputError: the name is unknown.
    """
    check_dtype(text)
    return DTYPES.get(text, text)


def parse_device(text: str) -> torch.device:
    """Return the device of this name, after trying it; ``auto`` is CUDA if there is one, otherwise the CPU.

    Raises:
        InputError: the name is unknown, or this machine has no such device.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device).sum().item()  # fails where there is no such device, and on "meta"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise InputError(f"Device {text!r} cannot be used here. Available: {', '.join(known)}.") from error
    return device


@contextmanager
def enough_memory(device: torch.device, remedy: str = _LESS) -> Iterator[None]:
    """Turn a failed allocation in the context into an `InputError` that says what to do.

    Raises:
        InputError: the device's memory is too small.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"Out of memory on {device}. {remedy}") from error


def reason_of(error: BaseException) -> str:
    """Return an error's message in one line, with a remedy if memory was too small."""
    remedy = "Use fewer rows, a smaller budget or a prefill_chunk, or a smaller dtype or model."
    return f"{one_line(error).rstrip('.')}. {remedy}" if is_out_of_memory(error) else one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, as its type or torch's message shows."""
    told = ("allocate memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast, which would compute logits and statistics in half precision."""
    # asked about a device that has no autocast, such as meta, torch raises an error
    active = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


# Weights that accelerate keeps in main memory or on the disk, and brings to a device when a module runs.


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model takes token ids; if its weights are offloaded, that of the first module that
    accelerate runs somewhere. It is ``meta`` for a model whose weights have no numbers.
    """
    found: torch.device = model.device
    if found.type != "meta":
        return found
    devices = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    device = next((device for device in devices if device is not None), None)
    return found if device is None else torch.device(device)


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, read from main memory or the disk if it is offloaded.

    Raises:
        InputError: a parameter has no numbers, and nobody knows where they are.
    """
    for name, tensor in model.named_parameters():
        yield name, _read(model, name) if tensor.is_meta else tensor


def _read(model: nn.Module, name: str) -> Tensor:
    """Return the numbers of an offloaded parameter of this name in a model.

    Raises:
        InputError: accelerate does not know the parameter's numbers.
    """
    path, _, own = name.rpartition(".")
    for hook in _hooks(model.get_submodule(path)):
        held = getattr(hook, "weights_map", None)
        if held is not None and own in held:
            tensor: Tensor = held[own]
            return tensor
    raise InputError(
        f"The weight {name} is on the meta device, and accelerate does not know its numbers. Load the model anew, with "
        "weights in memory or with a `device_map`."
    )


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks on a module."""
    hook = getattr(module, "_hf_hook", None)  # one hook, or a sequence of hooks in `hooks`
    return list(getattr(hook, "hooks", [] if hook is None else [hook]))


def check_offloaded(model: PreTrainedModel) -> None:
    """Refuse weights that torchao has quantised and that lie on the disk: accelerate cannot bring them back.

    Raises:
        UnsupportedModelError: the weights are quantised by torchao and partly on the disk.
    """
    found: object = getattr(model.config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    places = getattr(model, "hf_device_map", None) or {}
    # the method is a member of an enum, or a text
    if getattr(method, "value", method) == "torchao" and "disk" in places.values():
        raise UnsupportedModelError(
            f"This {type(model).__name__} has weights that torchao has quantised and that are offloaded to the disk. "
            "accelerate cannot bring them back from there: leave out one of the two."
        )

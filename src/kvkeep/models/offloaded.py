"""Weights that accelerate keeps in main memory or on the disk, and brings to a device when a module runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.errors import InputError, UnsupportedModelError


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that takes a model's token ids. The weights may lie elsewhere."""
    found: torch.device = model.device
    if found.type != "meta":
        return found
    devices = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    device = next((device for device in devices if device is not None), None)
    return found if device is None else torch.device(device)


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name; one that is offloaded is read from where it lies.

    Raises:
        InputError: a parameter has no numbers, and nobody knows where they are.
    """
    for name, tensor in model.named_parameters():
        yield name, _read(model, name) if tensor.is_meta else tensor


def _read(model: nn.Module, name: str) -> Tensor:
    """Return an offloaded parameter."""
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
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [] if hook is None else [hook]))


def check_offloaded(model: PreTrainedModel) -> None:
    """Refuse weights that torchao has quantised and that lie on the disk: accelerate cannot bring them back.

    Raises:
        UnsupportedModelError: they are such weights.
    """
    found: object = getattr(model.config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    places = getattr(model, "hf_device_map", None) or {}
    if getattr(method, "value", method) == "torchao" and "disk" in places.values():
        raise UnsupportedModelError(
            f"This {type(model).__name__} has weights that torchao has quantised and that are offloaded to the disk. "
            "accelerate cannot bring them back from there: leave out one of the two."
        )

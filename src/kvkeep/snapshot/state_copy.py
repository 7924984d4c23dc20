"""One row of the layers that have a state of fixed size (state-space, convolution), as transformers stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, UnsupportedOperationError
from kvkeep.kv.memory_usage import bytes_of

Place: TypeAlias = tuple[str, int | None]
"""An attribute of a layer; with a key if the attribute is a dictionary."""

Flag: TypeAlias = bool | int | None
"""A setting of a layer beside its tensors."""

_TENSORS = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}
"""Tensors of a layer, and the setting that says whether there is one. Later versions of transformers keep several."""
_SIZE = "conv_kernel_size"
_FLAGS = (*_TENSORS.values(), "has_previous_state", _SIZE)


@dataclass(frozen=True, eq=False)
class StateCopy:
    """A copy of one row of a layer with a state. It shares no memory with the layer.

    Attributes:
        tensors: the layer's tensors without the axis of rows.
        flags: the settings that say which tensors are in use.
    """

    tensors: Mapping[Place, Tensor]
    flags: Mapping[Place, Flag]

    @property
    def nbytes(self) -> int:
        """Return the size of the copy in bytes."""
        return bytes_of(self.tensors.values())

    def to(self, device: torch.device | str) -> StateCopy:
        """Return the same state on a device."""
        return self.each(lambda tensor: tensor.to(device))

    def each(self, tensor: Callable[[Tensor], Tensor]) -> StateCopy:
        """Return the same state with each tensor replaced by the result of a function."""
        return StateCopy({place: tensor(x) for place, x in self.tensors.items()}, self.flags)


def take_state(layer: object, row: int, device: torch.device | None = None) -> StateCopy:
    """Copy one row out of a layer with a state.

    Raises:
        UnsupportedOperationError: the layer has tensors of a kind that kvkeep does not know.
    """
    if strange := [name for name, held in vars(layer).items() if isinstance(held, Tensor) and name not in _TENSORS]:
        raise UnsupportedOperationError(
            f"A {type(layer).__name__} of this version of transformers keeps {strange[0]}, which kvkeep cannot copy."
        )
    tensors = {place: held for place, held in _entries(layer, _TENSORS) if isinstance(held, Tensor)}
    copies = {place: held[row].detach().clone().to(device or held.device) for place, held in tensors.items()}
    return StateCopy(copies, dict(_entries(layer, _FLAGS)))


def put_state(layer: object, row: int, rows: int, copy: StateCopy, device: torch.device) -> None:
    """Overwrite one row of a layer with a state. A layer without tensors gets some for ``rows`` rows first.

    Raises:
        ShapeError: the copy has attributes that the layer does not have, or its tensors have other shapes.
    """
    check_state(layer, copy)
    for place, flag in copy.flags.items():
        _assign(layer, place, flag)
    for place, tensor in copy.tensors.items():
        held = dict(_entries(layer, _TENSORS))[place]
        if not isinstance(held, Tensor):
            held = torch.zeros((rows, *tensor.shape), dtype=tensor.dtype, device=device)
        elif held.is_inference():  # cannot be written outside of inference mode
            held = held.clone()
        held[row] = tensor
        _assign(layer, place, held)
    if copy.tensors and getattr(layer, "device", None) is None:  # what transformers sets with the first tensor
        vars(layer).update(device=device, dtype=next(iter(copy.tensors.values())).dtype)


def check_state(layer: object, copy: StateCopy) -> None:
    """Refuse a copy that does not fit a layer.

    Raises:
        ShapeError: it has attributes that the layer does not have, or its tensors have other shapes.
    """
    known, flags = dict(_entries(layer, _TENSORS)), dict(_entries(layer, _FLAGS))
    if strange := sorted(str(place[0]) for place in (copy.tensors.keys() - known) | (copy.flags.keys() - flags)):
        raise ShapeError(f"A state of another kind of layer was given: this one has no {strange[0]!r:.40}.")
    for (name, key), flag in copy.flags.items():
        conv = copy.tensors.get(("conv_states", key))
        wanted = (None if conv is None else conv.shape[-1],) if name == _SIZE else (False, True)
        if name in _TENSORS.values():
            wanted = (any(place[1] == key and _TENSORS[place[0]] == name for place in copy.tensors),)
        if flag not in wanted:
            raise ShapeError(f"A state says {name}={flag!r:.40}, which does not fit its tensors.")
    for place, tensor in copy.tensors.items():
        held = known[place]
        if isinstance(held, Tensor) and (held.shape[1:], held.dtype) != (tensor.shape, tensor.dtype):
            raise ShapeError(
                f"A state has the shape {tuple(tensor.shape)} in {tensor.dtype}, and the layer holds "
                f"{tuple(held.shape[1:])} in {held.dtype}: they belong to different models or dtypes."
            )


def _entries(layer: object, names: Iterable[str]) -> Iterator[tuple[Place, Any]]:
    """Yield attributes of a layer (``None`` where still missing); a dictionary gives one entry per key."""
    for name in names:
        value = vars(layer).get(name)
        if isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items())
        else:
            yield (name, None), value


def _assign(layer: object, place: Place, value: Any) -> None:
    name, key = place
    if key is None:
        setattr(layer, name, value)
    else:
        vars(layer)[name][key] = value

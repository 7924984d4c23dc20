"""One row of the layers that have a state of fixed size (state-space, convolution), as transformers stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.memory import bytes_of

Place: TypeAlias = tuple[str, int | None]
"""An attribute of a layer; with a key if the attribute is a dictionary."""

Flag: TypeAlias = bool | int | None
"""A setting of a layer beside its tensors."""


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
        """Bytes of the copy."""
        return bytes_of(self.tensors.values())

    def to(self, device: torch.device | str) -> StateCopy:
        """The same state on a device."""
        return StateCopy({place: tensor.to(device) for place, tensor in self.tensors.items()}, self.flags)


def take_state(layer: object, row: int, device: torch.device | None = None) -> StateCopy:
    """Copy one row out of a layer with a state."""
    found = dict(_entries(layer))
    tensors = {place: held for place, held in found.items() if isinstance(held, Tensor)}
    copies = {place: held[row].detach().clone().to(device or held.device) for place, held in tensors.items()}
    flags = {place: held for place, held in found.items() if held is None or isinstance(held, bool | int)}
    return StateCopy(copies, flags)


def put_state(layer: object, row: int, rows: int, copy: StateCopy, device: torch.device) -> None:
    """Overwrite one row of a layer with a state. A layer without tensors gets some for ``rows`` rows first.

    Raises:
        ShapeError: the copy has attributes that the layer does not have, or its tensors have other shapes.
    """
    check_state(layer, copy)
    for place, flag in copy.flags.items():
        _assign(layer, place, flag)
    for place, tensor in copy.tensors.items():
        held = _read(layer, place)
        if not isinstance(held, Tensor):
            held = torch.zeros((rows, *tensor.shape), dtype=tensor.dtype, device=device)
        elif held.is_inference():  # cannot be written outside of inference mode
            held = held.clone()
        held[row] = tensor
        _assign(layer, place, held)
    for name, value in (("device", device), ("dtype", next((t.dtype for t in copy.tensors.values()), None))):
        if value is not None and vars(layer).get(name, value) is None:
            setattr(layer, name, value)


def check_state(layer: object, copy: StateCopy) -> None:
    """Refuse a copy that does not fit a layer.

    Raises:
        ShapeError: it has attributes that the layer does not have, or its tensors have other shapes.
    """
    known = dict(_entries(layer))
    for place in (*copy.tensors, *copy.flags):
        if place not in known:
            raise ShapeError(f"A state of another kind of layer was given: this one has no {place[0]}.")
    for place, tensor in copy.tensors.items():
        held = known[place]
        if isinstance(held, Tensor) and (held.shape[1:], held.dtype) != (tensor.shape, tensor.dtype):
            raise ShapeError(
                f"A state has the shape {tuple(tensor.shape)} in {tensor.dtype}, and the layer holds "
                f"{tuple(held.shape[1:])} in {held.dtype}: they belong to different models or dtypes."
            )


def _entries(layer: object) -> Iterator[tuple[Place, Any]]:
    """All attributes of a layer; a dictionary gives one entry for each key."""
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items())
        else:
            yield (name, None), value


def _read(layer: object, place: Place) -> Any:
    name, key = place
    held = vars(layer)[name]
    return held if key is None else held[key]


def _assign(layer: object, place: Place, value: Any) -> None:
    name, key = place
    if key is None:
        setattr(layer, name, value)
    else:
        vars(layer)[name][key] = value

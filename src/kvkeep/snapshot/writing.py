"""Snapshots written to files: whole or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from kvkeep.errors import SnapshotError
from kvkeep.kv.row_copy import RowCopy
from kvkeep.result_files import in_full, remove_leftovers, write_whole
from kvkeep.snapshot.header import LONGEST_HEADER
from kvkeep.snapshot.layout import KEY, NAMES, OCCUPIED, TOKENS, Parts, is_cut

_OLD_S = 3600.0
"""Temporary files of this age were left behind by a process that was killed."""


def save(parts: Parts, path: str | os.PathLike[str]) -> None:
    """Write a snapshot, see `Snapshot.save`.

    Raises:
        SnapshotError: the file cannot be written.
    """
    target = in_full(path)
    try:
        check_target(target)
        write_whole(target, chunks(parts))
    except (OSError, ValueError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise not_saved(target, error) from error
    remove_leftovers(target.parent, {target.name}, before=time.time() - _OLD_S)


def check_target(path: Path) -> None:
    """Refuse to replace anything but a file.

    Raises:
        SnapshotError: there is something else at the path.
    """
    if os.path.lexists(path) and not path.is_file():
        raise SnapshotError(f"{path} is a folder, or no regular file, and a snapshot would replace it. Give a file.")


def not_saved(path: Path, error: Exception) -> SnapshotError:
    """The error for a file that cannot be written."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return SnapshotError(
        f"The snapshot cannot be saved to {path}: {why}. An older file of that name is as it was. Make room, or give "
        "another path."
    )


def chunks(parts: Parts) -> Iterator[bytes]:
    """The bytes of a file, piece by piece.

    Raises:
        SnapshotError: the memory comes from another store than the default one, or its note is too long.
    """
    tensors = dict(_tensors(parts))
    entries: dict[str, Any] = {"__metadata__": {KEY: json.dumps(_about(parts), separators=(",", ":"))}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    if len(header) > LONGEST_HEADER:
        raise SnapshotError(
            f"The snapshot's note makes a header of {len(header)} bytes, and a file has at most {LONGEST_HEADER}. Keep "
            "a shorter conversation."
        )
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        yield _bytes(tensor)


def _about(parts: Parts) -> dict[str, Any]:
    """The description of the file."""
    contents = parts.contents
    return {
        "fingerprint": parts.fingerprint.as_dict(),
        "pending": parts.pending,
        "note": dict(parts.note),
        "layers": [_about_layer(layer) for layer in contents.layers],
        "states": {
            str(number): [[name, key, flag] for (name, key), flag in state.flags.items()]
            for number, state in contents.states.items()
        },
    }


def _about_layer(layer: RowCopy) -> dict[str, Any]:
    numbers = {name: int(tensor) for name, tensor in layer.tensors.items() if _is_number(tensor)}
    heads, used = layer.positions.shape
    budget = layer.budget if isinstance(layer.budget, int) else list(layer.budget)
    sizes = {"heads": heads, "used": used, "capacity": layer.capacity, "budget": budget}
    return {**sizes, "pins": [list(span) for span in layer.pins], "whole": _whole(layer), "numbers": numbers}


def _whole(layer: RowCopy) -> list[str]:
    """Names of the state that each head has once."""
    return sorted(name for name in layer.tensors.keys() - layer.cut if name.startswith("state."))


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor is a whole number, which is stored in the description."""
    return tensor.ndim == 0 and tensor.dtype is torch.int64


def _tensors(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, by name, on the CPU. The largest dtypes go first, so that all of them are aligned."""
    found: list[tuple[str, Tensor]] = []
    if parts.tokens is not None:
        found.append((TOKENS, parts.tokens.to(torch.int32)))
    for number, layer in enumerate(parts.contents.layers):
        found += [(f"layers.{number}.{name}", tensor) for name, tensor in _layer_tensors(layer)]
    found += [(f"shared.{name}", table) for name, table in parts.contents.shared.items()]
    for number, state in parts.contents.states.items():
        for (name, key), tensor in state.tensors.items():
            found.append((f"states.{number}.{name}" + ("" if key is None else f".{key}"), tensor))
    found.sort(key=lambda one: -one[1].element_size())
    yield from ((name, tensor.cpu().contiguous()) for name, tensor in found)


def _layer_tensors(layer: RowCopy) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer: of each tensor with slots the occupied ones, head by head.

    Raises:
        SnapshotError: the layer has another store than the default one.
    """
    whole = _whole(layer)
    if layer.cut != {name for name in layer.tensors if is_cut(name, whole)} or "store.keys" not in layer.cut:
        raise SnapshotError("Only memory in kvkeep's own store can be saved; this cache holds another one.")
    occupied = layer.positions >= 0
    yield OCCUPIED, packed_bits(occupied.flatten().cpu())
    for name, tensor in layer.tensors.items():
        if not _is_number(tensor):
            yield name, tensor[occupied] if name in layer.cut else tensor


def packed_bits(bits: Bool[Tensor, " n"]) -> UInt8[Tensor, " bytes"]:
    """Truth values as bits, eight to a byte, the first one in the lowest bit."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8)
    return (padded * weights).sum(dim=1).to(torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()

"""What a snapshot's file holds: its description and the positions of its tokens, without keys and values.

Importing this module imports NumPy, and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import SnapshotError
from kvkeep.result_files import in_full
from kvkeep.snapshot.file_format import (
    OCCUPIED,
    POSITIONS,
    Described,
    LayerDescription,
    NotASnapshotError,
    TensorEntry,
    check,
    is_cut,
    opened,
    read_described,
    read_into,
)

_EMPTY = -1
_POSITION, _COUNTER = 4, 8
"""Bytes of a position in a slot, and of a row's counter."""


@dataclass(frozen=True, eq=False)
class HeldPositions:
    """What a snapshot's file holds, without its keys and values, whose numbers are not looked at.

    Attributes:
        described: what the file says of its memory.
        positions: the true positions of the tokens that each layer holds, head by head; -1 = empty.
        tokens: ids of the tokens that it stands for; ``None`` if they are not stored.
        nbytes: the size of the file.
    """

    described: Described
    positions: tuple[NDArray[np.int32], ...]
    tokens: NDArray[np.int32] | None
    nbytes: int

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HeldPositions:
        """Read the description, the positions and the token ids of a file.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        source = in_full(path)
        with explained(source), opened(source) as (file, size):
            found = read_described(file, size)
            ids = None if found.tokens is None else _read(file, found, found.tokens)
            check_ids(ids)
            each = []
            for number, (layer, entries) in enumerate(zip(found.layers, found.groups, strict=True)):
                bits, places = (_read(file, found, entries[name]) for name in (OCCUPIED, POSITIONS))
                each.append(in_slots(f"layer {number}", layer, bits, places))
            return cls(found, tuple(each), ids, size)

    @property
    def layer_bytes(self) -> list[int]:
        """Return how many bytes each layer's row takes once it is loaded: with empty slots up to the last occupied one,
        counters and a second table of positions.
        """
        return [
            layer.heads * layer.used * _POSITION  # of `RowCopy.positions`, a copy of the store's
            + _COUNTER * len(layer.numbers)
            + sum(
                layer.heads * layer.used * entry.slot_bytes if is_cut(name, layer.whole) else entry.stop - entry.start
                for name, entry in entries.items()
                if name != OCCUPIED
            )
            for layer, entries in zip(self.described.layers, self.described.groups, strict=True)
        ]


@contextmanager
def explained(source: Path) -> Iterator[None]:
    """Raise a `SnapshotError` that names the file if the body finds that it cannot be read, or is no snapshot.

    Args:
        source: the file's path.

    Raises:
        SnapshotError: see above.
    """
    try:
        yield
    except NotASnapshotError as error:
        raise SnapshotError(
            f"{source} is no snapshot that can be used: {error}. Give a file of kvkeep remember or Snapshot.save."
        ) from error
    except (OSError, ValueError) as error:  # a ValueError: the path has a zero byte
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SnapshotError(f"{source!s:.200} cannot be read: {why}.") from error


def check_ids(ids: NDArray[np.int32] | None) -> None:
    """Refuse negative token ids.

    Raises:
        NotASnapshotError: there is one.
    """
    check(ids is None or bool((ids >= 0).all()), "a token id is negative")


def in_slots(
    shown: str, about: LayerDescription, bits: NDArray[np.uint8], places: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return a table with a row for each head: the position of the token in each slot; -1 = empty.

    Args:
        shown: names the layer in errors.
        about: the layer.
        bits: a bit for each slot, which says whether it is occupied; eight to a byte, the first one in the lowest bit.
        places: the positions of the tokens in these slots, head by head.

    Raises:
        NotASnapshotError: tokens, slots or positions do not fit each other, or a head holds a position twice.
    """
    count = about.heads * about.used
    occupied = np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(about.heads, about.used)
    held, n = int(occupied.sum()), len(places)
    check(held == n, f"{shown} has {n} tokens in {held} occupied slots")
    check(not about.used or bool(occupied[:, -1].any()), f"{shown} ends with empty slots")
    seen = about.numbers["seen"]
    check(bool(((places >= 0) & (places < seen)).all()), f"{shown} holds positions outside of the {seen} tokens seen")
    found = np.full(occupied.shape, _EMPTY, dtype=np.int32)
    found[occupied] = places
    order = np.sort(found, axis=1)
    twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
    check(not bool(twice.any()), f"{shown} holds a position twice in a head")
    return found


def _read(file: IO[bytes], found: Described, entry: TensorEntry) -> NDArray[Any]:
    """Read one tensor of integers from its place in a file.

    Raises:
        NotASnapshotError: the file has become shorter.
    """
    content = bytearray(entry.stop - entry.start)
    read_into(file, found.header.start + entry.start, memoryview(content))
    # safetensors are little-endian, whatever the machine is
    return np.frombuffer(content, dtype=np.dtype(entry.dtype.name).newbyteorder("<")).reshape(entry.shape)

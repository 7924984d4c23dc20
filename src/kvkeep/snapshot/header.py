"""The header of a snapshot's file, checked against the size of the file before anything is allocated."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kvkeep.result_files import parse
from kvkeep.snapshot.layout import DTYPES, KEY

LONGEST_HEADER = 64 * 2**20 - 8
_MOST_DIMS = 8
_LARGEST = 2**48
"""Limit of a tensor's numbers, also where one of its axes is empty."""


class NotASnapshotError(ValueError):
    """The reason why a file cannot be used, as a clause."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        start: its first byte, counted from the end of the header.
        stop: the byte after its last one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        about: the description that kvkeep wrote.
        entries: the tensors by name.
        start: the byte after the header.
    """

    about: Mapping[str, Any]
    entries: Mapping[str, Entry]
    start: int


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """A regular file and its size. A pipe is not waited for.

    Raises:
        NotASnapshotError: it is no regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise NotASnapshotError("it is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file, about.st_size


def read_header(file: IO[bytes], size: int) -> Header:
    """Read the header of a file of so many bytes.

    Raises:
        NotASnapshotError: the file is no safetensors file, is not whole, or was not written by kvkeep.
    """
    check(size > 0, "it is empty")
    check(size >= 10, f"it has only {size} bytes")
    length = int.from_bytes(file.read(8), "little")
    check(2 <= length <= LONGEST_HEADER and file.read(1) == b"{", "it is no safetensors file")
    check(length <= size - 8, f"it has {size} bytes, and its header alone should have {length}: it was cut off")
    try:
        found = parse(b"{" + file.read(length - 1))
    except ValueError as error:
        raise NotASnapshotError(f"its header cannot be read ({error!s:.80})") from error
    check(isinstance(found, dict), "its header is no JSON object")
    metadata = found.pop("__metadata__", None)
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    check(isinstance(text, str), "it holds tensors, but no memory of kvkeep")
    try:
        about = parse(str(text).encode())
    except ValueError as error:
        raise NotASnapshotError(f"its description cannot be read ({error!s:.80})") from error
    check(isinstance(about, dict), "its description is no JSON object")
    entries = {name: _entry(name, one) for name, one in found.items()}
    _check_cover(entries, size - 8 - length)
    return Header(about, entries, 8 + length)


def _entry(name: str, found: object) -> Entry:
    """The description of a tensor, whose shape and number of bytes agree."""
    shown = f"tensor {name!r:.60}"
    check(isinstance(found, dict) and found.keys() == {"dtype", "shape", "data_offsets"}, f"{shown} is not described")
    assert isinstance(found, dict)
    dtype = DTYPES.get(found["dtype"]) if isinstance(found["dtype"], str) else None
    if dtype is None:
        raise NotASnapshotError(f"{shown} has the dtype {found['dtype']!r:.20}, which no snapshot has")
    shape, offsets = _numbers(found["shape"]), _numbers(found["data_offsets"])
    proper = shape is not None and len(shape) <= _MOST_DIMS and math.prod(max(1, n) for n in shape) <= _LARGEST
    check(proper, f"{shown} has no proper shape")
    check(offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1], f"{shown} has no proper place")
    assert shape is not None
    assert offsets is not None
    wanted, given = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    check(wanted == given, f"{shown} has {given} bytes, and its shape {list(shape)!s:.60} asks for {wanted}")
    return Entry(dtype, shape, *offsets)


def _numbers(found: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on; ``None`` if it is none."""
    if isinstance(found, list) and all(type(number) is int and number >= 0 for number in found):
        return tuple(found)
    return None


def _check_cover(entries: Mapping[str, Entry], size: int) -> None:
    """Refuse tensors that overlap, leave gaps, or end elsewhere than the file."""
    end = 0
    for entry in sorted(entries.values(), key=lambda one: (one.start, one.stop)):
        check(entry.start == end, "its tensors overlap or leave gaps")
        end = entry.stop
    check(end == size, f"its tensors have {end} bytes, and {size} follow the header: it was cut off or is damaged")


def read_tensor(file: IO[bytes], start: int, entry: Entry) -> Tensor:
    """Read a tensor.

    Raises:
        NotASnapshotError: the file has become shorter.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if not tensor.numel():
        return tensor
    file.seek(start + entry.start)
    room = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while len(room):
        n = file.readinto(room)  # type: ignore[attr-defined]
        check(bool(n), "it became shorter while it was read")
        room = room[n:]
    return tensor


def check(holds: bool, why: str) -> None:
    """Refuse a file unless a condition holds.

    Raises:
        NotASnapshotError: it does not.
    """
    if not holds:
        raise NotASnapshotError(why)

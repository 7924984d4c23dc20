"""`Snapshot`: one sequence's memory as an object."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kvkeep.errors import InputError, SnapshotError
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.slot_codec import NUMBERS
from kvkeep.kv_bits import MOST_EXPONENT
from kvkeep.pins import Span, Spans, end, spans
from kvkeep.result_files import in_full, remove_leftovers, write_whole
from kvkeep.snapshot.contents import Contents, StateCopy
from kvkeep.snapshot.file_format import (
    DTYPES,
    KEY,
    KEY_EXPONENTS,
    KEY_NORMALS,
    LONGEST_HEADER,
    OCCUPIED,
    POSITIONS,
    SCALES,
    STATE,
    TOKENS,
    LayerDescription,
    Place,
    TensorEntry,
    check,
    described_layers,
    described_tokens,
    fingerprint_of,
    is_cut,
    opened,
    read_described,
    read_header,
    read_into,
)
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.snapshot.positions import check_ids, explained, in_slots

_NAMES = {getattr(torch, dtype.name): name for name, dtype in DTYPES.items()}
"""dtype → its name in safetensors."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence's memory over all layers, at one moment. It shares no memory with a cache and never changes.

    Attributes:
        contents: the memory itself.
        fingerprint: the model and the settings that it belongs to.
        tokens: ids of the tokens that it stands for, without padding; ``None`` if they are not known.
        pending: tokens of a prompt that were announced and not fed yet.
        note: plain data of whoever took it, such as a session's messages; it is saved as JSON.

    Raises:
        SnapshotError: there is not one token id for each token.
    """

    contents: Contents
    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None = None
    pending: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.tokens) != self.seen:
            raise SnapshotError(
                f"{len(self.tokens)} token ids were given for a sequence of {self.seen} tokens; give one for each."
            )

    @property
    def seen(self) -> int:
        """Return how many tokens the sequence has seen."""
        return self.contents.seen

    @property
    def nbytes(self) -> int:
        """Return the size of the contents and the token ids in bytes."""
        return self.contents.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def to(self, device: torch.device | str) -> Snapshot:
        """Return the same snapshot on a device. Token ids stay on the CPU."""
        return replace(self, contents=self.contents.to(device))

    def pinned(self, pins: Sequence[Span]) -> Snapshot:
        """Return the same snapshot with other pins: tokens that no head may evict from now on.

        A head that has dropped a token already does not get it back.

        Args:
            pins: spans of positions, such as ``((0, 120),)``, instead of those that the memory has; ``()`` pins none.

        Raises:
            InputError: ``pins`` are no spans, or end beyond the tokens that the memory has seen.
        """
        found = spans(pins)
        if end(found) > self.seen:
            raise InputError(
                f"The pins end at position {end(found)}, and the memory has seen {self.seen} tokens. Pin those only."
            )
        return replace(self, contents=self.contents.pinned(found))

    def positions(self, layer: int = 0) -> Int[Tensor, "Hk used"]:
        """Return the true positions of the tokens that a layer holds in the slots of each head, up to the last occupied
        one; -1 = empty.

        Args:
            layer: the layer's number among those with slots.
        """
        return self.contents.layers[layer].positions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a file of safetensors. After a crash the file is the old one or the new one.

        Raises:
            SnapshotError: the file cannot be written; an older file of that name stays as it was.
        """
        save(FileParts(self.contents, self.fingerprint, self.tokens, self.pending, self.note), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Snapshot:
        """Read a file that `save` wrote. Nothing is allocated before the file's own numbers are checked.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        return cls(*load(path)).to(device)

    def __repr__(self) -> str:
        made = self.fingerprint
        return f"Snapshot({self.seen} tokens of {made.model}, policy='{made.policy}', budget={made.budget})"


@dataclass(frozen=True, eq=False)
class SnapshotAbout:
    """What a snapshot's file says of itself, without its memory.

    Attributes:
        fingerprint, tokens, note: those of the snapshot.
        pins: spans of positions that may not be evicted.
        budgets: the budget of each layer; a tuple where heads have their own.
        nbytes: the size of the file.
        written: seconds since 1970 at which the file was written.
    """

    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None
    note: Mapping[str, Any]
    pins: Spans
    budgets: tuple[int | tuple[int, ...], ...]
    nbytes: int
    written: float

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SnapshotAbout:
        """Read the description and the token ids of a file. Its other tensors are neither read nor checked.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        source = in_full(path)
        with explained(source), opened(source) as (file, size):
            header = read_header(file, size)
            layers, note = described_layers(header.about), header.about.get("note", {})
            check(isinstance(note, dict), "its note is no object")
            tokens = described_tokens(header, layers)
            ids = None if tokens is None else read_tensor(file, header.start, tokens)
            check_ids(None if ids is None else ids.numpy())
            budgets = tuple(layer.budget for layer in layers)
            written = os.fstat(file.fileno()).st_mtime
            return cls(fingerprint_of(header.about), ids, note, layers[0].pins, budgets, size, written)


# Snapshots read from untrusted files: every number is checked before it is used.


class FileParts(NamedTuple):
    """Everything that a file holds, see `kvkeep.Snapshot`."""

    contents: Contents
    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None
    pending: int
    note: Mapping[str, Any]


_ROUNDED = 1e-4
"""By how much the square of a normal may miss 2, through rounding; 0 stands for no reflection."""


def load(path: str | os.PathLike[str]) -> FileParts:
    """Read a snapshot's file, and return its parts on the CPU.

    Raises:
        SnapshotError: the file cannot be read, or is no whole file of a snapshot.
    """
    source = in_full(path)
    with explained(source), opened(source) as (file, size):
        return _read(file, size)


def _read(file: IO[bytes], size: int) -> FileParts:
    """Read all parts of a snapshot from an open file of ``size`` bytes, checking each number before it is used.

    Raises:
        NotASnapshotError: a check fails.
    """
    found = read_described(file, size)
    header = found.header

    def tensor(entry: TensorEntry) -> Tensor:
        """Read one of the file's tensors."""
        return read_tensor(file, header.start, entry)

    ids = None if found.tokens is None else tensor(found.tokens)
    check_ids(None if ids is None else ids.numpy())
    copies = [
        _layer(f"layer {number}", layer, {name: tensor(entry) for name, entry in entries.items()})
        for number, (layer, entries) in enumerate(zip(found.layers, found.groups, strict=True))
    ]
    states: dict[int, dict[Place, Tensor]] = {number: {} for number in found.flags}
    for name, entry in header.entries.items():
        if place := STATE.fullmatch(name):
            states[int(place[1])][place[2], None if place[3] is None else int(place[3])] = tensor(entry)
    held = {number: StateCopy(tensors, found.flags[number]) for number, tensors in states.items()}
    return FileParts(Contents(tuple(copies), held), found.fingerprint, ids, found.pending, found.note)


def _layer(shown: str, about: LayerDescription, found: dict[str, Tensor]) -> RowCopy:
    """Build one layer's row from the tensors in a file, with every token in its slot.

    Raises:
        NotASnapshotError: tokens, slots or positions do not fit each other, or scales, exponents or normals of codes
            are out of range.
    """
    order = [name for name in found if name != OCCUPIED]  # the file's, so that a memory saved again has the same bytes
    bits, places = (found.pop(name).numpy() for name in (OCCUPIED, POSITIONS))
    positions = torch.from_numpy(in_slots(shown, about, bits, places))
    occupied = positions >= 0
    for name in found.keys() & set(SCALES):
        # offsets, beside the scales of codes of 4 bits, may be negative
        each = 2 if found[f"{name.removesuffix('_scales')}s"].dtype == NUMBERS[4] else 1
        whole = found[name].isfinite().all() & (found[name][..., ::each] >= 0).all()
        check(bool(whole), f"{shown} has scales that are negative or no numbers")
    if (exponents := found.get(KEY_EXPONENTS)) is not None:
        allowed = bool((exponents.int().abs() <= MOST_EXPONENT).all())
        check(allowed, f"{shown} has exponents of its keys beyond {MOST_EXPONENT}")
    if (normals := found.get(KEY_NORMALS)) is not None:
        squares = normals.square().sum(dim=-1)
        check(
            bool(((squares - 2).abs() < _ROUNDED).logical_or(squares == 0).all()),
            f"{shown} has normals of no reflections",
        )
    cut = frozenset(name for name in found if is_cut(name, about.whole))
    dense = {name: _spread(tensor, occupied) if name in cut else tensor for name, tensor in found.items()}
    dense[POSITIONS] = positions
    numbers = {name: torch.tensor(value, dtype=torch.int64) for name, value in about.numbers.items()}
    tensors = {**{name: dense[name] for name in order}, **numbers}
    return RowCopy(tensors, cut | {POSITIONS}, positions.clone(), about.capacity, about.budget, about.pins)


def _spread(packed: Tensor, occupied: Bool[Tensor, "Hk used"]) -> Tensor:
    """Return a tensor with each stored token in its slot, and 0 in empty slots: heads and slots take the place of the
    axis of tokens.
    """
    dense = packed.new_zeros((*occupied.shape, *packed.shape[1:]))
    dense[occupied] = packed
    return dense


def read_tensor(file: IO[bytes], start: int, entry: TensorEntry) -> Tensor:
    """Read one tensor from its place in a file.

    Args:
        file: open for reading.
        start: where the file's tensors begin.
        entry: the tensor.

    Raises:
        NotASnapshotError: the file has become shorter.
    """
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
    if tensor.numel():
        # as bytes, since numpy has no bfloat16; its type stubs let arrays be buffers only from Python 3.12 on
        read_into(file, start + entry.start, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return tensor


# Snapshots written to files: whole or not at all.

_OLD_S = 3600.0
"""Seconds. Temporary files of this age were left behind by a process that was killed: no write takes as long."""


def save(parts: FileParts, path: str | os.PathLike[str]) -> None:
    """Write a snapshot to a file, and remove old leftovers of interrupted writes beside it. See `Snapshot.save`.

    Raises:
        SnapshotError: the file cannot be written; an older one of that name stays as it was.
    """
    target = in_full(path)
    try:
        check_target(target)
        write_whole(target, chunks(parts))
    except (OSError, ValueError) as error:
        if isinstance(error, SnapshotError):  # a ValueError that says already what happened
            raise
        raise not_saved(target, error) from error
    remove_leftovers(target.parent, {target.name}, before=time.time() - _OLD_S)


def check_target(path: Path) -> None:
    """Refuse a path at which there is something other than a file. A path with nothing at it passes.

    Raises:
        SnapshotError: there is something else at the path.
    """
    if os.path.lexists(path) and not path.is_file():
        raise SnapshotError(f"{path} is a folder, or no regular file, and a snapshot would replace it. Give a file.")


def not_saved(path: Path, error: Exception) -> SnapshotError:
    """Return (not raise) the error for a snapshot file that cannot be written, with the reason from ``error``."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return SnapshotError(
        f"The snapshot cannot be saved to {path}: {why}. An older file of that name is as it was. Make room, or give "
        "another path."
    )


def chunks(parts: FileParts) -> Iterator[bytes]:
    """Yield the bytes of a snapshot's file in pieces, the header first.

    Raises:
        SnapshotError: the memory comes from another store than the default one, or its note is too long.
    """
    tensors = dict(_tensors(parts))
    entries: dict[str, Any] = {"__metadata__": {KEY: json.dumps(_about(parts), separators=(",", ":"))}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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


def _about(parts: FileParts) -> dict[str, Any]:
    """Return the description of a snapshot that the header of its file holds."""
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
    """Return the description of one layer, as `file_format.described_layers` reads it: all but its tensors."""
    numbers = {name: int(tensor) for name, tensor in layer.tensors.items() if _is_number(tensor)}
    heads, used = layer.positions.shape
    budget = layer.budget if isinstance(layer.budget, int) else list(layer.budget)
    sizes = {"heads": heads, "used": used, "capacity": layer.capacity, "budget": budget}
    return {**sizes, "pins": [list(span) for span in layer.pins], "whole": _whole(layer), "numbers": numbers}


def _whole(layer: RowCopy) -> list[str]:
    """Return the names of the states that each head has once."""
    return sorted(name for name in layer.tensors.keys() - layer.cut if name.startswith("state."))


def _is_number(tensor: Tensor) -> bool:
    """Return whether a tensor is a single integer, which is stored in the description and not as a tensor."""
    return tensor.ndim == 0 and tensor.dtype is torch.int64


def _tensors(parts: FileParts) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file with their names, on the CPU and contiguous, those with the largest numbers first."""
    found: list[tuple[str, Tensor]] = []
    if parts.tokens is not None:
        found.append((TOKENS, parts.tokens.to(torch.int32)))
    for number, layer in enumerate(parts.contents.layers):
        found += [(f"layers.{number}.{name}", tensor) for name, tensor in _layer_tensors(layer)]
    for number, state in parts.contents.states.items():
        for (name, key), tensor in state.tensors.items():
            found.append((f"states.{number}.{name}" + ("" if key is None else f".{key}"), tensor))
    # readers map a file into memory, where a tensor must begin at a multiple of its item size
    found.sort(key=lambda entry: -entry[1].element_size())
    yield from ((name, tensor.cpu().contiguous()) for name, tensor in found)


def _layer_tensors(layer: RowCopy) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer with their names, first the bits of `OCCUPIED`. Of tensors with slots only the
    occupied ones are kept, head by head; counters are left out, which the description has.

    Raises:
        SnapshotError: the layer has another store than the default one.
    """
    whole = _whole(layer)
    # a file does not say which tensors have slots: `_layer` finds that out again by name, so `is_cut` has to be right
    if layer.cut != {name for name in layer.tensors if is_cut(name, whole)} or "store.keys" not in layer.cut:
        raise SnapshotError("Only memory in kvkeep's own store can be saved; this cache holds another one.")
    occupied = layer.positions >= 0
    yield OCCUPIED, packed_bits(occupied.flatten().cpu())
    for name, tensor in layer.tensors.items():
        if not _is_number(tensor):
            yield name, tensor[occupied] if name in layer.cut else tensor


def packed_bits(bits: Bool[Tensor, " n"]) -> UInt8[Tensor, " bytes"]:
    """Pack booleans into bytes, eight to a byte, the first one in the lowest bit, as `in_slots` reads them."""
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def _bytes(tensor: Tensor) -> bytes:
    """Return the content of a tensor as bytes."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
    return flat.numpy().tobytes()


# Memories written to the disk beside the steps of an engine.

_T = TypeVar("_T")


class Writing(threading.Thread, Generic[_T]):
    """A thread that writes memories, one after the other. Python waits for it when it ends.

    Args:
        memories: what is written.
        write: writes one memory.
        before: the writing that must have ended before this one begins.

    Attributes:
        error: the failure that has ended the thread early.
    """

    def __init__(self, memories: Sequence[_T], write: Callable[[_T], None], before: Writing[_T] | None) -> None:
        super().__init__(name="kvkeep-writer", daemon=False)
        self._memories, self._write, self._before = memories, write, before
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Write all memories, once the writing before this one has ended.

        A failure stops the thread and is stored in ``error``.
        """
        before, self._before = self._before, None  # each thread would keep all threads before it
        try:
            if before is not None:
                before.join()
            for memory in self._memories:
                self._write(memory)
        except BaseException as error:  # raised by whoever waits for the end of the thread
            self.error = error
        self._memories = ()  # whoever needs them has them


class Pending(NamedTuple):
    """The end of a turn that waits for memories on their way to the disk.

    Attributes:
        writing: writes them.
        finish: called when they are written, or cannot be; raises the reason.
        cancel: called in place of ``finish`` if the turn was cancelled meanwhile.
    """

    writing: Writing[Any]
    finish: Callable[[], None]
    cancel: Callable[[], None] = lambda: None

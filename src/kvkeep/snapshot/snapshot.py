"""`Snapshot`: one sequence's memory as an object."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kvkeep.errors import InputError, SnapshotError
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.slot_codec import (
    EXPONENTS,
    HALVES,
    KV_BITS,
    MOST_EXPONENT,
    NORMALS,
    NUMBERS,
    scale_halves,
    transforms_keys,
)
from kvkeep.pins import Span, Spans, end, spans
from kvkeep.result_files import in_full, remove_leftovers, write_whole
from kvkeep.snapshot.contents import Contents, Place, StateCopy
from kvkeep.snapshot.file_format import (
    KEY,
    LAYER,
    LONGEST_HEADER,
    NAMES,
    OCCUPIED,
    SCALES,
    SHARED,
    STATE,
    TOKENS,
    LayerDescription,
    NotASnapshotError,
    TensorEntry,
    check,
    described_flags,
    described_layers,
    fingerprint_of,
    is_cut,
    opened,
    read_header,
    read_tensor,
    whole,
)
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.types import EMPTY


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence's memory over all layers, at one moment. It shares no memory with a cache and never changes.

    Attributes:
        contents: the memory itself.
        fingerprint: the model and the settings that it belongs to.
        tokens: ids of the tokens that it stands for, without padding; ``None`` if they are not known.
        pending: tokens of a prompt that were announced and not fed yet.
        note: plain data of whoever took it, such as a session's messages; it is saved as JSON.
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
        """Return the true positions of the tokens that a layer holds, -1 = empty.

        Layers without slots are not counted.
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
        """Read the description and the token ids of a file.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        source = in_full(path)
        with explained(source), opened(source) as (file, size):
            header = read_header(file, size)
            layers, note = described_layers(header.about), header.about.get("note", {})
            check(isinstance(note, dict), "its note is no object")
            tokens = header.entries.get(TOKENS)
            ids = None if tokens is None else read_tensor(file, header.start, tokens)
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


_EXPONENTS, _NORMALS = f"store.{EXPONENTS}", f"store.{NORMALS}"
_ROUNDED = 1e-4
"""By how much the square of a normal may miss 2."""

_EXPANSION, _SLACK = 256, 2**20
"""A file may describe slots of at most so many times its own bytes, or this many more."""


def load(path: str | os.PathLike[str]) -> FileParts:
    """Read a snapshot's file, and return its parts on the CPU.

    Raises:
        SnapshotError: the file cannot be read, or is no whole file of a snapshot.
    """
    source = in_full(path)
    with explained(source), opened(source) as (file, size):
        return _read(file, size)


@contextmanager
def explained(source: Path) -> Iterator[None]:
    """Raise a `SnapshotError` for a file that cannot be read, or is no snapshot."""
    try:
        yield
    except NotASnapshotError as error:
        raise SnapshotError(
            f"{source} is no snapshot that can be used: {error}. Give a file of kvkeep remember or Snapshot.save."
        ) from error
    except (OSError, ValueError) as error:  # a ValueError: the path has a zero byte
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SnapshotError(f"{source!s:.200} cannot be read: {why}.") from error


def _read(file: IO[bytes], size: int) -> FileParts:
    """Read an open file's parts, checking each number before it is used."""
    header = read_header(file, size)
    fingerprint, layers = fingerprint_of(header.about), described_layers(header.about)
    pending = whole(header.about.get("pending"), "pending", most=2**40)
    note = header.about.get("note", {})
    check(isinstance(note, dict), "its note is no object")
    groups = _by_layer(header.entries, len(layers))
    seen = layers[0].numbers["seen"]
    for number, (layer, entries) in enumerate(zip(layers, groups, strict=True)):
        _check_shapes(f"layer {number}", layer, entries)
        _check_vectors(f"layer {number}", entries, fingerprint)
        # a small file must not claim much memory by naming slots that are empty
        expanded = (
            layer.heads
            * layer.used
            * sum(_slot_bytes(entry) for name, entry in entries.items() if is_cut(name, layer.whole))
        )
        check(expanded <= _EXPANSION * size + _SLACK, f"layer {number} has {expanded} bytes of slots, nearly all empty")
    if (tokens := header.entries.get(TOKENS)) is not None:
        fits = (tokens.dtype, tokens.shape) == (torch.int32, (seen,))
        check(fits, f"it has not one token id for each of {seen} tokens")

    def tensor(entry: TensorEntry) -> Tensor:
        return read_tensor(file, header.start, entry)

    ids = None if tokens is None else tensor(tokens)
    check(ids is None or bool((ids >= 0).all()), "a token id is negative")
    copies = [
        _layer(f"layer {number}", layer, {name: tensor(entry) for name, entry in entries.items()})
        for number, (layer, entries) in enumerate(zip(layers, groups, strict=True))
    ]
    flags = described_flags(header.about)
    states: dict[int, dict[Place, Tensor]] = {number: {} for number in flags}
    for name, entry in header.entries.items():
        if found := STATE.fullmatch(name):
            check(int(found[1]) in states, f"state {found[1]} is not described")
            states[int(found[1])][found[2], None if found[3] is None else int(found[3])] = tensor(entry)
    held = {number: StateCopy(tensors, flags[number]) for number, tensors in states.items()}
    return FileParts(Contents(tuple(copies), held), fingerprint, ids, pending, note)


def _by_layer(entries: Mapping[str, TensorEntry], layers: int) -> list[dict[str, TensorEntry]]:
    """Group the tensors of a file by layer, under their names within the layer.

    Raises:
        NotASnapshotError: there is a tensor that no snapshot has.
    """
    groups: list[dict[str, TensorEntry]] = [{} for _ in range(layers)]
    for name, entry in entries.items():
        found = LAYER.fullmatch(name)
        # the second spelling of a number, as in 01, would be a second tensor of one name
        if found and int(found[1]) < layers and str(int(found[1])) == found[1]:
            groups[int(found[1])][found[2]] = entry
        else:
            check(
                not SHARED.fullmatch(name),
                "an earlier version kept spatten's sums beside the slots; read the text again",
            )
            known = not found and (name == TOKENS or STATE.fullmatch(name))
            check(bool(known), f"it has a tensor {name!r:.60}, which no snapshot has")
    return groups


def _check_shapes(shown: str, layer: LayerDescription, entries: Mapping[str, TensorEntry]) -> None:
    """Refuse a layer whose tensors do not fit its description, or each other.

    Raises:
        NotASnapshotError: the tensors do not fit.
    """
    missing = {OCCUPIED, "store.keys", "store.values", "store.positions"} - entries.keys()
    check(not missing, f"{shown} lacks {', '.join(sorted(missing))}")
    keys, values, bits = entries["store.keys"], entries["store.values"], entries[OCCUPIED]
    check(len(keys.shape) == len(values.shape) == 2, f"{shown} has keys or values of a wrong shape")
    slots, n = layer.heads * layer.used, keys.shape[0]
    check((bits.dtype, bits.shape) == (torch.uint8, (-(-slots // 8),)), f"{shown} has not one bit for each slot")
    check(n <= slots, f"{shown} has {n} tokens in {slots} slots")
    check(n <= layer.room, f"{shown} has {n} tokens, more than its budget of {layer.room}")
    for name in (name for name in entries if is_cut(name, layer.whole)):
        kind, shape = entries[name].dtype, entries[name].shape
        check(shape[:1] == (n,), f"{shown} has {n} tokens, and its {name} the shape {list(shape)}")
        if name not in ("store.keys", "store.values", *SCALES):
            wanted = torch.int32 if name == "store.positions" else torch.float32
            check((kind, len(shape)) == (wanted, 1), f"{name} of {shown} is no list of {wanted}")


def _check_vectors(shown: str, entries: Mapping[str, TensorEntry], made: Fingerprint) -> None:
    """Refuse keys and values that do not have the dtype of the fingerprint, or lack the scales of quantized ones.

    Raises:
        NotASnapshotError: there is such a tensor.
    """
    scales = entries.keys() & set(SCALES)
    check(len(scales) == (0 if made.kv_bits is None else 2), f"{shown} has {len(scales)} of two tensors of scales")
    transformed = transforms_keys(made.kv_bits)
    for name, dtype in ((_EXPONENTS, torch.int8), (_NORMALS, torch.float32)):
        called, entry = name.removeprefix("store.key_"), entries.get(name)
        missing = f"it has no {called} of keys of 4 bits: an earlier version wrote it; read the text again"
        check(entry is not None or not transformed, missing)
        check(entry is None or transformed, f"{shown} has needless {called} of its keys")
        check(entry is None or entry.dtype == dtype, f"{shown} has {called} that are no {str(dtype)[6:]}")
    for name, bits in zip(("keys", "values"), KV_BITS.get(made.kv_bits or "", (None, None)), strict=True):
        entry = entries[f"store.{name}"]
        wanted = f"torch.{made.dtype}" if bits is None else str(NUMBERS[bits])
        check(str(entry.dtype) == wanted, f"{shown} has {entry.dtype}, and its fingerprint says {wanted[6:]}")
        if bits is not None:
            found, (n, width) = entries[f"store.{name[:-1]}_scales"], entry.shape
            shape = (n, scale_halves(width * 8 // bits, bits))
            earlier = bits == 4 and found.shape == (n, scale_halves(width * 2, bits) // HALVES[bits])
            check(not earlier, "an earlier version wrote it, whose codes of 4 bits had no offsets; read the text again")
            check((found.dtype, found.shape) == (torch.float16, shape), f"{shown} has not the scales of its {name}")


def _slot_bytes(entry: TensorEntry) -> int:
    """Return the bytes that a tensor stores for one token."""
    return entry.dtype.itemsize * math.prod(entry.shape[1:])


def _layer(shown: str, about: LayerDescription, found: dict[str, Tensor]) -> RowCopy:
    """Build one layer's row from the tensors in a file, with every token in its slot.

    Raises:
        NotASnapshotError: tokens, slots or positions do not fit each other.
    """
    occupied = unpacked_bits(found.pop(OCCUPIED), about.heads * about.used).view(about.heads, about.used)
    n = len(found["store.positions"])
    check(int(occupied.sum()) == n, f"{shown} has {n} tokens in {int(occupied.sum())} occupied slots")
    check(not about.used or bool(occupied[:, -1].any()), f"{shown} ends with empty slots")
    for name in found.keys() & set(SCALES):
        # offsets, beside the scales of codes of 4 bits, may be negative
        each = 2 if found[f"{name.removesuffix('_scales')}s"].dtype == NUMBERS[4] else 1
        whole = found[name].isfinite().all() & (found[name][..., ::each] >= 0).all()
        check(bool(whole), f"{shown} has scales that are negative or no numbers")
    if (exponents := found.get(_EXPONENTS)) is not None:
        allowed = bool((exponents.int().abs() <= MOST_EXPONENT).all())
        check(allowed, f"{shown} has exponents of its keys beyond {MOST_EXPONENT}")
    if (normals := found.get(_NORMALS)) is not None:
        squares = normals.square().sum(dim=-1)
        check(
            bool(((squares - 2).abs() < _ROUNDED).logical_or(squares == 0).all()),
            f"{shown} has normals of no reflections",
        )
    cut = frozenset(name for name in found if is_cut(name, about.whole))
    dense = {name: _spread(tensor, occupied) if name in cut else tensor for name, tensor in found.items()}
    positions = dense["store.positions"].masked_fill_(~occupied, EMPTY)
    _check_positions(shown, found["store.positions"], positions, about.numbers["seen"])
    numbers = {name: torch.tensor(value, dtype=torch.int64) for name, value in about.numbers.items()}
    return RowCopy({**dense, **numbers}, cut, positions.clone(), about.capacity, about.budget, about.pins)


def _check_positions(shown: str, found: Int[Tensor, " n"], dense: Int[Tensor, "Hk used"], seen: int) -> None:
    """Refuse positions that the sequence has not seen, or that a head holds twice.

    Raises:
        NotASnapshotError: there is such a position.
    """
    check(bool(((found >= 0) & (found < seen)).all()), f"{shown} holds positions outside of the {seen} tokens seen")
    order = dense.sort(dim=1).values
    twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
    check(not bool(twice.any()), f"{shown} holds a position twice in a head")


def _spread(packed: Tensor, occupied: Bool[Tensor, "Hk used"]) -> Tensor:
    """Return a tensor with each stored token in its slot, and 0 in empty slots."""
    dense = packed.new_zeros((*occupied.shape, *packed.shape[1:]))
    dense[occupied] = packed
    return dense


def unpacked_bits(found: UInt8[Tensor, " bytes"], n: int) -> Bool[Tensor, " n"]:
    """Return the first ``n`` bits of a tensor of bytes as booleans; the inverse of `packed_bits`."""
    bits: Tensor = (found[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:n].bool()


# Snapshots written to files: whole or not at all.

_OLD_S = 3600.0
"""Temporary files of this age were left behind by a process that was killed."""


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
    """Refuse a path at which there is something other than a file.

    Raises:
        SnapshotError: there is something else at the path.
    """
    if os.path.lexists(path) and not path.is_file():
        raise SnapshotError(f"{path} is a folder, or no regular file, and a snapshot would replace it. Give a file.")


def not_saved(path: Path, error: Exception) -> SnapshotError:
    """Return the error for a snapshot file that cannot be written."""
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
    """Return the description of one layer."""
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
    """Yield the tensors of a file by name, on the CPU, the largest dtype first."""
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
    """Yield the tensors of a layer by name. Of tensors with slots only the occupied ones are kept, head by head.

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
    """Pack booleans into bytes, eight to a byte, the first one in the lowest bit."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8)
    return (padded * weights).sum(dim=1).to(torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    """Return the content of a tensor as bytes."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
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
        before, self._before = self._before, None
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

"""The header of a snapshot's file, checked against the size of the file before anything is allocated.

Importing this module imports no torch, so that a list of many files is there at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import stat
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from kvkeep.errors import InputError
from kvkeep.kv_bits import EXPONENTS, HALVES, KV_BITS, NORMALS, scale_halves, transforms_keys
from kvkeep.pins import Spans, spans
from kvkeep.result_files import parse
from kvkeep.snapshot.fingerprint import FORMAT, Fingerprint

# The layout of a snapshot's file: names, dtypes, and the description in the header.
#
# A file is safetensors. Its metadata has one entry, ``kvkeep``, a JSON object: the fingerprint, and for each layer the
# numbers that need no tensor. Only occupied slots are stored; a bit for each slot up to the last occupied one says
# which these are. ``docs/sessions.md`` draws the layout.


KEY = "kvkeep"
"""The entry of the metadata."""

Place: TypeAlias = tuple[str, int | None]
"""An attribute of a layer with a state; with a key if the attribute is a dictionary."""

Flag: TypeAlias = bool | int | None
"""A setting of such a layer beside its tensors."""


class Dtype(NamedTuple):
    """A dtype by torch's name, and the bytes of a number."""

    name: str
    itemsize: int


DTYPES = {
    "BOOL": Dtype("bool", 1),
    "U8": Dtype("uint8", 1),
    "I8": Dtype("int8", 1),
    "I32": Dtype("int32", 4),
    "I64": Dtype("int64", 8),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "F32": Dtype("float32", 4),
    "F64": Dtype("float64", 8),
}
"""The dtypes of safetensors that a snapshot may have."""

TOKENS, OCCUPIED, POSITIONS = "tokens", "occupied", "store.positions"

LAYER = re.compile(r"layers\.(\d{1,4})\.(occupied|[a-z]{1,20}(?:\.[A-Za-z0-9_]{1,60})?)")
SHARED = re.compile(r"shared\.([a-z]{1,20})")
STATE = re.compile(r"states\.(\d{1,4})\.([a-z_]{1,40})(?:\.(\d{1,4}))?")
"""Names of tensors: of a layer with slots, of the tables of an earlier version, and of a layer with a state."""

SCALES = ("store.key_scales", "store.value_scales")
"""Tensors that slots of codes have besides their numbers, see `kvkeep.kv.slot_codec`."""

CUT = ("store.keys", "store.values", "store.positions", *SCALES)
"""Tensors with one entry per slot, besides the policy's state."""


def is_cut(name: str, whole: Collection[str] = ()) -> bool:
    """Return whether a tensor of a layer has one entry per slot.

    Args:
        name: the tensor's name within the layer.
        whole: names of the policy's state that each head has once, whatever its slots.
    """
    return name in CUT or (name.startswith("state.") and name not in whole)


LONGEST_HEADER = 64 * 2**20 - 8
"""64 MiB together with the eight bytes that say how long it is."""
_MOST_DIMS = 8
"""Axes of a tensor, more than any tensor of a snapshot has."""
_LARGEST = 2**48
"""Limit of a tensor's numbers, also where one of its axes is empty."""


class NotASnapshotError(ValueError):
    """The reason why a file cannot be used, as a clause."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        start: its first byte, counted from the end of the header.
        stop: the byte after its last one.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that the tensor stores for one token."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        about: the description that kvkeep wrote.
        entries: the tensors by name.
        start: the byte after the header.
    """

    about: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    start: int


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file, and yield the file and its size. Anything else, such as a pipe, is refused without waiting
    for it.

    Raises:
        NotASnapshotError: the path is no regular file.
        OSError: the file cannot be opened.
    """
    # O_BINARY: Windows would change line ends
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise NotASnapshotError("it is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file, about.st_size


def read_header(file: IO[bytes], size: int) -> Header:
    """Read and check the header of a snapshot's file of ``size`` bytes.

    Raises:
        NotASnapshotError: the file is no safetensors file, is not whole, or was not written by kvkeep.
    """
    check(size > 0, "it is empty")
    check(size >= 10, f"it has only {size} bytes")  # the length of the header, and the shortest one: {}
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
    entries = {name: _entry(name, described) for name, described in found.items()}
    _check_cover(entries, size - 8 - length)
    return Header(about, entries, 8 + length)


def _entry(name: str, found: object) -> TensorEntry:
    """Return the checked description of one tensor from the header.

    Raises:
        NotASnapshotError: a check fails.
    """
    shown = f"tensor {name!r:.60}"
    check(isinstance(found, dict) and found.keys() == {"dtype", "shape", "data_offsets"}, f"{shown} is not described")
    assert isinstance(found, dict)
    dtype = DTYPES.get(found["dtype"]) if isinstance(found["dtype"], str) else None
    if dtype is None:
        raise NotASnapshotError(f"{shown} has the dtype {found['dtype']!r:.20}, which no snapshot has")
    shape, offsets = _numbers(found["shape"]), _numbers(found["data_offsets"])
    # a 0 in one axis must not hide another axis that no tensor can have
    proper = shape is not None and len(shape) <= _MOST_DIMS and math.prod(max(1, n) for n in shape) <= _LARGEST
    check(proper, f"{shown} has no proper shape")
    check(offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1], f"{shown} has no proper place")
    assert shape is not None
    assert offsets is not None
    wanted, given = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    check(wanted == given, f"{shown} has {given} bytes, and its shape {list(shape)!s:.60} asks for {wanted}")
    return TensorEntry(dtype, shape, *offsets)


def _numbers(found: object) -> tuple[int, ...] | None:
    """Return a list of non-negative integers as a tuple; ``None`` if the value is no such list."""
    if isinstance(found, list) and all(type(number) is int and number >= 0 for number in found):
        return tuple(found)
    return None


def _check_cover(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Refuse tensors that do not fill the ``size`` bytes behind the header: that overlap, leave gaps, or end elsewhere.

    Raises:
        NotASnapshotError: the tensors do.
    """
    end = 0
    # by the end as well: a tensor without numbers comes before the one that begins at the same byte
    for entry in sorted(entries.values(), key=lambda one: (one.start, one.stop)):
        check(entry.start == end, "its tensors overlap or leave gaps")
        end = entry.stop
    check(end == size, f"its tensors have {end} bytes, and {size} follow the header: it was cut off or is damaged")


def read_into(file: IO[bytes], start: int, room: memoryview) -> None:
    """Fill ``room``, all of it, with the bytes of a file from ``start`` on.

    Raises:
        NotASnapshotError: the file has become shorter.
    """
    file.seek(start)
    while len(room):
        n = file.readinto(room)  # type: ignore[attr-defined]  # typing's IO has no such method, all binary files do
        check(bool(n), "it became shorter while it was read")
        room = room[n:]


def check(holds: bool, why: str) -> None:
    """Raise `NotASnapshotError` with the reason ``why`` unless ``holds`` is true.

    Type checkers do not see what it rules out, so that an ``assert`` often tells them again.

    Raises:
        NotASnapshotError: the condition does not hold.
    """
    if not holds:
        raise NotASnapshotError(why)


# The description in a snapshot's file: plain data of JSON, turned into checked values.

_MOST_LAYERS, _MOST_HEADS, _MOST = 4096, 2**16, 2**40
"""More than any model has, and tokens that nobody reads: products of such numbers still fit into 64 bits."""
_LONGEST = 1000
"""Characters of a text in a fingerprint."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_COUNTERS = ("seen", "prompt", "sequences")


@dataclass(frozen=True)
class LayerDescription:
    """What a file says of a layer besides its tensors.

    Attributes:
        heads: KV heads.
        used: slots up to the last occupied one.
        capacity: slots per head of the block.
        budget: slots that may stay occupied, of all heads or of each head.
        pins: spans of positions that may not be evicted.
        whole: names of the state that each head has once.
        numbers: the row's counters by name.
    """

    heads: int
    used: int
    capacity: int
    budget: int | tuple[int, ...]
    pins: Spans
    whole: frozenset[str]
    numbers: Mapping[str, int]

    @property
    def room(self) -> int:
        """Return the largest number of tokens that all heads together may hold."""
        return self.heads * self.budget if isinstance(self.budget, int) else sum(self.budget)


def fingerprint_of(about: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint in a file's description, checked.

    Raises:
        NotASnapshotError: there is no fingerprint, it has a newer format, or a part of it has a wrong type.
    """
    found = about.get("fingerprint")
    check(isinstance(found, dict), "it has no fingerprint")
    assert isinstance(found, dict)
    version = found.get("version")
    # not isinstance: true is an int as well
    if type(version) is int and version > FORMAT:
        raise NotASnapshotError(f"it has format {version}, and this kvkeep reads formats up to {FORMAT}; update kvkeep")
    if version == 1 and type(version) is int:
        _check_shares(found, about)
        version = FORMAT
    # parts that earlier versions of kvkeep did not write, or that are left out where there is none
    found = {"head_budget": None, "kv_bits": None, "adapter": None, **found, "version": version}
    names = {field.name for field in dataclasses.fields(Fingerprint)}
    check(found.keys() == names and version == FORMAT, "its fingerprint does not have the parts of this format")
    if isinstance(found["layer_budget"], list):
        found = {**found, "layer_budget": tuple(found["layer_budget"])}
    kinds = typing.get_type_hints(Fingerprint)
    for name, value in found.items():
        check(_is_a(value, kinds[name]), f"the {name} of its fingerprint is {value!r:.40}")
    check(1 <= found["budget"] <= _MOST, f"its budget is {found['budget']}")
    check(found["positions"] in ("true", "slot"), f"its positions mode is {found['positions']!r:.40}")
    if found["kv_bits"] is not None:
        check(found["kv_bits"] in KV_BITS, f"its kv_bits are {found['kv_bits']!r:.40}")
        check(found["dtype"] in _FLOATS, f"its dtype is {found['dtype']!r:.40}")
    return Fingerprint(**found)


def _check_shares(fingerprint: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Refuse a file of the first format whose layers with sliding windows had other shares of a budget than today.

    Only a layer budget of the kind ``sliding`` gives layers with windows shares of their own.

    That is so where a window is smaller than the budget: such a layer used less than the budget in full, so all layers
    together have fewer slots than with equal budgets.

    Raises:
        NotASnapshotError: the shares differ, or the layers are not described.
    """
    budget = fingerprint.get("budget")
    if not str(fingerprint.get("layer_budget")).startswith("sliding") or type(budget) is not int:
        return
    missing = sum(layer.heads * budget - layer.room for layer in described_layers(about))
    check(missing <= 0, "an earlier version wrote it, which gave layers with windows other shares; read the text again")


def _is_a(value: object, kind: Any) -> bool:
    """Return whether a value has ``kind``, the declared type of a field of `Fingerprint`, and is not too long."""
    if isinstance(value, tuple):
        weights = all(isinstance(weight, float | int) and not isinstance(weight, bool) for weight in value)
        return weights and len(value) <= _MOST_LAYERS and kind == str | tuple[float, ...]
    kinds = typing.get_args(kind) or (kind,)
    return type(value) in kinds and not (isinstance(value, str) and len(value) > _LONGEST)


def described_layers(about: Mapping[str, Any]) -> list[LayerDescription]:
    """Return the descriptions of a file's layers with slots, in order and checked.

    Raises:
        NotASnapshotError: there are no layers, a description is wrong, or they have seen different numbers of tokens.
    """
    found = about.get("layers")
    check(isinstance(found, list) and 0 < len(found) <= _MOST_LAYERS, "it describes no layers")
    assert isinstance(found, list)
    layers = [_layer(described, f"layer {number}") for number, described in enumerate(found)]
    check(len({layer.numbers["seen"] for layer in layers}) == 1, "its layers have seen different numbers of tokens")
    return layers


def _layer(found: object, shown: str) -> LayerDescription:
    """Return the description of one layer with slots, checked without a look at its tensors.

    Args:
        found: the layer's entry in the header.
        shown: names the layer in errors.

    Raises:
        NotASnapshotError: the description is wrong.
    """
    check(isinstance(found, dict), f"{shown} is not described")
    assert isinstance(found, dict)
    heads = whole(found.get("heads"), f"the number of heads of {shown}", least=1, most=_MOST_HEADS)
    capacity = whole(found.get("capacity"), f"the capacity of {shown}", least=1, most=2**31)
    used = whole(found.get("used"), f"the number of slots of {shown}", most=capacity)
    budget = found.get("budget")
    if isinstance(budget, list):
        check(len(budget) == heads, f"{shown} has {len(budget)} budgets for {heads} heads")
        budget = tuple(whole(number, f"a budget of {shown}", most=_MOST) for number in budget)
    else:
        budget = whole(budget, f"the budget of {shown}", least=1, most=_MOST)
    try:
        pins = spans(found.get("pins"))
    except InputError as error:
        raise NotASnapshotError(f"{shown}: {error}") from error
    names = found.get("whole")
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), f"{shown} lacks names of state")
    numbers = found.get("numbers")
    check(isinstance(numbers, dict) and numbers.keys() >= {*_COUNTERS}, f"{shown} lacks counters")
    assert isinstance(numbers, dict)
    for name, value in numbers.items():
        least = -(2**63) if name == "sequences" else 0  # an identity may be any number
        whole(value, f"{name!r:.40} of {shown}", least=least, most=2**63 - 1)
    whole(numbers["seen"], f"the number of tokens of {shown}", least=1, most=_MOST)
    check(numbers["prompt"] <= numbers["seen"], f"{shown} has a prompt longer than its text")
    return LayerDescription(heads, used, capacity, budget, pins, frozenset(names or ()), numbers)


def described_tokens(header: Header, layers: Sequence[LayerDescription]) -> TensorEntry | None:
    """Return the tensor of the token ids; ``None`` if they are not stored. Their numbers are not looked at.

    Raises:
        NotASnapshotError: there is not one id for each token that the layers have seen.
    """
    tokens, seen = header.entries.get(TOKENS), layers[0].numbers["seen"]
    fits = tokens is None or (tokens.dtype.name, tokens.shape) == ("int32", (seen,))
    check(fits, f"it has not one token id for each of {seen} tokens")
    return tokens


def described_flags(about: Mapping[str, Any]) -> dict[int, dict[Place, Flag]]:
    """Return the flags of the layers with a state of fixed size, by layer number, checked.

    Raises:
        NotASnapshotError: the flags are not in the form that `Snapshot.save` writes.
    """
    found = about.get("states")
    check(isinstance(found, dict) and len(found) <= _MOST_LAYERS, "it does not describe its states")
    assert isinstance(found, dict)
    states = {}
    for number, flags in found.items():
        # four digits, as in the names of tensors; `isdigit` alone takes digits of other scripts
        check(number.isascii() and number.isdigit() and len(number) < 5, f"{number!r:.40} is no number of a layer")
        check(isinstance(flags, list) and all(map(_is_flag, flags)), f"the state of layer {number} is not described")
        states[int(number)] = {(name, key): flag for name, key, flag in flags}
    return states


def _is_flag(found: object) -> bool:
    """Return whether an entry has the form ``[name, key or None, flag]``."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    name, key, flag = found
    return isinstance(name, str) and (key is None or type(key) is int) and (flag is None or type(flag) in (bool, int))


def whole(found: object, shown: str, *, least: int = 0, most: int) -> int:
    """Return a value after checking that it is an integer from ``least`` to ``most``. ``shown`` names it in the error.

    Raises:
        NotASnapshotError: the value is no such integer.
    """
    # not isinstance: `true` of JSON is an int as well
    if type(found) is not int or not least <= found <= most:
        raise NotASnapshotError(f"{shown} is {found!r:.40}")
    return found


# Header and description together, checked as far as they can be without a tensor.

_NUMBERS = {8: "int8", 4: "uint8"}
"""The dtype of a vector's codes by number of bits."""

KEY_EXPONENTS, KEY_NORMALS = f"store.{EXPONENTS}", f"store.{NORMALS}"
"""Tensors of a layer whose keys have codes of 4 bits, see `kvkeep.kv_bits`: how they were transformed before."""

_EXPANSION, _SLACK = 256, 2**20
"""A file may describe slots of at most so many times its own bytes, and this many bytes more."""


@dataclass(frozen=True)
class Described:
    """Everything that a file says of its memory.

    Attributes:
        header: the header.
        fingerprint: the model and the settings that it belongs to.
        layers: the layers with slots.
        groups: the tensors of each of them, under their names within the layer.
        flags: the settings of the layers with a state of fixed size, by layer number.
        pending: tokens of a prompt that were announced and not fed yet.
        note: plain data of whoever took the snapshot.
        tokens: the tensor of the token ids, see `described_tokens`.
    """

    header: Header
    fingerprint: Fingerprint
    layers: list[LayerDescription]
    groups: list[dict[str, TensorEntry]]
    flags: dict[int, dict[Place, Flag]]
    pending: int
    note: Mapping[str, Any]
    tokens: TensorEntry | None

    @property
    def seen(self) -> int:
        """Return how many tokens the sequence has seen."""
        return self.layers[0].numbers["seen"]


def read_described(file: IO[bytes], size: int) -> Described:
    """Read what an open file of ``size`` bytes says of its memory, and check it.

    Raises:
        NotASnapshotError: a check fails.
    """
    header = read_header(file, size)
    fingerprint, layers = fingerprint_of(header.about), described_layers(header.about)
    pending = whole(header.about.get("pending"), "pending", most=2**40)
    note = header.about.get("note", {})
    check(isinstance(note, dict), "its note is no object")
    groups = _by_layer(header.entries, len(layers))
    for number, (layer, entries) in enumerate(zip(layers, groups, strict=True)):
        _check_shapes(f"layer {number}", layer, entries)
        _check_vectors(f"layer {number}", entries, fingerprint)
        # a small file must not claim much memory by naming slots that are empty
        cut = (entry for name, entry in entries.items() if is_cut(name, layer.whole))
        expanded = layer.heads * layer.used * sum(entry.slot_bytes for entry in cut)
        check(expanded <= _EXPANSION * size + _SLACK, f"layer {number} has {expanded} bytes of slots, nearly all empty")
    flags = described_flags(header.about)
    for name in header.entries:
        if state := STATE.fullmatch(name):
            check(int(state[1]) in flags, f"state {state[1]} is not described")
    return Described(header, fingerprint, layers, groups, flags, pending, note, described_tokens(header, layers))


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
    check((bits.dtype.name, bits.shape) == ("uint8", (-(-slots // 8),)), f"{shown} has not one bit for each slot")
    check(n <= slots, f"{shown} has {n} tokens in {slots} slots")
    check(n <= layer.room, f"{shown} has {n} tokens, more than its budget of {layer.room}")
    for name in (name for name in entries if is_cut(name, layer.whole)):
        kind, shape = entries[name].dtype, entries[name].shape
        check(shape[:1] == (n,), f"{shown} has {n} tokens, and its {name} the shape {list(shape)}")
        if name not in ("store.keys", "store.values", *SCALES):
            wanted = "int32" if name == "store.positions" else "float32"
            check((kind.name, len(shape)) == (wanted, 1), f"{name} of {shown} is no list of {wanted}")


def _check_vectors(shown: str, entries: Mapping[str, TensorEntry], made: Fingerprint) -> None:
    """Refuse a layer of a file whose keys, values, scales or transforms do not fit its fingerprint's dtype and KV bits:
    of another dtype or shape, missing, or needless.

    Args:
        shown: the layer, as an error names it.
        entries: the layer's tensors, by their names within it.
        made: what the file says it was made for.

    Raises:
        NotASnapshotError: there is such a tensor.
    """
    scales = entries.keys() & set(SCALES)
    check(len(scales) == (0 if made.kv_bits is None else 2), f"{shown} has {len(scales)} of two tensors of scales")
    transformed = transforms_keys(made.kv_bits)
    for name, dtype in ((KEY_EXPONENTS, "int8"), (KEY_NORMALS, "float32")):
        called, entry = name.removeprefix("store.key_"), entries.get(name)
        missing = f"it has no {called} of keys of 4 bits: an earlier version wrote it; read the text again"
        check(entry is not None or not transformed, missing)
        check(entry is None or transformed, f"{shown} has needless {called} of its keys")
        check(entry is None or entry.dtype.name == dtype, f"{shown} has {called} that are no {dtype}")
    for name, bits in zip(("keys", "values"), KV_BITS.get(made.kv_bits or "", (None, None)), strict=True):
        entry = entries[f"store.{name}"]
        wanted = made.dtype if bits is None else _NUMBERS[bits]
        check(entry.dtype.name == wanted, f"{shown} has {entry.dtype.name}, and its fingerprint says {wanted}")
        if bits is not None:
            found, (n, width) = entries[f"store.{name[:-1]}_scales"], entry.shape
            shape = (n, scale_halves(width * 8 // bits, bits))
            earlier = bits == 4 and found.shape == (n, scale_halves(width * 2, bits) // HALVES[bits])
            check(not earlier, "an earlier version wrote it, whose codes of 4 bits had no offsets; read the text again")
            check((found.dtype.name, found.shape) == ("float16", shape), f"{shown} has not the scales of its {name}")

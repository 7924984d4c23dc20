"""GGUF files: their metadata, where their tensors lie, and the values of those tensors.

A file cannot be trusted. Every count and every length in it is checked against its size before memory is taken for it,
and nothing in it is code. The package ``gguf`` brings the types of tensors and unpacks their values. Its own reader is
not used: it makes an array of each token, which takes seconds for a large vocabulary.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvkeep.backends import QuantizedTensor
from kvkeep.errors import InputError, KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import gguf_blocks
from kvkeep.models.folder import GGUF_MAGIC, GGUF_SUFFIX

SUFFIX = GGUF_SUFFIX
_VERSIONS = (2, 3)
_HEADER, _LENGTH = struct.Struct("<4sIQQ"), struct.Struct("<Q")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_ALIGNMENT, _MOST_ALIGNMENT = 32, 2**16
_MOST_DIMENSIONS = 4  # of ggml's tensors
_MOST_PARTS = 1000
_CHUNK = 2**22
"""Numbers that are unpacked at once: a whole table of embeddings in float32 would double the memory of loading."""

_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_NUMBERS = dict(zip((0, 1, 2, 3, _UINT32, 5, 6, 7, _UINT64, 11, 12), "BbHhIif?Qqd", strict=True))
"""Kinds of values in metadata that have a fixed size, with their formats."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of tensors that hold plain numbers, by their names in the package ``gguf``."""

_OTHER_FILES = {
    "clip": "the vision or audio tower of a model (mmproj)",
    "mmproj": "the vision or audio tower of a model (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
    "vocab": "a vocabulary without weights",
}
"""Kinds of files that hold no language model: the word in ``general.type`` or ``general.architecture``."""

_T = TypeVar("_T")


class TensorInfo(NamedTuple):
    """Where one tensor lies, and how it is stored.

    Attributes:
        path: the file that holds it.
        type: its type's name, such as ``F16`` or ``Q4_K``.
        shape: its shape as torch has it, the innermost dimension last.
        offset: its first byte in the file.
        size: its bytes.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def is_packed(self) -> bool:
        """Return whether the tensor is stored as blocks of few bits."""
        return self.type not in FLOATS


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, or the parts of a split one: everything but the values of tensors.

    Attributes:
        path: the file, or the first part.
        metadata: its keys and values; arrays are lists.
        tensors: its tensors, by their names in the file.
    """

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def architecture(self) -> str:
        """Return the architecture, as llama.cpp names it."""
        name: str = self.metadata["general.architecture"]
        return name

    def types(self) -> dict[str, int]:
        """Return the number of tensors of each type, the most frequent type first."""
        return dict(Counter(tensor.type for tensor in self.tensors.values()).most_common())

    @property
    def is_packed(self) -> bool:
        """Return whether some tensors are stored as blocks of few bits."""
        return any(tensor.is_packed for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that ``auto`` stands for: bfloat16 if some tensors are packed or of that type, else float16
        if some are of that type, else float32.
        """
        types = self.types()
        if self.is_packed or "BF16" in types:
            return torch.bfloat16
        return torch.float16 if "F16" in types else torch.float32

    def has(self, key: str) -> bool:
        """Return whether the file has a value under this key, which is named without the architecture before it."""
        return f"{self.architecture}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer from the metadata, from 0 to below 2**31.

        Args:
            key: its name, without the architecture before it.
            default: the value if the file has none; ``None``: it must have one.

        Raises:
            ModelFileError: there is no such value, or it is no such number.
            UnsupportedModelError: the number differs between layers.
        """
        return self._value(key, default, lambda value: isinstance(value, int) and 0 <= value < 2**31, "a whole number")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number from the metadata, rounded by `short_float`; see `integer`."""
        found = self._value(
            key, default, lambda value: isinstance(value, int | float) and math.isfinite(value), "a number"
        )
        return short_float(float(found))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text from the metadata, see `integer`."""
        return self._value(key, default, lambda value: isinstance(value, str), "a text")

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean from the metadata, see `integer`."""
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def _value(self, key: str, default: _T | None, fits: Callable[[Any], bool], kind: str) -> _T:
        """Return the value of a key of the architecture, or of one that begins with ``tokenizer.``, after checking it.
        A list with one value per layer must have equal values, of which one is returned.

        Args:
            key: its name, without the architecture before it.
            default: the value if the file has none; ``None``: it must have one.
            fits: whether a value is of the right type.
            kind: that type in words, for the message.

        Raises:
            ModelFileError: the value is missing, or of another type.
            UnsupportedModelError: the layers have different values.
        """
        name = key if key.startswith("tokenizer.") else f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelFileError(f"{self.path} has no {name} in its metadata. Download the file again.")
        if isinstance(value, list) and value and all(part == value[0] for part in value):
            value = value[0]  # one value for each layer
        if isinstance(value, list) and name != key:  # only the architecture's lists have a value per layer
            raise UnsupportedModelError(
                f"{self.path} is of the architecture {self.architecture!r:.60} with another {key} for each layer, "
                "which kvkeep does not read from a GGUF file. Give the model's folder with safetensors."
            )
        # true is a whole number as well: it only fits where the default is true or false
        if isinstance(value, bool) is not isinstance(default, bool) or not fits(value):
            raise ModelFileError(f"{self.path}: {name} is {value!r:.60} and not {kind}. Download the file again.")
        return value  # type: ignore[no-any-return]  # `fits` says so

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of this name in the file, the innermost dimension last.

        Raises:
            ModelFileError: there is no such tensor.
        """
        if name not in self.tensors:
            raise ModelFileError(f"{self.path} has no tensor {name}, so it is no whole model. Download the file again.")
        return self.tensors[name].shape


def short_float(value: float) -> float:
    """Return the decimal number with the fewest digits that is the same in float32: files hold 1e-5 as
    9.999999747378752e-06. A number that float32 does not have is returned as it is.
    """
    short = float(str(np.float32(value)))
    return short if np.float32(value) == value else value


# Reading a file's metadata and its table of tensors.


def read(path: str | Path) -> GGUFFile:
    """Return a file's metadata and table of tensors; of a split file, of all its parts.

    Raises:
        ModelFileError: the file is damaged, or a part is missing.
        UnsupportedModelError: it holds no language model, or a tensor of a type that cannot be unpacked.
        InputError: the package gguf is not installed.
    """
    parts = tuple(parts_of(Path(path)))
    return _read(parts, tuple((part.stat().st_mtime_ns, part.stat().st_size) for part in parts))


@functools.lru_cache(maxsize=2)
def _read(parts: tuple[Path, ...], _state: tuple[tuple[int, int], ...]) -> GGUFFile:
    """Read the metadata and the table of tensors of a file from its parts; cached, since the configuration, the
    tokenizer and the weights ask one after the other.

    Args:
        parts: the paths.
        _state: time and size of each, so that a file that has changed is read anew.

    Raises:
        ModelFileError: a part is damaged or belongs elsewhere, two tensors have one name, or there are none.
        UnsupportedModelError: it holds no language model, or a tensor of a type that cannot be unpacked.
        InputError: the package gguf is not installed.
    """
    path, tensors = parts[0], dict[str, TensorInfo]()
    metadata: Mapping[str, Any] = {}
    for number, part in enumerate(parts):
        with _damaged(part):
            found, table = _Reader(part).read()
        metadata = metadata or found  # the first part describes the model, the others only themselves
        # a count of 0 is llama.cpp's mark of a file that was merged from parts
        if found.get("split.no", number) != number or found.get("split.count", len(parts)) not in (0, len(parts)):
            raise ModelFileError(
                f"{part} is not part {number + 1} of {len(parts)}, as its name says. Download it again."
            )
        for name, tensor in table:
            if name in tensors:
                raise ModelFileError(f"{part} has two tensors of the name {name!r:.80}. Download the file again.")
            tensors[name] = tensor
    _check_kind(path, metadata)
    if not tensors:
        raise ModelFileError(f"{path} has no tensors, so it is no whole model. Download the file again.")
    return GGUFFile(path, metadata, tensors)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turn errors in the context into a `ModelFileError` that calls the file damaged."""
    try:
        yield
    except KVKeepError:
        raise
    except (OSError, struct.error, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(
            f"{path} cannot be read as a GGUF file ({reason.rstrip('.'):.200}). Download it again: a partial download "
            "looks like this."
        ) from error


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse a file that holds something else than a language model.

    Raises:
        ModelFileError: the file names no architecture.
        UnsupportedModelError: it holds something else.
    """
    kind, architecture = metadata.get("general.type", "model"), metadata.get("general.architecture")
    for word in (kind, architecture):
        if isinstance(word, str) and word in _OTHER_FILES:
            raise UnsupportedModelError(f"{path} is {_OTHER_FILES[word]}, not a language model. Give the model's file.")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(f"{path} names no general.architecture in its metadata. Download the file again.")


class _Reader:
    """Reads one file. Whatever it returns lies within the file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.stat().st_size < _HEADER.size:
            raise ValueError("it is empty" if not path.stat().st_size else "it is too short")
        with open(path, "rb") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._at = 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, TensorInfo]]]:
        """Read the whole header. Return the metadata, and the tensors with their names, in the file's order.

        Raises:
            ValueError: the file is not GGUF, of another version, damaged or cut off.
            UnsupportedModelError: a tensor has a type that cannot be unpacked.
            InputError: the package gguf is not installed.
        """
        magic, version, tensors, values = _HEADER.unpack(self._take(_HEADER.size))
        if magic != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in _VERSIONS:
            # 2 and 3 from the other end have only zeros in the lower half
            big = ": its bytes are in big-endian order" if version >= 2**16 and not version % 2**16 else ""
            raise ValueError(f"its version is {version}{big}; kvkeep reads versions 2 and 3")
        metadata = {}
        # 13: the length of a name, a kind and a value of one byte; 24: a name's length, dimensions, type and offset
        for _ in range(self._count(values, at_least=13)):
            key = self._string()
            if key in metadata:
                raise ValueError(f"it has two values of the name {key!r:.80}")
            metadata[key] = self._value(self._number(_UINT32))
        table = [self._tensor() for _ in range(self._count(tensors, at_least=24))]
        return metadata, self._placed(table, metadata.get("general.alignment", _ALIGNMENT))

    def _take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes, and move on.

        Raises:
            ValueError: the file ends before.
        """
        end = self._at + size
        if end > len(self._bytes):
            raise ValueError("it is cut off")
        taken = self._bytes[self._at : end]
        self._at = end
        return taken

    def _count(self, count: int, at_least: int) -> int:
        """Return a count from the file, after checking that the rest of the file is long enough for so many entries.

        Raises:
            ValueError: it is too short.
        """
        if count * at_least > len(self._bytes) - self._at:
            raise ValueError(f"it is cut off, or damaged: there is no room for {count} entries")
        return count

    def _numbers(self, kind: int, count: int = 1) -> tuple[Any, ...]:
        """Read ``count`` numbers of one kind."""
        form = f"<{self._count(count, struct.calcsize(_NUMBERS[kind]))}{_NUMBERS[kind]}"
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _number(self, kind: int) -> Any:
        """Read one number."""
        return self._numbers(kind)[0]

    def _length(self) -> int:
        """Read the length of a string."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._count(length, at_least=1)

    def _string(self) -> str:
        """Read a string."""
        return str(self._take(self._length()), "utf-8")

    def _value(self, kind: int) -> Any:
        """Read a value of the metadata: a number, a string, or an array of them.

        Raises:
            ValueError: its kind is not known.
        """
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise ValueError(f"it holds a value of the unknown kind {kind}")
            return self._number(kind)
        inner, count = self._number(_UINT32), self._number(_UINT64)
        if inner in _NUMBERS:
            return list(self._numbers(inner, count))
        if inner != _STRING:
            raise ValueError(f"it holds a list of the unknown kind {inner}")
        return [self._string() for _ in range(self._count(count, at_least=8))]  # 8: the length of an empty one

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the description of a tensor: name, shape in torch's order, number of its type, and offset of its data
        from where data begin.

        Raises:
            ValueError: it has no dimensions, or too many.
        """
        name, dimensions = self._string(), self._number(_UINT32)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name!r:.80} has {dimensions} dimensions")
        shape = self._numbers(_UINT64, dimensions)
        return name, shape[::-1], self._number(_UINT32), self._number(_UINT64)

    def _placed(
        self, table: Iterable[tuple[str, tuple[int, ...], int, int]], alignment: object
    ) -> list[tuple[str, TensorInfo]]:
        """Return the described tensors with the range of bytes of each, after checking that it lies in the file.

        Args:
            table: what `_tensor` has read.
            alignment: data begin at the first multiple of it behind the header.

        Raises:
            ValueError: a range reaches beyond the file, or a shape or the alignment is impossible.
        """
        if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"its general.alignment is {alignment!r:.40}")
        start, placed = math.ceil(self._at / alignment) * alignment, []
        for name, shape, number, offset in table:
            kind, elements, size = _layout(self._path, name, number)
            if not all(shape) or shape[-1] % elements:
                raise ValueError(
                    f"its tensor {name!r:.80} has the shape {list(shape)}, which its type {kind} cannot have"
                )
            length = math.prod(shape) // elements * size
            if start + offset + length > len(self._bytes):
                raise ValueError(f"it is cut off: the tensor {name!r:.80} ends behind its end")
            placed.append((name, TensorInfo(self._path, kind, shape, start + offset, length)))
        return placed


def _layout(path: Path, name: str, number: int) -> tuple[str, int, int]:
    """Return the name of a tensor type by its number, and how many weights and bytes one of its blocks has. File and
    tensor are named for the message.

    Raises:
        UnsupportedModelError: the type cannot be unpacked.
        InputError: the package gguf is not installed.
    """
    package = _package(path)
    known = {kind.value: kind for kind in package.GGMLQuantizationType}
    if number in known and (known[number].name in FLOATS or _unpacks(known[number])):
        return known[number].name, *package.GGML_QUANT_SIZES[known[number]]
    kind = known[number].name if number in known else f"number {number}"
    raise UnsupportedModelError(
        f"{path} holds a tensor of the type {kind} ({name:.80}), which kvkeep cannot unpack. Take a file of another "
        "quantisation, such as Q4_K_M or Q8_0."
    )


@functools.cache
def _unpacks(kind: Any) -> bool:
    """Return whether the package gguf can unpack a type, by unpacking a block of zeros."""
    import gguf

    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _package(path: Path) -> Any:
    """Import and return the package gguf. The file is named for the message.

    Raises:
        InputError: it is not installed; the message says how.
    """
    if find_spec("gguf") is None:
        raise InputError(
            f"{path} is a GGUF file, and the package that unpacks its weights is missing: pip install gguf."
        )
    import gguf

    return gguf


# Files that belong together, and the choice of one of several.


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file in their order, whichever part is given; of another file, the file
    itself.

    Raises:
        ModelFileError: a part is missing.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    if len(parts) > 1 and (missing := [part.name for part in parts if not part.is_file()]):
        raise ModelFileError(
            f"{path} is one of {len(parts)} parts of a split file, and {', '.join(missing[:3])} is not beside it. "
            "Download all parts into one folder."
        )
    return parts


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file in their order; of another file, its own name.

    Raises:
        ModelFileError: there are more parts than any model has.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    if not 1 <= count <= _MOST_PARTS:
        raise ModelFileError(f"{name} is, by its name, one of {count} parts; kvkeep takes 1 to {_MOST_PARTS}.")
    return [f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def choices(names: Iterable[str]) -> list[str]:
    """Return the models among the names of files, sorted: those of GGUF files, of a split one the first part, and no
    tower of images.
    """
    return sorted(name for name in names if _is_choice(name))


def _is_choice(name: str) -> bool:
    """Return whether a file is a language model, and if it is split, the first part."""
    part, base = _PART.fullmatch(name), name.rpartition("/")[2].lower()
    return base.endswith(SUFFIX) and not base.startswith("mmproj") and (part is None or int(part["number"]) == 1)


def in_folder(folder: Path) -> Path | None:
    """Return the one model among the GGUF files of a folder, of a split file the first part; ``None`` if there is none,
    or if the folder holds safetensors with a config.json.

    Raises:
        ModelFileError: there are several.
    """
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        return None
    names = choices(path.name for path in folder.iterdir() if path.is_file())
    if len(names) > 1:
        raise ModelFileError(f"The folder {folder} has {len(names)} GGUF files: {_shown(names)}. Give the path of one.")
    return folder / names[0] if names else None


def chosen(repository: str, names: Iterable[str], wanted: str) -> str:
    """Return the one model among a repository's files that has this name, with or without the end ``.gguf``, or else
    this quantisation at the end of its name, such as ``Q4_K_M``; of a split file the first part.

    Raises:
        ModelFileError: no file has that name, or several do.
    """
    models = choices(names)
    stems = {name: _PART.sub(r"\g<stem>", name).removesuffix(SUFFIX) for name in models}
    exact = [name for name in models if wanted in (name, name.removesuffix(SUFFIX), stems[name])]
    ending = re.compile(rf"(.*[-._/])?{re.escape(wanted)}", re.IGNORECASE)
    found = exact or [name for name in models if ending.fullmatch(stems[name].rpartition("/")[2])]
    if len(found) == 1:
        return found[0]
    if not models:
        raise ModelFileError(f"{repository} has no GGUF files, so {wanted:.80} is none of them.")
    if found:
        raise ModelFileError(
            f"{repository} has several GGUF files of the name {wanted:.80}: {_shown(found)}. Give one."
        )
    raise ModelFileError(f"{repository} has no GGUF file of the name {wanted:.80}. It has {_shown(models)}.")


def _shown(names: list[str], most: int = 12) -> str:
    """Format a list of names, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


# Values of tensors.


def values(tensor: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read the values of a tensor, unpack them if need be, and return them in its shape and a plain dtype.

    Raises:
        ModelFileError: the file has become shorter.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.type]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    result = torch.empty(tensor.shape, dtype=dtype)
    flat, at = result.view(-1), 0
    for stored in _chunks(tensor, size * max(1, _CHUNK // elements)):  # whole blocks
        part = _unpacked(stored, tensor.type, kind)
        flat[at : at + len(part)] = part
        at += len(part)
    return result


def quantized(tensor: TensorInfo, dtype: torch.dtype, heads: int = 0) -> QuantizedTensor:
    """Read a matrix, and return it as the native kernel reads it: its blocks are rearranged, and no value changes.

    Args:
        tensor: the matrix, of one of `gguf_blocks.TYPES`.
        dtype: of the numbers that it stands for.
        heads: into how many groups the rows fall that are stored in the order of another rotation; 0 for none.

    Raises:
        ModelFileError: the file has become shorter.
    """
    import gguf

    kind, (rows, columns) = gguf_blocks.TYPES[tensor.type], tensor.shape
    result = QuantizedTensor.blank((rows, columns), kind.bits, kind.group, dtype)
    row_bytes, (_, block_bytes) = tensor.size // rows, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]
    # rows in another order change places all over the matrix, so they are all read at once
    at, step = 0, rows if heads else QuantizedTensor.rows_at_once(columns)
    for stored in _chunks(tensor, row_bytes * step):
        if heads:
            stored = stored.reshape(heads, -1, 2, row_bytes).swapaxes(1, 2)  # see `gguf_weights._value`
        count = stored.size // row_bytes
        result.set_rows(at, *gguf_blocks.split(kind, stored.reshape(-1, block_bytes), count))
        at += count
    return result


def _chunks(tensor: TensorInfo, size: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield the stored bytes of a tensor, ``size`` at a time; the last part may be shorter.

    Raises:
        ModelFileError: the file has become shorter.
    """
    with open(tensor.path, "rb", buffering=0) as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.size, size):
            stored = np.fromfile(file, np.uint8, min(size, tensor.size - start))
            if len(stored) != min(size, tensor.size - start):
                raise ModelFileError(f"{tensor.path} has become shorter while it was read. Load the model again.")
            yield stored


def _unpacked(stored: np.ndarray[Any, np.dtype[np.uint8]], name: str, kind: Any) -> Tensor:
    """Return the numbers in the stored bytes of whole blocks, as a flat tensor: plain types in their own dtype, others
    unpacked.
    """
    import gguf

    if name in FLOATS:
        return torch.from_numpy(stored).view(FLOATS[name])
    return torch.from_numpy(gguf.dequantize(stored[None], kind)[0])  # one row: the package loops over groups of rows

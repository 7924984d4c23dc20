"""Where Triton's kernels run, which tensors they take, and how large their tiles are on a device.

Sizes of compute capability 9 for half precision and head dim 128 are measured (docs/gpu.md), the others follow from
reasoning. They affect speed and the order in which sums are added up, nothing else. How many slots one decode program
reads depends on the shapes alone, never on the batch: a row gets the same bits alone and among others.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import math
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.backends.base import SlotLimits, WantedReport
from kvkeep.errors import pip_install
from kvkeep.kv.slot_codec import CodedSlots, Codes
from kvkeep.types import Slots

INTERPRET = "TRITON_INTERPRET"
"""Triton's own environment variable. ``1``, set before Triton is first imported, runs kernels in numpy, slowly."""

OLDEST = (3, 6)
"""The oldest Triton that the kernels run on; the extra ``gpu`` asks for it."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels take."""

MAX_DIM = 256
"""Largest head dim of keys and of values."""

MIN_DIM = 16
"""Smallest head dim of values in a prompt. With 8, and keys of 24, Triton 3.6 compiles addresses out of range."""

MAX_GROUP = 64
"""Most query heads that may share a KV head in decode."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Where the kernels run.

    Attributes:
        devices: types of device, ``cuda`` or ``cpu``.
        detail: the same in words, with the reason where there are none.
    """

    devices: frozenset[str]
    detail: str


@functools.cache
def kernels() -> Kernels:
    """Return on which devices the kernels run: CUDA with Triton, and the CPU in Triton's interpreter (for tests)."""
    if importlib.util.find_spec("triton") is None:
        return Kernels(frozenset(), f"Triton is not installed: {pip_install('gpu')}")
    if _numbers(version := _installed()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Kernels(frozenset(), f"Triton {version} is older than {oldest}; a newer torch brings a newer one along")
    if interprets():
        return Kernels(frozenset({"cuda", "cpu"}), "interpreted, slow: for tests")
    return Kernels(frozenset({"cuda"}), f"on CUDA, compiled when first used; on a CPU only with {INTERPRET}=1")


def _installed() -> str:
    """Return the version of the package ``triton``; `OLDEST` without it, as for a build of another name."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ".".join(map(str, OLDEST))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def interprets() -> bool:
    """Return whether Triton runs kernels in its interpreter."""
    return os.environ.get(INTERPRET, "0") == "1"


def runs(*tensors: Tensor) -> bool:
    """Return whether kernels can read the tensors: all plain, the first one on a device with kernels, dense in the last
    axis, without gradients; ``False`` while a compiler traces.
    """
    if tensors[0].device.type not in kernels().devices or torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        # an axis of one entry may have any stride
        if type(tensor) is not Tensor or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
    return True


def misfit(*tensors: Tensor) -> str | None:
    """Return why no kernel takes the dtypes or head dims (last axes) of these tensors; ``None`` if they do."""
    dtypes, dim = {tensor.dtype for tensor in tensors}, max(tensor.shape[-1] for tensor in tensors)
    if len(dtypes) > 1 or tensors[0].dtype not in TYPES:
        return f"dtypes {', '.join(sorted(map(str, dtypes)))}"
    return f"a head dim of {dim}, more than {MAX_DIM}" if dim > MAX_DIM else None


@functools.cache
def notice(reason: str) -> None:
    """Log, once for each reason, that torch does the work on a device that has kernels."""
    _log.warning("No kernel for this attention, torch does it, more slowly: %s.", reason)


# ---- sizes of decode and of slots -----------------------------------------------------------------------------------


class Decode(NamedTuple):
    """Sizes for the attention of one token per row.

    Attributes:
        slots: slots in a tile.
        split: slots that one program reads.
        warps: warps of a program.
        stages: tiles that are loaded ahead.
    """

    slots: int
    split: int
    warps: int
    stages: int


DECODE: dict[str, dict[int, Decode]] = {
    # by major compute capability, then by the most bytes that a key may have
    "9": {256: Decode(64, 256, 2, 2), 1024: Decode(16, 256, 4, 5)},
    "8": {128: Decode(64, 256, 4, 5), 256: Decode(32, 256, 4, 5), 1024: Decode(16, 256, 4, 5)},
    "": {1024: Decode(32, 256, 4, 2)},
}
"""Keys and values wait for positions, which takes stages of its own: 5 keep two tiles of each on their way. With few
warps and stages, more programs run side by side instead. More slots in a tile of long keys would not fit into the
registers."""

CODED = {8: Decode(128, 256, 4, 2), 4: Decode(64, 256, 4, 2)}
"""By the bits of keys, for those of at most 256 bytes when they are widened: codes are in registers while they are."""

SCAN = 1024
"""Slots that a kernel looks at together when it picks one."""

SCAN_WARPS = 4
"""Warps of such a kernel."""


def decode_sizes(device: torch.device, key_bytes: int, S: int, bits: int = 16) -> Decode:
    """Return the sizes of a decode program for a device, the bytes of a key in the model's dtype, and ``S`` slots.
    ``bits`` are those of a key's numbers: below 16, slots are quantized.
    """
    rows = DECODE.get(_capability(device), DECODE[""])
    sizes = next((sizes for limit, sizes in rows.items() if key_bytes <= limit), rows[max(rows)])
    if _capability(device) == "9" and key_bytes <= 256:
        sizes = CODED.get(bits, sizes)
    tile = min(sizes.slots, power(S))
    return sizes._replace(slots=tile, split=max(tile, min(sizes.split, power(S))))


def scan_tile(S: int, group: int = 1) -> int:
    """Return how many slots a program reads at once, a power of two, if it holds a number of each of ``group`` query
    heads for each of them in registers.
    """
    # about 4096 numbers in all
    return min(power(S), max(16, min(SCAN, 4096 // group)))


def power(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``n`` and ``least``; matrix products need at least 16."""
    return max(least, 1 << (n - 1).bit_length())


@functools.cache
def _capability(device: torch.device) -> str:
    """Return the major compute capability; an empty string for a device that has none."""
    return str(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else ""


# ---- sizes of prefill -----------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Sizes of a prefill program.

    Attributes:
        rows: query rows in a tile.
        slots: keys in a tile.
        warps: warps of a program.
        stages: tiles that are loaded ahead.
    """

    rows: int
    slots: int
    warps: int
    stages: int


CPU = Tile(32, 128, 4, 1)
"""For the interpreter, whose time goes by the number of tiles."""

Table = dict[tuple[bool, int, int], Tile]
"""By whether there are 160 KiB of shared memory or more, bytes per element, and padded head dim."""

FORWARD: Table = {
    (True, 2, 64): Tile(128, 64, 8, 3),
    (True, 2, 128): Tile(128, 64, 8, 3),
    (True, 2, 256): Tile(64, 64, 8, 2),
    (True, 4, 64): Tile(64, 32, 4, 2),
    (True, 4, 128): Tile(64, 32, 4, 2),
    (True, 4, 256): Tile(32, 32, 4, 2),
    (False, 2, 64): Tile(64, 64, 4, 2),
    (False, 2, 128): Tile(64, 32, 4, 2),
    (False, 2, 256): Tile(32, 32, 4, 2),
    (False, 4, 64): Tile(32, 32, 4, 2),
    (False, 4, 128): Tile(32, 32, 4, 1),
    (False, 4, 256): Tile(16, 16, 4, 1),
}

COLUMNS: Table = {
    (True, 2, 64): Tile(64, 128, 8, 3),
    (True, 2, 128): Tile(64, 128, 4, 3),
    (True, 2, 256): Tile(32, 64, 4, 3),
    (True, 4, 64): Tile(32, 64, 4, 2),
    (True, 4, 128): Tile(32, 64, 4, 2),
    (True, 4, 256): Tile(32, 32, 4, 2),
    (False, 2, 64): Tile(32, 128, 4, 2),
    (False, 2, 128): Tile(32, 64, 4, 2),
    (False, 2, 256): Tile(32, 32, 4, 2),
    (False, 4, 64): Tile(32, 32, 4, 2),
    (False, 4, 128): Tile(32, 32, 4, 1),
    (False, 4, 256): Tile(16, 16, 4, 1),
}


def forward_tile(dim: int, like: Tensor) -> Tile:
    """Return the tile sizes of `prefill.forward`, by the larger head dim."""
    return _tile(FORWARD, dim, like)


def columns_tile(dim: int, like: Tensor) -> Tile:
    """Return the tile sizes of `prefill.columns`, by the larger head dim."""
    return _tile(COLUMNS, dim, like)


def splits(programs: int, like: Tensor) -> int:
    """Return how many programs share one program's work, so that every multiprocessor has two of them; 1 on a CPU.

    Args:
        programs: number of programs for one row of the batch, as a row's bits must not depend on the other rows.
        like: a tensor on the device.
    """
    if not like.is_cuda:
        return 1
    return max(1, 2 * _multiprocessors(like.device) // programs)


def _tile(table: Table, dim: int, like: Tensor) -> Tile:
    """Return the tile sizes of a kernel from its table, for the device and dtype of ``like`` and a head dim."""
    if not like.is_cuda:
        # triton's interpreter, in which the tests run
        return CPU
    # 64: the tables have no smaller tiles, so smaller heads take those
    return table[_is_roomy(like.device), like.element_size(), power(dim, least=64)]


@functools.cache
def _is_roomy(device: torch.device) -> bool:
    """Return whether the GPU has 160 KiB of shared memory: data centre GPUs from A100 on, and Orin."""
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) in ((8, 0), (8, 7)) or 9 <= major < 12


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# How tensors and numbers become arguments of the kernels, by name.


def row(wanted: WantedReport, now: Tensor) -> dict[str, Any]:
    """Return the arguments of `decode.row_weight`, and the gain, of a report that is wanted, by the names that the
    kernels have for them. ``now`` stands in for tables that are missing.
    """
    return {
        **either("counted", "counts", wanted.counts, now, dtype=torch.int64),
        **either("gains", "gain", 1.0 if wanted.gain is None else wanted.gain, now, dtype=torch.float32),
        **either("newest", "last", wanted.last, now, dtype=torch.int64),
        "TEMPERED": wanted.gain is not None,
        "log_decay": math.log2(wanted.decay) if wanted.decay > 0 else -math.inf,  # a decay of 0 has no logarithm
    }


def limits(limits: SlotLimits) -> dict[str, Any]:
    """Return the slot limits as arguments of the kernels that evict, by their names; the window itself is left out."""
    recent, stay = limits.recent, limits.stay
    return {
        "ages": limits.seen,
        "age_row": limits.seen.stride(0),
        "first_ones": limits.sinks,
        **either("recents", "recent", recent, limits.seen),
        **_per_head("recent", recent),
        **either("limits", "limit", stay, limits.seen),
        **_per_head("limit", stay),
        "SLIDES": limits.window is not None,
        "prompts": limits.seen if limits.prompt is None else limits.prompt,  # without `CHOSEN` it is not read
        "prompt_row": 0 if limits.prompt is None else limits.prompt.stride(0),
        "CHOSEN": limits.prompt is not None,
    }


def _per_head(name: str, value: int | Tensor) -> dict[str, int]:
    """Return the strides of rows and heads of a table as kernel arguments; strides of 0 if ``value`` is no table."""
    return heads(name, value) if isinstance(value, Tensor) else {f"{name}_row": 0, f"{name}_head": 0}


def either(
    table: str, number: str, value: int | float | Tensor, unread: Tensor, *, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Return a table or one number for all as three kernel arguments: ``table``, ``number``, and in capitals whether
    the table is read. ``unread`` stands in for a missing table. With a ``dtype`` the table is converted and made dense.
    """
    if not isinstance(value, Tensor):
        return {table: unread, number: value, table.upper(): False}
    return {table: value if dtype is None else value.to(dtype).contiguous(), number: 0, table.upper(): True}


def store(slots: Slots) -> dict[str, Any]:
    """Return keys and values as they are stored, positions, strides and sizes as kernel arguments; `BLOCK_D` and
    `BLOCK_E` are padded head dims.
    """
    (keys, *_), (values, *_) = lying(slots)
    Hk, S, (D, E) = keys.shape[1], keys.shape[2], dims(slots)
    return {
        "keys": keys,
        **heads("key", keys),
        "key_slot": keys.stride(2),
        "values": values,
        **heads("value", values),
        "value_slot": values.stride(2),
        "positions": slots.positions,
        **heads("position", slots.positions),
    } | {"Hk": Hk, "S": S, "D": D, "E": E, "BLOCK_D": power(D), "BLOCK_E": power(E)}


def lying(slots: Slots) -> tuple[Codes, Codes]:
    """Return keys and values as they are stored, as `Codes`. Those of slots that are not quantized have 16 bits, and as
    scales themselves, which nobody reads.
    """
    if isinstance(slots, CodedSlots):
        return slots.coded_keys, slots.coded_values
    return Codes(slots.keys, slots.keys, 16), Codes(slots.values, slots.values, 16)


def dims(slots: Slots) -> tuple[int, int]:
    """Return the number of channels of a key and of a value."""
    if isinstance(slots, CodedSlots):
        return slots.coded_keys.dim, slots.coded_values.dim
    return slots.keys.shape[-1], slots.values.shape[-1]


def codes(slots: Slots) -> dict[str, Any]:
    """Return scales of keys and values, their strides, the bits, and the channels per scale, as kernel arguments."""
    found: dict[str, Any] = {}
    for name, vectors in zip(("key", "value"), lying(slots), strict=True):
        found |= {
            f"{name}_scales": vectors.scales,
            **heads(f"{name}_scale", vectors.scales),
            f"{name}_scale_slot": vectors.scales.stride(2),
            f"{name.upper()}_BITS": vectors.bits,
            f"{name.upper()}_GROUP": 1 if vectors.bits == 16 else vectors.group,  # not read with 16 bits
        }
    return found


def new(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Return a token's key and value with their strides, as kernel arguments."""
    return {"new_keys": keys, **heads("new_key", keys), "new_values": values, **heads("new_value", values)}


def heads(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides of rows and heads of a tensor as kernel arguments, ``NAME_row`` and ``NAME_head``; that of
    heads is 0 where all heads share one entry.
    """
    return {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1) if tensor.shape[1] > 1 else 0}

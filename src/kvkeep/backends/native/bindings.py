"""How tensors and numbers become arguments of the kernel."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.base import Added, Ring, SlotLimits, WantedReport
from kvkeep.backends.native.build import native
from kvkeep.kv.slot_codec import NUMBERS, CodedSlots, Codes, KeyTransform
from kvkeep.kv_bits import HALVES, n_normals
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Budget, Ranges, Slots

LAST = 2**31 - 1
"""The largest position: the kernel counts positions in 32 bits."""


def strides(limits: Int[Tensor, "B #Hk"]) -> tuple[int, int]:
    """Return the strides of rows and of heads of a table; that of heads is 0 if it has one column for all heads."""
    return limits.stride(0), limits.stride(1) if limits.shape[1] > 1 else 0


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this dtype; the tensor itself if it has that dtype, at less cost than a conversion."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def bounded(value: Budget) -> Budget:
    """Return the value, or each of a table as int64, limited to ± `LAST`, so that the kernel can subtract it from a
    position without an overflow.
    """
    return value.to(torch.int64).clamp(-LAST, LAST) if isinstance(value, Tensor) else max(-LAST, min(value, LAST))


def either(value: int | float | Tensor, dtype: torch.dtype) -> tuple[Tensor | None, int | float]:
    """Tell a tensor with a number per row from one number for all: return the tensor, dense and in this dtype, and 0;
    or ``None`` and the number.
    """
    return (value.to(dtype).contiguous(), 0) if isinstance(value, Tensor) else (None, value)


def pointer(tensor: Tensor | None) -> int:
    """Return the tensor's address; 0 for ``None``."""
    return 0 if tensor is None else tensor.data_ptr()


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """Return the kernel if it can read the tensors: ordinary CPU tensors without gradients, dense in the last axis; one
    number per row may have any stride.

    Return ``None`` otherwise, while a compiler traces, or if there is no kernel.
    """
    library = native().library
    if library is None or torch.compiler.is_compiling():  # a compiled graph holds no calls of other libraries
        return None
    differentiates = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        if (tensor.ndim > 1 and tensor.stride(-1) != 1) or (differentiates and tensor.requires_grad):
            return None
    return library


# Slots that hold codes, as the kernel takes them.


class Coding(NamedTuple):
    """How quantized slots are stored.

    Attributes:
        keys: codes of the keys.
        values: codes of the values.
        transform: what was done to the keys before.
    """

    keys: Codes
    values: Codes
    transform: KeyTransform


_CODED = struct.Struct("3q 3q 3q 3q 3q 4q")  # twice `Coded` in codes.h, `Exponents` and `Normals`
_NONE = bytes(_CODED.size)


def coding_of(slots: Slots) -> tuple[Slots, Coding | None]:
    """Split quantized slots into slots whose keys and values are the codes' numbers, and their coding. Return other
    slots as they are, and ``None``.
    """
    if not isinstance(slots, CodedSlots):
        return slots, None
    keys, values = slots.coded_keys, slots.coded_values
    return Slots(keys.numbers, values.numbers, slots.positions), Coding(keys, values, slots.transform)


def packed(coding: Coding | None) -> bytes:
    """Pack the coding of keys and values as `Coded`, `Exponents` and `Normals` in codes.h; zeros for ``None``."""
    if coding is None:
        return _NONE
    keys, values, (exponents, normals) = coding
    # for each: bits, numbers that share a scale, and where the scales lie
    return _CODED.pack(
        *(keys.bits, keys.group, keys.scales.data_ptr(), *keys.scales.stride()[:3]),
        *(values.bits, values.group, values.scales.data_ptr(), *values.scales.stride()[:3]),
        *((0, 0, 0) if exponents is None else (exponents.data_ptr(), *exponents.stride()[:2])),
        *((0, 0, 0, 0) if normals is None else (normals.data_ptr(), *normals.stride()[:2], normals.shape[2])),
    )


def packed_ranges(ranges: Ranges | None) -> tuple[int, int, int, int]:
    """Return the fields of the kernel's struct `Ranges`: addresses, the stride of rows in both tables, and whether
    positions and states lie in the pool, too. All are 0 for ``None``.
    """
    if ranges is None:
        return 0, 0, 0, 0
    starts, sizes, width = ranges
    # a store makes both tables with the same strides
    return starts.data_ptr(), sizes.data_ptr(), starts.stride(0), int(width > 0)


def scales_of(coding: Coding | None) -> tuple[Tensor, ...]:
    """Return the scales of quantized keys and values, and the tensors of the transform; empty if not quantized."""
    if coding is None:
        return ()
    return coding.keys.scales, coding.values.scales, *coding.transform.of_rows.values()


def decodable(codes: Codes, slots: tuple[int, int, int], dim: int) -> bool:
    """Return whether dtypes and shapes of quantized slots are those that are promised to the kernel.

    Args:
        codes: the codes.
        slots: rows, KV heads, and slots of each.
        dim: channels of a vector.
    """
    numbers, scales, bits = codes
    # / and not //: an odd number of channels of 4 bits has no shape
    if scales.dtype != torch.float16 or numbers.dtype != NUMBERS.get(bits) or numbers.shape != (*slots, dim * bits / 8):
        return False
    groups, rest = divmod(scales.shape[-1], HALVES[bits])
    if rest or groups == 0 or scales.shape[:-1] != slots:
        return False
    return dim % groups == 0 and dim // groups * bits % 8 == 0  # the codes of a group fill whole bytes


def _fits(transform: KeyTransform, keys: tuple[int, int, int]) -> bool:
    """Return whether exponents and normals have the dtypes and shapes that are promised to the kernel. Either may be
    missing.

    Args:
        transform: the exponents and normals.
        keys: rows, KV heads, and channels of a key.
    """
    exponents, normals = transform
    if normals is not None:
        B, Hk, D = keys
        # the kernel reads all normals of a head as one piece
        if normals.dtype != torch.float32 or normals.shape != (B, Hk, n_normals(D), D) or normals.stride(2) != D:
            return False
    return exponents is None or (exponents.dtype == torch.int8 and exponents.shape == keys)


# The angles by which the kernel turns unrotated keys to their ranks.


class KeyRotation(NamedTuple):
    """Rows of cosines and sines, in the dtype of the keys.

    Attributes:
        angles: a row for each rank.
        back: a row for the true position of each query; ``None`` if queries are unrotated.
    """

    angles: Float[Tensor, "n F2"]
    back: Float[Tensor, "B F2"] | None = None

    def fits(self, query: Float[Tensor, "B Hq 1 D"], slots: int) -> bool:
        """Return whether dtypes and shapes are those promised to the kernel: a row of angles for each slot and one
        more, and with ``back`` a row for each query, all in the query's dtype and in main memory.
        """
        (n, width), B, D = self.angles.shape, query.shape[0], query.shape[-1]
        shape_fits = n > slots and width % 2 == 0 and 0 < width <= D
        back_fits = self.back is None or self.back.shape == (B, width)
        return shape_fits and back_fits and all(_is_plain(rows, query.dtype) for rows in self if rows is not None)

    def packed(self) -> tuple[int, int, int]:
        """Return the addresses of both tables (0 for none), and the number of dims that rotate against as many
        others.
        """
        back = 0 if self.back is None else self.back.data_ptr()
        return self.angles.data_ptr(), back, self.angles.shape[1] // 2


def turn_of(
    rotation: Rotation, slots: int, dtype: torch.dtype, rotated_at: Int[Tensor, "B 1"] | None = None
) -> KeyRotation:
    """Return the angles by which the kernel rotates unrotated keys to their ranks.

    Args:
        rotation: the model's rotary embedding.
        slots: the most slots of a head, and so the most ranks.
        dtype: dtype of the keys.
        rotated_at: positions to which queries and new keys are rotated; ``None`` if they are unrotated.
    """
    back = None if rotated_at is None else rotation.angles_now(rotated_at, dtype)
    # + 1: a query behind all of the head's tokens has their number as its rank
    return KeyRotation(rotation.table(slots + 1, dtype), back)


def _is_plain(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows lie in main memory one after the other, in this dtype."""
    return rows.is_cpu and rows.dtype == dtype and rows.is_contiguous()


# Checks of dtypes and shapes that the kernel relies on and cannot make itself.

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types that the kernel knows, with the kernel's numbers for them."""

_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


def attendable(  # noqa: PLR0913  all that the kernel relies on
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    now: Tensor,
    positions: Tensor,
    *,
    options: AttentionOptions,
    wanted: WantedReport | None,
    turn: KeyRotation | None = None,
    ranges: Ranges | None = None,
    coding: Coding | None = None,
) -> bool:
    """Return whether a query per row, slots, positions and a wanted report have the dtypes, shapes and places (numbers
    per row on the CPU) that `kvkeep.backends.native.ops.attend` promises to the kernel.
    """
    pooled, slots = ranges is not None, (ranges and ranges.width) or positions.shape[2]
    B, _, T, _ = query.shape
    if T != 1 or now.shape != (B, 1):
        return False
    if coding is None and not _is_cache(query, keys, values, positions, pooled=pooled):
        return False
    if coding is not None and not _is_coded(query, coding, positions, pooled=pooled):
        return False
    if not _is_asked(query, options):
        return False
    if now.dtype not in _WHOLE or (turn is not None and not turn.fits(query, slots)):
        return False
    if wanted is None:
        return True
    return _is_per_row(wanted.counts, B) and _is_per_row(wanted.gain, B) and _is_per_row(wanted.last, B)


def readable(
    query: Tensor, keys: Tensor, values: Tensor, now: Tensor, positions: Tensor, *, options: AttentionOptions
) -> bool:
    """Return whether a prompt's queries, and keys, values and positions, have the dtypes and shapes that
    `kvkeep.backends.native.ops.attend_twice` promises to the kernel.
    """
    B, _, T, _ = query.shape
    if now.shape != (B, T) or now.dtype not in _WHOLE or not now.is_cpu:
        return False
    return _is_cache(query, keys, values, positions) and _is_asked(query, options)


def _is_cache(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, pooled: bool = False) -> bool:
    """Return whether queries, keys and values have one dtype that the kernel knows, and shapes that fit each other and
    the positions. In a pool, keys and values may be more than the positions.
    """
    (B, Hq, _, D), (_, Hk, S, E) = query.shape, values.shape
    if query.dtype not in TYPES or not query.dtype == keys.dtype == values.dtype or positions.dtype not in _WHOLE:
        return False
    if Hq % Hk or keys.shape != (B, Hk, S, D) or values.shape != (B, Hk, S, E):
        return False
    return _fit(positions.shape, (B, Hk, S), pooled=pooled)


def _is_coded(query: Tensor, coding: Coding, positions: Tensor, *, pooled: bool = False) -> bool:
    """Return whether dtypes, shapes and group sizes of quantized keys and values fit these queries, see `_is_cache`."""
    (B, Hq, _, D), (keys, values, transform) = query.shape, coding
    if query.dtype not in TYPES or positions.dtype not in _WHOLE or keys.numbers.ndim != 4:
        return False
    Hk, S = keys.numbers.shape[1:3]
    if Hk == 0 or Hq % Hk or not _fit(positions.shape, (B, Hk, S), pooled=pooled):
        return False
    coded = decodable(keys, (B, Hk, S), D) and decodable(values, (B, Hk, S), values.dim)
    return coded and _fits(transform, (B, Hk, D))


def _fit(shape: tuple[int, ...], slots: tuple[int, int, int], *, pooled: bool) -> bool:
    """Return whether positions of this shape fit rows, heads and slots (in a pool: the most slots of any head)."""
    if len(shape) != 3 or shape[2] == 0:
        return False
    if pooled:
        return shape[:2] == slots[:2] and shape[2] <= slots[2]
    return shape in (slots, (slots[0], 1, slots[2]))


def _is_asked(query: Tensor, options: AttentionOptions) -> bool:
    """Return whether sinks, if there are any, are on the CPU, one for each query head, and need no gradients."""
    sinks = options.sinks
    if sinks is None:
        return True
    return sinks.is_cpu and sinks.shape == (query.shape[1],) and not (sinks.requires_grad and torch.is_grad_enabled())


def writable(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    new: tuple[Tensor, Tensor],
    now: Tensor,
    *,
    pooled: bool = False,
    coding: Coding | None = None,
) -> bool:
    """Return whether slots, and a new token per row with its position, have the dtypes and shapes that
    `kvkeep.backends.native.ops.write` promises to the kernel.
    """
    B, Hk, S = positions.shape
    D, E = (keys.shape[-1], values.shape[-1]) if coding is None else (coding.keys.dim, coding.values.dim)
    if positions.dtype != torch.int32 or now.dtype not in _WHOLE or now.shape != (B, 1) or S == 0:
        return False
    S = keys.shape[2] if pooled else S  # every head is shown all entries of the pool
    if coding is not None:
        if new[0].dtype not in TYPES or new[0].dtype != new[1].dtype:
            return False
        if not (decodable(coding.keys, (B, Hk, S), D) and decodable(coding.values, (B, Hk, S), E)):
            return False
        if not _fits(coding.transform, (B, Hk, D)):
            return False
    elif (keys.shape, values.shape) != ((B, Hk, S, D), (B, Hk, S, E)) or not _is_same(new, keys, values):
        return False
    return new[0].shape == (B, Hk, 1, D) and new[1].shape == (B, Hk, 1, E)


def _is_same(new: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> bool:
    """Return whether new keys and values have the dtypes of the slots."""
    return keys.dtype == new[0].dtype and values.dtype == new[1].dtype


def addable(added: Added, positions: Tensor, wanted: WantedReport | None) -> bool:
    """Return whether the policy's state has the dtype, shape and strides that `kvkeep.backends.native.ops.step`
    promises to the kernel, and the wanted report is one that the state can take: the mass, and with a ring also what is
    low.
    """
    ring = added.ring
    # a ring is made of a report, and a report goes into states
    if (wanted is None and ring is not None) or (wanted is not None and not added.states):
        return False
    if not added.states:
        return True
    if ring is not None and (len(added.states) != 2 or not _is_ring(ring, positions)):
        return False
    if added.lost is not None and (added.lost.dtype, added.lost.shape) != (torch.float32, (*positions.shape[:2], 2)):
        return False
    strides = added.states[0].stride()
    second = None if wanted is None else wanted.second
    return second == (None if ring is None else "low") and all(
        state.dtype == torch.float32 and state.shape == positions.shape and state.stride() == strides
        for state in (*added.states, *(ring.words if ring else ()))
    )


def _is_ring(ring: Ring, positions: Tensor) -> bool:
    """Return whether a ring has words, a tensor for the mass, and one integer of each size, or one for each row."""
    mass = ring.mass
    if not ring.words or (mass.dtype, mass.shape) != (torch.float32, positions.shape) or not mass.is_contiguous():
        return False
    return all(_is_share(size, len(positions), 1) for size in (ring.window, ring.least, ring.drop, ring.budget))


def countable(positions: Tensor, seen: Tensor | None = None, recent: Budget = 0, limit: Budget = 0) -> bool:
    """Return whether positions, tokens seen, and numbers per row or head have the dtypes and shapes that the functions
    which count, expire and evict slots promise to the kernel.
    """
    B, Hk, _ = positions.shape
    if positions.dtype != torch.int32:
        return False
    if seen is not None and (seen.dtype not in _WHOLE or seen.shape != (B,)):
        return False
    return _is_share(recent, B, Hk) and _is_share(limit, B, Hk)


def limitable(positions: Tensor, limits: SlotLimits) -> bool:
    """Return whether positions and limits have the dtypes and shapes that the functions which evict slots promise to
    the kernel.
    """
    if limits.prompt is not None and not countable(positions, limits.prompt):
        return False
    return countable(positions, limits.seen, limits.recent, limits.stay)


def _is_share(value: Budget, rows: int, heads: int) -> bool:
    """Return whether a value is one integer, or a table of integers on the CPU, ``(rows, 1)`` or ``(rows, heads)``."""
    if isinstance(value, int):
        return True
    return value.is_cpu and value.dtype in _WHOLE and value.shape in ((rows, 1), (rows, heads))


def _is_per_row(value: object, rows: int) -> bool:
    """Return whether a value is no tensor, or a tensor on the CPU with one number for each row."""
    return not isinstance(value, Tensor) or (value.is_cpu and value.shape == (rows,))

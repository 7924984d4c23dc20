"""Checks of dtypes and shapes that the kernel relies on and cannot make itself."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.backends.added import Added, Ring
from kvkeep.backends.native.coding import Coding, decodable
from kvkeep.backends.native.turn import Turn
from kvkeep.backends.wanted import Wanted
from kvkeep.types import AttentionOptions, Budget

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
    wanted: Wanted | None,
    turn: Turn | None = None,
    pooled: bool = False,
    coding: Coding | None = None,
) -> bool:
    """Whether dtypes and shapes are those that `attend` promises to the kernel."""
    B, _, T, _ = query.shape
    if T != 1 or now.shape != (B, 1):
        return False
    if coding is None and not _is_cache(query, keys, values, positions, pooled=pooled):
        return False
    if coding is not None and not _is_coded(query, coding, positions, pooled=pooled):
        return False
    if not _is_asked(query, options):
        return False
    if now.dtype not in _WHOLE or (turn is not None and not turn.fits(query, positions.shape[2])):
        return False
    if wanted is None:
        return True
    return _is_per_row(wanted.counts, B) and _is_per_row(wanted.gain, B) and _is_per_row(wanted.last, B)


def readable(
    query: Tensor, keys: Tensor, values: Tensor, now: Tensor, positions: Tensor, *, options: AttentionOptions
) -> bool:
    """Whether dtypes and shapes are those that `prefill` promises to the kernel."""
    B, _, T, _ = query.shape
    if now.shape != (B, T) or now.dtype not in _WHOLE or not now.is_cpu:
        return False
    return _is_cache(query, keys, values, positions) and _is_asked(query, options)


def _is_cache(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, pooled: bool = False) -> bool:
    """Whether these keys and values can be attended to by the queries. In a pool they are more than the slots."""
    (B, Hq, _, D), (_, Hk, S, E) = query.shape, values.shape
    if query.dtype not in TYPES or not query.dtype == keys.dtype == values.dtype or positions.dtype not in _WHOLE:
        return False
    if Hq % Hk or keys.shape != (B, Hk, S, D) or values.shape != (B, Hk, S, E):
        return False
    return _fit(positions.shape, (B, Hk, S), pooled=pooled)


def _is_coded(query: Tensor, coding: Coding, positions: Tensor, *, pooled: bool = False) -> bool:
    """The same as `_is_cache` for codes of keys and values."""
    (B, Hq, _, D), (keys, values) = query.shape, coding
    if query.dtype not in TYPES or positions.dtype not in _WHOLE or keys.numbers.ndim != 4:
        return False
    Hk, S = keys.numbers.shape[1:3]
    if Hk == 0 or Hq % Hk or not _fit(positions.shape, (B, Hk, S), pooled=pooled):
        return False
    return decodable(keys, (B, Hk, S), D) and decodable(values, (B, Hk, S), values.dim)


def _fit(shape: tuple[int, ...], slots: tuple[int, int, int], *, pooled: bool) -> bool:
    """Whether positions of this shape fit rows, heads and slots: those of a pool are the most that a head may have."""
    if len(shape) != 3 or shape[2] == 0:
        return False
    if pooled:
        return shape[:2] == slots[:2] and shape[2] <= slots[2]
    return shape in (slots, (slots[0], 1, slots[2]))


def _is_asked(query: Tensor, options: AttentionOptions) -> bool:
    """Whether window and sinks are as the kernel expects them."""
    if options.window is not None and options.window < 0:
        return False
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
    """Whether dtypes and shapes are those that `write` promises to the kernel."""
    B, Hk, S = positions.shape
    D, E = (keys.shape[-1], values.shape[-1]) if coding is None else (coding[0].dim, coding[1].dim)
    if positions.dtype != torch.int32 or now.dtype not in _WHOLE or now.shape != (B, 1) or S == 0:
        return False
    S = keys.shape[2] if pooled else S
    if coding is not None:
        if new[0].dtype not in TYPES or new[0].dtype != new[1].dtype:
            return False
        if not (decodable(coding[0], (B, Hk, S), D) and decodable(coding[1], (B, Hk, S), E)):
            return False
    elif (keys.shape, values.shape) != ((B, Hk, S, D), (B, Hk, S, E)) or not _is_same(new, keys, values):
        return False
    return new[0].shape == (B, Hk, 1, D) and new[1].shape == (B, Hk, 1, E)


def _is_same(new: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> bool:
    """Whether new keys and values have the dtypes of the slots."""
    return keys.dtype == new[0].dtype and values.dtype == new[1].dtype


def addable(added: Added, positions: Tensor, wanted: Wanted | None) -> bool:
    """Whether the policy's state has the dtype, shape and strides that `step` promises to the kernel."""
    ring = added.ring
    if wanted is None or not added.states:
        return wanted is None and not added.states and ring is None
    if ring is not None and (len(added.states) != 2 or not _is_ring(ring, positions)):
        return False
    if added.lost is not None and (added.lost.dtype, added.lost.shape) != (torch.float32, (*positions.shape[:2], 2)):
        return False
    strides = added.states[0].stride()
    return wanted.second == (None if ring is None else "low") and all(
        state.dtype == torch.float32 and state.shape == positions.shape and state.stride() == strides
        for state in (*added.states, *(ring.words if ring else ()))
    )


def _is_ring(ring: Ring, positions: Tensor) -> bool:
    """Whether there are words, a place for the mass, and of each size one whole number, or one for each row."""
    mass = ring.mass
    if not ring.words or (mass.dtype, mass.shape) != (torch.float32, positions.shape) or not mass.is_contiguous():
        return False
    return all(_is_share(size, len(positions), 1) for size in (ring.window, ring.least, ring.drop, ring.budget))


def countable(positions: Tensor, seen: Tensor | None = None, recent: Budget = 0, limit: Budget = 0) -> bool:
    """Whether dtypes and shapes are those that the functions on slots promise to the kernel."""
    B, Hk, _ = positions.shape
    if positions.dtype != torch.int32:
        return False
    if seen is not None and (seen.dtype not in _WHOLE or seen.shape != (B,)):
        return False
    return _is_share(recent, B, Hk) and _is_share(limit, B, Hk)


def _is_share(value: Budget, rows: int, heads: int) -> bool:
    """Whether it is one whole number, or one for each row or head."""
    if isinstance(value, int):
        return True
    return value.is_cpu and value.dtype in _WHOLE and value.shape in ((rows, 1), (rows, heads))


def _is_per_row(value: object, rows: int) -> bool:
    """Whether it is one number, or one for each row."""
    return not isinstance(value, Tensor) or (value.is_cpu and value.shape == (rows,))

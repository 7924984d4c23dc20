"""The kernel as functions of tensors; each returns ``None`` and does nothing if the kernel cannot do it.

The kernel gets bare addresses and cannot check anything itself. So each function first checks all that the kernel
relies on: devices, dtypes, shapes and strides.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvkeep.attention_stats import BITS
from kvkeep.backends.base import Added, AttentionInputs, Ring, SlotLimits, WantedReport, sums_wanted
from kvkeep.backends.native import bindings
from kvkeep.backends.native.bindings import LAST, KeyRotation, bounded, cast_to, either, library_for, pointer, strides
from kvkeep.kv.slot_codec import pieces
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Budget, Ranges, Report, Slots

_KINDS = {None: 1, "last": 2, "low": 3}
"""The second field of a report → the kernel's number for it; 0: no report."""

_NOTHING = WantedReport()
# A function of the kernel takes one struct of its header, packed here field by field: q is an int64 or a pointer, d a
# double, and a group stands for a tensor with its strides.
_ATTEND = struct.Struct("8q 3q 4q 4q 3q 2q 2q q 3q 3q q q 2q 5d 3q 4q")
_STEP = struct.Struct("3q 3q 2q 3q 3q 4q 4q 2q d 3q")
_RING = struct.Struct("6q 2q")
_TOKEN_HEAD, _OUT, _NEW = struct.Struct("8q 3q"), struct.Struct("2q q"), struct.Struct("3q 3q")
# where the keys of the slots begin, and where the address of `now` lies
_QUERY_END, _NOW = _TOKEN_HEAD.size, _TOKEN_HEAD.size + struct.calcsize("4q 4q 3q")
_ADDRESS = struct.Struct("q")
_BACK = struct.calcsize("8q 3q 4q 4q 3q 2q 2q q 3q 3q q q 2q 5d q")
"""Where the address of `KeyRotation.back` lies in the arguments of attention."""


def attend(  # noqa: PLR0913  all that the kernel is told
    query: Float[Tensor, "B Hq 1 D"],
    keys: Shaped[Tensor, "B Hk P _D"],
    values: Shaped[Tensor, "B Hk P _E"],
    now: Int[Tensor, "B 1"],
    positions: Int[Tensor, "B #Hk S"],
    *,
    options: AttentionOptions,
    wanted: WantedReport | None,
    turn: KeyRotation | None = None,
    ranges: Ranges | None = None,
    codes: bindings.Coding | None = None,
) -> list[Tensor] | None:
    """Compute attention of one token per row, in one pass over the slots; return ``None`` if the kernel cannot.

    With ``ranges``, keys and values are pools as `kvkeep.kv.pooled_store.lying` shows them; with ``codes``, they are
    the codes' numbers. With ``turn``, keys are unrotated. A padded query (position -1), and a query that sees nothing,
    give zeros. `AttentionOptions.top` is ignored.

    Returns:
        The output ``(B, Hq, 1, E)`` in the query's dtype; if a report is wanted, the mass of each slot as well; and if
        `WantedReport.second` names another field, that field. Both are ``(B, Hk, S)`` and float32.
    """
    library = library_for(query, keys, values, now, positions, *bindings.scales_of(codes))
    asked: dict[str, Any] = {"options": options, "wanted": wanted, "turn": turn}
    given = query, keys, values, now, positions
    if library is None or not bindings.attendable(*given, **asked, ranges=ranges, coding=codes):
        return None
    positions, now = cast_to(positions, torch.int32), cast_to(now, torch.int64)
    slots = keys, values, positions
    call = _attention(query, slots, now, **asked, ranges=ranges, codes=codes)
    return None if library.kvkeep_attend(call.packed) else call.results


def step(  # noqa: PLR0913  all that the kernel is told
    token: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    slots: Slots,
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: WantedReport | None,
    added: Added,
    limits: SlotLimits,
    turn: KeyRotation | None = None,
    ranges: Ranges | None = None,
    codes: bindings.Coding | None = None,
) -> NativeStep | None:
    """Return the packed arguments of `Backend.step`; ``None`` if the kernel cannot run it. The windows of ``options``
    and of ``limits`` must be equal.

    ``ranges`` and ``codes`` are those of `attend`. ``wanted`` asks for the mass alone, with a ring for low as well; it
    is ``None`` if the policy has no sums. With a ``turn`` the slots' keys are unrotated, and the token is rotated to
    its position.
    """
    (query, *new), (keys, values, positions) = token, slots
    library = library_for(query, *slots, *new, now, limits.seen, *added.tensors, *bindings.scales_of(codes))
    asked: dict[str, Any] = {"options": options, "wanted": wanted, "turn": turn}
    given = query, keys, values, now, positions
    if library is None or not bindings.attendable(*given, **asked, ranges=ranges, coding=codes):
        return None
    if not bindings.writable(*slots, token[1:], now, pooled=ranges is not None, coding=codes) or not bindings.addable(
        added, positions, wanted
    ):
        return None
    if not bindings.limitable(positions, limits):
        return None
    now, seen = cast_to(now, torch.int64), cast_to(limits.seen, torch.int64)
    prompts = None if limits.prompt is None else cast_to(limits.prompt, torch.int64)
    recents, recent = either(bounded(limits.recent), torch.int64)
    most, limit = either(bounded(limits.stay), torch.int64)
    total, other = (*added.states, None, None)[:2]  # a policy has up to two sums
    lost = None if wanted is None else added.lost  # without a report no mass is known
    call = _attention(query, slots, now, **asked, reports=False, ranges=ranges, codes=codes)
    marks, sizes = _marks(added.ring, len(query))
    rest = _STEP.pack(
        *(new[0].data_ptr(), *new[0].stride()[:2]),
        *(new[1].data_ptr(), *new[1].stride()[:2]),
        *(pointer(total), pointer(other)),
        *((0, 0) if total is None else total.stride()[:2]),
        *(added.is_score, seen.data_ptr(), seen.stride(0), bounded(limits.sinks)),
        *(pointer(recents), *((0, 0) if recents is None else strides(recents)), recent),
        *(pointer(most), *((0, 0) if most is None else strides(most)), limit),
        *_prompts(prompts),
        1.0 if wanted is None else wanted.decay,
        *((0, 0, 0) if lost is None else (lost.data_ptr(), *lost.stride()[:2])),
    )
    return NativeStep(
        *(library, call.packed, rest + marks, token, call.results[0]),
        (*call.tensors, now, seen, prompts, sizes),
        (*call.tables, recents, most),
    )


class NativeStep(NamedTuple):
    """Arguments of a step.

    Attributes:
        library: the kernel.
        attention: packed arguments of attention.
        rest: packed arguments of all else, which begin with the new token.
        token: the query, the key and the value.
        out: the output.
        tensors: what lies at the addresses, converted where needed; it must live as long as the call.
        tables: so must these small tables of numbers of rows and heads. They are no part of a layer's block.
    """

    library: ctypes.CDLL
    attention: bytes
    rest: bytes
    token: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]]
    out: Float[Tensor, "B Hq 1 E"]
    tensors: tuple[Tensor | None, ...]
    tables: tuple[Tensor | None, ...]

    def run(self) -> Float[Tensor, "B Hq 1 E"] | None:
        """Run the step in the kernel, and return its output; ``None``, with nothing changed, if the kernel cannot."""
        return None if self.library.kvkeep_step(self.attention + self.rest) else self.out


class NativeRepeat:
    """A step for other tokens. Of the layer's tensors, this holds addresses alone: see `Backend.repeat`.

    Args:
        step: a step of a token.
        rotation: the model's rotary embedding, under slot positions.

    Attributes:
        packed: the arguments of the kernel with the addresses of that token.
        within: a larger call that this step has become a part of.
        rotated_dims: how many dims of a head are rotated back under slot positions; 0 under true ones.
    """

    packed: bytes
    within: Any

    def __init__(self, step: NativeStep, rotation: Rotation | None = None) -> None:
        packed, (query, keys, values) = step.attention + step.rest, step.token
        new = len(step.attention)
        self.packed, self.within, self._tables = packed, None, step.tables
        self.library = step.library
        self._numbers = _TOKEN_HEAD.unpack_from(packed)[:6]  # the sizes; the number of threads may change
        self._slots = packed[_QUERY_END:_NOW]
        self._asked, self._limits = packed[_NOW + _OUT.size : new], packed[new + _NEW.size :]
        self._query, self._keys, self._values = (_kind(tensor) for tensor in (query, keys, values))
        self._out, self._rotation = step.out.shape, rotation
        self.rotated_dims = 0 if rotation is None else 2 * len(rotation.frequencies)

    def takes(
        self, query: Float[Tensor, "B Hq 1 D"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> bool:
        """Return whether the tensors have the type, device, dtype, shape and last stride of those with which the step
        was packed.
        """
        return _kind(query) == self._query and _kind(keys) == self._keys and _kind(values) == self._values

    def __call__(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        now: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Run the step with these tokens in the kernel, and return the output; ``None``, with nothing changed, if it
        cannot. Nothing is checked: ask `takes` before, and give ``now`` in int64.
        """
        out = query.new_empty(self._out)
        head = _TOKEN_HEAD.pack(
            *(*self._numbers, torch.get_num_threads(), bindings.TYPES[query.dtype]),
            *(query.data_ptr(), *query.stride()[:2]),
        )
        packed = head + self._slots + _OUT.pack(now.data_ptr(), now.stride(0), out.data_ptr()) + self._asked
        if self._rotation is not None:
            back = self._rotation.angles_now(now, query.dtype)  # it must live as long as the call
            packed = packed[:_BACK] + _ADDRESS.pack(back.data_ptr()) + packed[_BACK + _ADDRESS.size :]
        packed += _NEW.pack(keys.data_ptr(), *keys.stride()[:2], values.data_ptr(), *values.stride()[:2])
        return None if self.library.kvkeep_step(packed + self._limits) else out


def _kind(tensor: Tensor) -> tuple[type, torch.device, torch.dtype, torch.Size, int]:
    """Return the properties of a tensor that `NativeRepeat.takes` compares; other strides are told to the kernel."""
    return type(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride(-1)


def _marks(ring: Ring | None, rows: int) -> tuple[bytes, Tensor | None]:
    """Pack the sizes of a ring and the addresses of its mass and words; for ``None`` zeros, and no words.

    Also return the table of sizes if rows have their own, else ``None``. The packed bytes hold its address, so the
    caller keeps it until the kernel has returned.
    """
    if ring is None:
        return _RING.pack(*(0,) * 8), None
    sizes = ring.window, ring.least, ring.drop, ring.budget
    own = None
    if any(isinstance(size, Tensor) for size in sizes):
        own = torch.cat([torch.as_tensor(size, dtype=torch.int64).view(-1, 1).expand(rows, 1) for size in sizes], dim=1)
    numbers = sizes if own is None else (0, 0, 0, 0)
    packed = _RING.pack(len(ring.words), *numbers, pointer(own), BITS, ring.mass.data_ptr())
    return packed + struct.pack(f"{len(ring.words)}q", *(word.data_ptr() for word in ring.words)), own


class _Attention(NamedTuple):
    """Arguments of attention.

    Attributes:
        packed: numbers and addresses.
        results: the output, and the fields of the report.
        tensors: other tensors that lie at the addresses; they must live as long as the call.
        tables: so must these tables of one number per row.
    """

    packed: bytes
    results: list[Tensor]
    tensors: tuple[Tensor | None, ...]
    tables: tuple[Tensor | None, ...]


def _attention(  # noqa: PLR0913  all that the kernel is told
    query: Float[Tensor, "B Hq 1 D"],
    slots: tuple[Shaped[Tensor, "B Hk P _D"], Shaped[Tensor, "B Hk P _E"], Int[Tensor, "B #Hk S"]],
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: WantedReport | None,
    turn: KeyRotation | None,
    reports: bool = True,
    ranges: Ranges | None = None,
    codes: bindings.Coding | None = None,
) -> _Attention:
    """Pack the arguments of attention, and allocate its results; without ``reports`` only the output, and the kernel
    keeps the mass to itself. The other arguments are those of `attend`, all of which has been checked.
    """
    (keys, values, positions), (B, Hq, _, D) = slots, query.shape
    Hk, S = keys.shape[1], (ranges and ranges.width) or positions.shape[2]
    E = values.shape[-1] if codes is None else codes.values.dim
    kind = _KINDS[wanted.second] if wanted else 0
    results = [query.new_empty((B, Hq, 1, E))]
    # the mass, and for the kinds 2 and 3 a second field
    results += [query.new_empty((B, Hk, S), dtype=torch.float32) for _ in range(min(kind, 2) if reports else 0)]
    out, mass, second = (*(result.data_ptr() for result in results), 0, 0)[:3]  # 0: null, no such result
    wanted = wanted or _NOTHING
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    counted, counts = either(wanted.counts, torch.int64)
    gains, gain = either(1.0 if wanted.gain is None else wanted.gain, torch.float32)
    newest, last = either(wanted.last, torch.int64)
    packed = _ATTEND.pack(
        *(B, Hk, Hq // Hk, S, D, E, torch.get_num_threads(), bindings.TYPES[query.dtype]),
        *(query.data_ptr(), *query.stride()[:2]),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0),
        *(now.data_ptr(), now.stride(0)),
        *(out, pointer(sinks), min(options.window or 0, LAST)),  # 0: there is no window
        *(kind, mass, second),
        *(pointer(counted), counts, pointer(gains), wanted.gain is not None),
        *(pointer(newest), last, wanted.live),
        *(options.scaling, options.softcap or 0.0, gain, wanted.decay, wanted.theta),
        *((0, 0, 0) if turn is None else turn.packed()),
        *bindings.packed_ranges(ranges),
    )
    packed += bindings.packed(codes)
    held = (ranges.starts, ranges.sizes) if ranges else ()
    angles, back = (None, None) if turn is None else turn
    return _Attention(packed, results, (sinks, back, *held), (counted, gains, newest, angles))


# Attention of many tokens per row in the kernel.
#
# The kernel takes bare addresses. `bindings.readable` makes sure that everything it relies on holds.

# the parts of Prefill in tiles.h: its head, Piece twice, and the rest
_SHAPE = struct.Struct("8q 4q")
_PIECE = struct.Struct("q 4q 4q 3q")
_REST = struct.Struct("4q 4q 2q 2q 3d")
_NO_PIECE = bytes(_PIECE.size)


def attend_prefill(inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """Compute `Backend.attend` for several tokens; return ``None`` if the kernel cannot.

    `AttentionOptions.top` is ignored.
    """
    found = attend_twice(inputs, None)
    return None if found is None else found[:2]


def attend_twice(
    inputs: AttentionInputs, again: Float[Tensor, "B Hq T D"] | None
) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]] | None:
    """Compute `Backend.attend_twice` for several tokens; return ``None`` if the kernel cannot. See `attend_prefill`.

    Args:
        inputs: the first reading.
        again: queries of the second reading; ``None``: there is no second reading, and the last tensor is empty.
    """
    query, slots, now, options, statistic = inputs
    parts = pieces(slots)
    library = library_for(query, *(tensor for part in parts for tensor in part))
    if library is None:
        return None
    if not all(bindings.readable(query, *part[:2], now, part.positions, options=options) for part in parts):
        return None
    if (wanted := sums_wanted(statistic, now)) is None:
        return None
    if options.window is not None and wanted.gain is not None and bool((wanted.gain == 0).any()):
        return None  # all keys up to a row then count for it, and the kernel does not read those behind the window
    (B, Hq, T, D), (Hk, E), S = query.shape, parts[0].values.shape[1::2], slots.positions.shape[2]
    now, parts = (
        now.to(torch.int64).contiguous(),
        tuple(part._replace(positions=part.positions.int()) for part in parts),
    )
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    every = [*wanted.masses, *wanted.lows]
    weights = torch.stack(every).float().contiguous() if every else None
    gain = None if wanted.gain is None else wanted.gain.float().contiguous()
    out, sums = query.new_empty((B, Hq, T, E)), query.new_empty((len(every), B, Hk, S), dtype=torch.float32)
    second = None if again is None else again.to(query.dtype).contiguous()
    shares = query.new_empty((B, Hk, 0 if second is None else S), dtype=torch.float32)
    packed = _SHAPE.pack(
        *(B, Hk, Hq // Hk, T, D, E, torch.get_num_threads(), bindings.TYPES[query.dtype]),
        *(query.data_ptr(), *query.stride()[:3]),
    )
    packed += _NO_PIECE * (2 - len(parts)) + b"".join(map(_piece, parts))  # slots, if there are any, and the chunk
    packed += _REST.pack(
        *(now.data_ptr(), out.data_ptr(), pointer(sinks), min(options.window or 0, LAST)),
        *(len(wanted.masses), len(wanted.lows), pointer(weights), sums.data_ptr()),
        *(pointer(gain), wanted.live, pointer(second), shares.data_ptr()),
        *(options.scaling, options.softcap or 0.0, wanted.theta),
    )
    if library.kvkeep_prefill(packed):
        return None
    return out, Report(dict(zip(statistic.fields, sums, strict=True))), shares


def _piece(slots: Slots) -> bytes:
    """Pack one contiguous part of the keys and values, with positions per head or one row of them for all heads."""
    keys, values, positions = slots
    step = positions.stride(1) if positions.shape[1] > 1 else 0
    return _PIECE.pack(
        keys.shape[2],
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), positions.stride(0), step),
    )


# The kernel's functions on slots: write a token, expire, count, evict.
#
# Each returns ``None`` and does nothing if the kernel cannot do it. The kernel takes bare addresses. The
# checks of `bindings` make sure that everything it relies on holds.

_WRITE = struct.Struct("8q 4q 4q 3q 3q 3q 2q q 4q q")
_SLOTS = struct.Struct("4q 3q 3q 3q q 4q 4q 2q 4q")


def write(
    keys: Shaped[Tensor, "B Hk capacity _D"],
    values: Shaped[Tensor, "B Hk capacity _E"],
    positions: Int[Tensor, "B Hk S"],
    *,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
    ranges: Ranges | None = None,
    codes: bindings.Coding | None = None,
) -> Int[Tensor, "B Hk 1"] | None:
    """Write a new token per row into an empty slot of each head, in place, as `Backend.append`, and return the slots;
    ``None``, with nothing changed, if the kernel cannot.

    With ``ranges``, keys and values are pools as `kvkeep.kv.pooled_store.lying` shows them; with ``codes``, the codes'
    numbers.
    """
    library, pooled = library_for(keys, values, positions, *new, now, *bindings.scales_of(codes)), ranges is not None
    new_keys, new_values = new
    if library is None or not bindings.writable(keys, values, positions, new, now, pooled=pooled, coding=codes):
        return None
    B, Hk, S = positions.shape
    now = cast_to(now, torch.int64)
    slot = positions.new_empty((B, Hk, 1), dtype=torch.int64)
    call = _WRITE.pack(
        *(B, Hk, S, new_keys.shape[-1], new_values.shape[-1], keys.element_size(), values.element_size()),
        torch.get_num_threads(),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(new_keys.data_ptr(), *new_keys.stride()[:2]),
        *(new_values.data_ptr(), *new_values.stride()[:2]),
        *(now.data_ptr(), now.stride(0), slot.data_ptr()),
        *bindings.packed_ranges(ranges),
        bindings.TYPES.get(new_keys.dtype, 0),
    )
    # the last two fields turn keys back, which only a whole step does
    return None if library.kvkeep_write(call + bindings.packed(codes) + bytes(16)) else slot


def expire(positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> bool | None:
    """Run `Backend.expire` and return ``True``; return ``None``, with nothing changed, if the kernel cannot."""
    library = library_for(positions, seen)
    if library is None or not bindings.countable(positions, seen):
        return None
    call = _slots(positions, seen, window=window)
    return None if library.kvkeep_expire(call.packed) else True


def count_over(positions: Int[Tensor, "B Hk S"], limit: Budget) -> int | None:
    """Return how many heads of all rows hold more tokens than their limit; ``None`` if the kernel cannot do it."""
    library = library_for(positions)
    if library is None or not bindings.countable(positions, limit=limit):
        return None
    call = _slots(positions, limit=limit)
    found = library.kvkeep_count_over(call.packed)
    return None if found < 0 else int(found)


def evict(positions: Int[Tensor, "B Hk S"], scores: Float[Tensor, "B Hk S"], limits: SlotLimits) -> bool | None:
    """Run `Backend.evict` and return ``True``; return ``None``, with nothing changed, if the kernel cannot."""
    library = library_for(positions, scores, limits.seen)
    if library is None or not bindings.limitable(positions, limits):
        return None
    if scores.dtype != torch.float32 or scores.shape != positions.shape:
        return None
    call = _slots(
        *(positions, limits.seen),
        scores=scores,
        sinks=limits.sinks,
        recent=limits.recent,
        limit=limits.stay,
        prompt=limits.prompt,
    )
    return None if library.kvkeep_evict(call.packed) else True


class _Call(NamedTuple):
    """Arguments of the functions on slots.

    Attributes:
        packed: numbers and addresses.
        tensors: what lies at the addresses, converted where needed; it must live as long as the call.
    """

    packed: bytes
    tensors: tuple[Tensor | None, ...]


def _slots(
    positions: Int[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"] | None = None,
    *,
    window: int = 0,
    scores: Float[Tensor, "B Hk S"] | None = None,
    sinks: int = 0,
    recent: Budget = 0,
    limit: Budget = 0,
    prompt: Int[Tensor, " B"] | None = None,
) -> _Call:
    """Pack shapes, addresses and numbers for the kernel's functions that count, expire and evict slots.

    Return them with the converted tensors at these addresses, which must live as long as the call.
    """
    seen, prompts = (None if x is None else cast_to(x, torch.int64) for x in (seen, prompt))
    recents, newest = either(bounded(recent), torch.int64)
    limits, most = either(bounded(limit), torch.int64)
    packed = _SLOTS.pack(
        *(*positions.shape, torch.get_num_threads()),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(pointer(seen), 0 if seen is None else seen.stride(0), bounded(window)),
        *(pointer(scores), *((0, 0) if scores is None else scores.stride()[:2]), bounded(sinks)),
        *(pointer(recents), *((0, 0) if recents is None else strides(recents)), newest),
        *(pointer(limits), *((0, 0) if limits is None else strides(limits)), most),
        *_prompts(prompts),
        *bindings.packed_ranges(None),  # positions lie side by side here, those of a pool's slots, too
    )
    return _Call(packed, (seen, recents, limits, prompts))


def _prompts(prompts: Int[Tensor, " B"] | None) -> tuple[int, int]:
    """Return the address and the stride of each row's length of the prompt; zeros for ``None``."""
    return (0, 0) if prompts is None else (prompts.data_ptr(), prompts.stride(0))

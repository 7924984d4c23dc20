"""Slots of which each head owns a range of a pool that all heads of its row share.

A backend that fuses a decode step works on the ranges where they lie (`PooledStore.in_ranges`). For all other steps
positions and a policy's state, which are small, are copied side by side (`OpenedPool`). Keys and values are not: a
backend reads them where they lie, and a policy that looks at them gets a copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.kv.slot_codec import KeyTransform, LazySlots, Tokens, Vectors, nothing
from kvkeep.kv.store import QUANTIZED, DenseStore, Store, by_bits
from kvkeep.types import EMPTY, Ranges, Slots, View


class PoolSlots(LazySlots):
    """Slots whose keys and values lie in a pool. Slot ``s`` of a head is entry ``starts + s`` of its row's pool.

    As `Slots` they have the shapes of slots side by side, as wide as the longest range needs. What is beyond the end of
    a head's range is empty, and stays empty. ``keys`` and ``values`` are copies that are made when they are first read;
    only `write` changes the pool.

    Attributes:
        pool: keys and values of all heads, ``(B, P, ...)``.
        starts: first entry of each head's range.
        sizes: number of entries of each head's range.
        entries: entry of each slot, see `indices`. The last entry of a row's pool belongs to no head.
    """

    pool: Vectors
    starts: Int[Tensor, "B Hk"]
    sizes: Int[Tensor, "B Hk"]
    entries: Int[Tensor, "B Hk S"]

    @classmethod
    def of(
        cls, pool: Vectors, positions: Int[Tensor, "B Hk S"], ranges: Ranges, entries: Int[Tensor, "B Hk S"]
    ) -> PoolSlots:
        """Return slots that lie in a pool.

        Args:
            pool: keys and values.
            positions: true positions, side by side.
            ranges: ``starts`` and ``sizes``.
            entries: entry of each slot.
        """
        made = cls(*nothing(positions), positions)
        made.pool = pool
        made.starts, made.sizes, made.entries = ranges.starts, ranges.sizes, entries
        return made

    @functools.cached_property
    def laid(self) -> Slots:
        """Return copies of the slots side by side. They stay quantized if the pool is."""
        return self.pool.each(self._copied).slots(self.positions) if self.pool.bits else self.copied()

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""
        return self.laid.keys if self.pool.bits else self._copied(self.pool.tensors["keys"])

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return self.laid.values if self.pool.bits else self._copied(self.pool.tensors["values"])

    def _copied(self, pool: Tensor) -> Tensor:
        """Return copies of the pool's entries, in the order of the slots."""
        return side_by_side(pool, self.entries)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"] | None:
        """Write one token of each head into the pool, at the given slots. Return which heads can use their token, see
        `kvkeep.kv.slot_codec.finite`; ``None``: all can. Positions are left to the caller.
        """
        self.forget()
        entry = self.entries.gather(-1, slot)
        new, usable = Vectors.of(keys, values, self.pool.bits, self.pool.transform)
        for name, pool in self.pool.tensors.items():
            put_back(pool, entry, new.tensors[name].to(pool.dtype))
        return usable

    def forget(self) -> None:
        """Drop the copies, because the slots have changed."""
        super().forget()
        vars(self).pop("laid", None)


def lying(slots: Slots) -> tuple[Slots, Ranges | None]:
    """Return the slots as they lie in memory, together with each head's range in the pool. The range is ``None`` for
    slots that are not in a pool.

    Slots in a pool show to every head the keys and values of its row's whole pool.
    """
    if not isinstance(slots, PoolSlots):
        return slots, None
    heads = slots.positions.shape[1]
    shown = slots.pool.each(lambda pool: to_heads(pool, heads))
    return shown.slots(slots.positions), Ranges(slots.starts, slots.sizes)


def to_heads(pool: Tensor, heads: int) -> Tensor:
    """Return the pools ``(B, P, ...)`` as every head sees them, ``(B, Hk, P, ...)``, without a copy."""
    return pool[:, None].expand(-1, heads, *pool.shape[1:])


def indices(starts: Int[Tensor, "B Hk"], sizes: Int[Tensor, "B Hk"], *, width: int, pool: int) -> Int[Tensor, "B Hk S"]:
    """Return the pool entry of each slot of each head, counted over the pools of all rows.

    Args:
        starts: first entry of each head's range, counted in its row.
        sizes: number of entries of each head's range.
        width: slots per head.
        pool: entries of a row. Slots beyond the end of a range share the last one.
    """
    at = torch.arange(width, device=starts.device)
    before = torch.arange(0, len(starts) * pool, pool, device=starts.device)[:, None]
    return torch.where(at < sizes[..., None], at + (starts + before)[..., None], (before + pool - 1)[..., None])


def side_by_side(pool: Tensor, index: Int[Tensor, "B Hk S"]) -> Tensor:
    """Copy entries out of the pools ``(B, P, ...)`` into the order of the slots ``(B, Hk, S, ...)``."""
    inner = pool.shape[2:]
    return pool.reshape(-1, *inner).index_select(0, index.flatten()).view(*index.shape, *inner)


def put_back(pool: Tensor, index: Int[Tensor, "B Hk S"], content: Tensor) -> None:
    """Write the content of slots into their entries of the pools, which must be contiguous; the inverse of
    `side_by_side`.
    """
    inner = pool.shape[2:]
    # `reshape` could return a copy, in which the content would be lost
    pool.view(-1, *inner).index_copy_(0, index.flatten(), content.reshape(index.numel(), *inner))


class EvenView(NamedTuple):
    """Where the slots of heads lie in a pool if all of them own equally many, one head after the other.

    Attributes:
        first: the first entry of the first head.
        heads: number of heads.
        size: slots of a head.
    """

    first: int
    heads: int
    size: int

    def of(self, numbers: Tensor) -> Tensor:
        """Return numbers of the pool's entries, ``(B, P, ...)``, in the order of the slots, ``(B, Hk, size, ...)``,
        without a copy.
        """
        B, _, *inner = numbers.shape
        return numbers.narrow(1, self.first, self.heads * self.size).view(B, self.heads, self.size, *inner)


# A store for heads with budgets of their own: each head owns a range of one pool per row.


class PooledStore(Store):
    """Keys, values and positions of one layer in one pool per row, of which each KV head owns a range.

    A row's pool has ``capacity`` slots per head on average and one entry that belongs to no head. Its size never
    changes, however the slots are divided among the heads. The layout is drawn in ``docs/layouts.md``.

    Attributes:
        vectors: keys and values, ``(B, P, ...)``.
        entries: true positions, ``-1`` = empty.
        starts: first entry of each head's range.
        sizes: number of slots of each head.
        widest: the most slots that a head can have. On a GPU, slots are always laid side by side in this width.
        waits: whether the longest range is read from a GPU instead, which takes a wait: one head may have most slots.
    """

    vectors: Vectors
    entries: Int[Tensor, "B P"]
    starts: Int[Tensor, "B Hk"]
    sizes: Int[Tensor, "B Hk"]
    widest: int
    waits: bool = False

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        B, Hk = like_keys.shape[:2]
        # the last entry belongs to no head: slots beyond the end of a range point to it, and it stays empty
        P = Hk * capacity + 1
        blank = Vectors.blank(like_keys[:, 0], like_values[:, 0], P, self.bits)
        self.vectors = replace(blank, transform=KeyTransform.blank(like_keys, self.bits))
        self.entries = torch.full((B, P), EMPTY, dtype=torch.int32, device=like_keys.device)
        self.sizes = torch.full((B, Hk), capacity, dtype=torch.int64, device=like_keys.device)
        self.starts = self.sizes.cumsum(dim=1) - self.sizes
        self.widest = capacity

    @classmethod
    def for_heads(
        cls,
        like_keys: Float[Tensor, "B Hk _ D"],
        like_values: Float[Tensor, "B Hk _ E"],
        budgets: Sequence[Sequence[int]],
        *,
        room: int = 1,
    ) -> PooledStore:
        """Return an empty store with room for heads of these budgets, and one slot more for each. The heads have equal
        ranges until `divide` is called.

        Args:
            like_keys: see `Store`.
            like_values: see `Store`.
            budgets: budgets of the heads, one list for all rows or one per row.
            room: the row has this many times the slots of its heads' budgets, for heads that may get more.
        """
        heads = like_keys.shape[1]
        # the same number for each head, rounded up, until `divide`; + 1 for the token that is written before another
        # one is evicted
        made = cls(like_keys, like_values, -(-room * max(map(sum, budgets)) // heads) + 1)
        made.widest = max(map(max, budgets)) + 1
        return made

    @property
    def positions(self) -> Int[Tensor, "B Hk capacity"]:  # type: ignore[override]  # an attribute of other stores
        """Return a copy of the true positions, side by side, ``-1`` = empty."""
        return side_by_side(self.entries, self.index())

    @property
    def capacity(self) -> int:
        """Return the slots of the longest range; on a GPU `widest`, unless `waits` is set."""
        waits = (self.waits or self.sizes.device.type == "cpu") and self.sizes.numel()  # no rows have no longest range
        return int(self.sizes.max()) if waits else self.widest

    @property
    def room(self) -> int:
        """Return the number of slots of all rows and heads."""
        return self.entries.numel()

    @property
    def n_tokens(self) -> int:
        """Return the number of occupied slots of all rows and heads."""
        return int((self.entries >= 0).sum())

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all heads, in the model's dtype."""
        return self.sizes.shape[1] * self.vectors.token_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype."""
        return self.vectors.dtypes[0]

    def index(self) -> Int[Tensor, "B Hk S"]:
        """Return the entry of each slot, counted over the pools of all rows, see `indices`."""
        return indices(self.starts, self.sizes, width=self.capacity, pool=self.entries.shape[1])

    def numbers(self, start: float) -> Float[Tensor, "B P"]:
        """Return one number for each entry, all equal to ``start``."""
        return torch.full(self.entries.shape, start, dtype=torch.float32, device=self.entries.device)

    def clear(self, rows: int | slice) -> None:
        """Empty the slots of some rows."""
        self.entries[rows] = EMPTY

    def opened(self) -> OpenedPool:
        """Return the slots side by side."""
        return OpenedPool(self)

    def even(self) -> EvenView | None:
        """Return how to look at the pool without a copy, with slots side by side; ``None`` unless all heads of all rows
        own equally many slots at the same places, in main memory.
        """
        if not (self.sizes.is_cpu and self.sizes.numel()):
            return None
        view = EvenView(int(self.starts[0, 0]), self.sizes.shape[1], int(self.sizes[0, 0]))
        starts = view.first + view.size * torch.arange(view.heads)
        alike = torch.equal(self.starts, starts.expand_as(self.starts)) and bool((self.sizes == view.size).all())
        return view if alike else None

    def seen_by(self, view: EvenView) -> Store:
        """Return the slots as a store that is a view of the pool, for a step that leaves the ranges as they are."""
        tensors = {**self.vectors.each(view.of).tensors, **self.vectors.of_rows, "positions": view.of(self.entries)}
        return self.dense_over(tensors)

    def dense_over(self, tensors: Mapping[str, Tensor]) -> Store:
        """Return a store of the same number of bits whose slots lie side by side, over tensors named as in
        `OpenedPool.per_row`.
        """
        kind = next((kind for kind in QUANTIZED.values() if kind.bits == self.bits), DenseStore)
        return kind(*self.no_token(), 0).over(tensors)  # 0 slots: its own tensors are replaced at once

    def slots(self) -> Slots:
        """Return copies of the slots, side by side."""
        return self.opened().slots().copied()

    def in_ranges(self) -> tuple[Slots, Ranges | None]:
        """Return the pool as all heads see it, and where each head's slots lie in it."""
        shown = self.vectors.each(self.of_heads).slots(self.of_heads(self.entries))
        return shown, Ranges(self.starts, self.sizes, self.capacity)

    def of_heads(self, numbers: Tensor) -> Tensor:
        """Return numbers of the pool's entries as all heads see them, without a copy."""
        return to_heads(numbers, self.sizes.shape[1])

    def tables(self) -> tuple[Tensor, ...]:
        """Return the starts and the sizes of the ranges."""
        return self.starts, self.sizes

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        opened = self.opened()
        opened.fill(keys, values, positions)
        opened.close()

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        return self.opened().beside(keys, values, used=used)

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values have this store's rows, heads, head dims, dtype and device."""
        return keys.shape[:2] == values.shape[:2] == self.sizes.shape and self.vectors.fit(keys, values)

    def divide(self, sizes: Int[Tensor, "b Hk"], rows: slice = slice(None)) -> None:
        """Divide the pools of some rows among the heads by ``sizes``. The slots lose their content.

        Raises:
            ShapeError: a row has fewer slots than ``sizes`` need (checked on a CPU only).
        """
        room = self.entries.shape[1] - 1
        # on a GPU the host would have to wait for the answer
        if sizes.device.type == "cpu" and (sizes.sum(dim=1) > room).any():
            raise ShapeError(f"The heads of a row need {int(sizes.sum(dim=1).max())} slots, and its pool has {room}.")
        self.sizes[rows] = sizes
        self.starts[rows] = sizes.cumsum(dim=1) - sizes
        self.entries[rows] = EMPTY

    def no_token(self) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Return keys and values of no token, without a copy of the slots."""
        return self.vectors.no_token(*self.sizes.shape)

    def wider(self, capacity: int) -> PooledStore:
        """Return an empty store of ``capacity`` slots per head, divided equally, for the same rows. It transforms keys
        in the same way.
        """
        wide = type(self)(*self.no_token(), capacity)
        wide.vectors = replace(wide.vectors, transform=self.vectors.transform)
        return wide

    def per_row(self) -> dict[str, Tensor]:
        """Return every tensor of the store by name, not copied. The first axis of each tensor is the rows."""
        own = {"entries": self.entries, "starts": self.starts, "sizes": self.sizes}
        return {**self.vectors.tensors, **self.vectors.of_rows, **own}

    def over(self, tensors: Mapping[str, Tensor]) -> PooledStore:
        """Return a pooled store over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other.vectors = self.vectors.over(tensors)
        other.entries, other.starts, other.sizes = (tensors[name] for name in ("entries", "starts", "sizes"))
        return other


class OpenedPool(Store):
    """A pooled store during a step: positions lie side by side and are written in place, until `close`.

    Args:
        pool: the store, whose keys and values are written directly.

    Attributes:
        pool: the store.
        positions: true positions, ``-1`` = empty.
        index: the entry of each slot in the pool.
    """

    pool: PooledStore
    positions: Int[Tensor, "B Hk capacity"]
    index: Int[Tensor, "B Hk capacity"]

    def __init__(self, pool: PooledStore):
        self.pool, self.bits = pool, pool.bits
        self.index = pool.index()
        self.positions = side_by_side(pool.entries, self.index)
        ranges = Ranges(pool.starts, pool.sizes)
        self._slots = PoolSlots.of(pool.vectors, self.positions, ranges, self.index)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all heads, in the model's dtype."""
        return self.pool.token_bytes

    def slots(self) -> PoolSlots:
        """Return the slots, whose keys and values lie in the pool: the same object at every call."""
        return self._slots

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        self.put(*Vectors.of(keys, values, self.bits, self.pool.vectors.transform), positions)

    def put(self, vectors: Vectors, usable: Bool[Tensor, "B Hk n"] | None, positions: Int[Tensor, "B Hk n"]) -> None:
        """Write stored vectors into the first slots of each head, and empty the others.

        A token that is not ``usable`` (``None``: all are) leaves its slot empty.
        """
        n = positions.shape[-1]
        self._slots.forget()
        for name, content in vectors.tensors.items():
            put_back(self.pool.vectors.tensors[name], self.index[:, :, :n], content)
        self.positions[:, :, :n] = positions if usable is None else positions.masked_fill(~usable, EMPTY)
        self.positions[:, :, n:] = EMPTY

    def tokens(self, slots: Slots | View, *, used: int) -> Tokens:
        """Return tokens for `take`, see `Store.tokens`.

        In a quantized pool, the first ``used`` are copied as they are stored.
        """
        if self.bits is None:  # nothing is rounded, and `slots` shows copies already
            return super().tokens(slots, used=used)
        return Tokens(self._first(used), slots.keys[:, :, used:], slots.values[:, :, used:])

    def take(self, tokens: Tokens, positions: Int[Tensor, "B Hk n"], order: Int[Tensor, "B Hk n"]) -> None:
        """Replace the content with some of the tokens, see `Store.take`.

        What lies in slots is moved without another rounding.
        """
        found = tokens.chosen(order)
        self.put(found.held, found.usable, positions)

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        return self._first(used).beside(self.positions[:, :, :used], keys, values)

    def _first(self, used: int) -> Vectors:
        """Return copies of keys and values of the first ``used`` slots of each head, side by side, as they are
        stored.
        """
        return self.pool.vectors.each(lambda pool: side_by_side(pool, self.index[:, :, :used]))

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values have this store's rows, heads, head dims, dtype and device."""
        return self.pool.fits(keys, values)

    def side_by_side(self, numbers: Float[Tensor, "B P"]) -> Float[Tensor, "B Hk capacity"]:
        """Return copies of numbers of the pool's entries, in the order of the slots."""
        return side_by_side(numbers, self.index)

    def put_back(self, numbers: Float[Tensor, "B P"], held: Float[Tensor, "B Hk capacity"]) -> None:
        """Write ``held``, a number for each slot, into ``numbers``, one for each entry of the pool, in place."""
        put_back(numbers, self.index, held)

    def close(self) -> None:
        """Write the positions into the pool."""
        put_back(self.pool.entries, self.index, self.positions)

    def divided(self, sizes: Int[Tensor, "B Hk"]) -> OpenedPool:
        """Divide the pool among the heads by ``sizes``, and return it opened anew. The slots lose their content."""
        self.pool.divide(sizes)
        return self.pool.opened()

    def wider(self, capacity: int) -> PooledStore:
        """Return an empty pool of ``capacity`` slots per head, for the same rows."""
        return self.pool.wider(capacity)

    def per_row(self) -> dict[str, Tensor]:
        """Return copies of keys and values as they are stored, and the positions.

        The first axis of each is the rows.
        """
        return {**self._first(self.capacity).tensors, **self.pool.vectors.of_rows, "positions": self.positions}

    def per_slot(self) -> tuple[str, ...]:
        """Return the names of the tensors with one entry per slot: all but those of the keys' transform."""
        return (*self.pool.vectors.tensors, "positions")

    def over(self, tensors: Mapping[str, Tensor]) -> Store:
        """Return a store over other tensors, named as in `per_row`, with slots side by side in the same number of
        bits.
        """
        return self.pool.dense_over(tensors)


# The kind of store for a layout of slots and a number of bits.

POOLED = by_bits(PooledStore)
"""The pools of codes by the name of the setting, see `kvkeep.kv_bits.check_bits`."""


def kind_of(kv_bits: str | None, *, pooled: bool) -> type[Store]:
    """Return the class of store for slots.

    Args:
        kv_bits: bits of keys and values, a name of `kvkeep.kv_bits.KV_BITS`; ``None``: the model's dtype.
        pooled: whether heads own ranges of a pool.
    """
    if kv_bits is None:
        return PooledStore if pooled else DenseStore
    return POOLED[kv_bits] if pooled else QUANTIZED[kv_bits]

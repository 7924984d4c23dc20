"""The protocol of a store: how the keys, values and positions of one layer lie in memory."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ParamSpec, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.kv.slot_codec import CodedSlots, KeyTransform, Tokens, Vectors
from kvkeep.kv_bits import KV_BITS, Bits
from kvkeep.types import EMPTY, Ranges, Slots, View

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="Store")


class Store(abc.ABC):
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head, allocated once.

    A new store is empty. It takes its rows, heads, head dims, dtype and device from the given keys and values.
    Slots may have any layout, and another dtype than the model: the code that writes into them rounds.

    Attributes:
        bits: bits of a key's numbers and of a value's in the slots; ``None``: those of the model's dtype.
        positions: true positions, ``-1`` = empty.
    """

    bits: Bits = None
    positions: Int[Tensor, "B Hk capacity"]

    @abc.abstractmethod
    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int): ...

    @classmethod
    def like(
        cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Return keys and values of zero tokens, with the rows, heads and head dims that these tensors of a store show.
        The constructor of a store takes such.

        Args:
            tensors: named as in `per_row`; quantized if this class quantizes.
            dtype: the model's, where the tensors do not show it.
        """
        keys, values = tensors["keys"], tensors["values"]
        if cls.bits is None:
            return keys[:, :, :0], values[:, :, :0]
        # as stored, the last axis has bytes, of which each holds 8 / bits numbers
        key_dim, value_dim = (x.shape[-1] * 8 // bits for x, bits in zip((keys, values), cls.bits, strict=True))
        shape = *keys.shape[:2], 0
        return keys.new_empty((*shape, key_dim), dtype=dtype), values.new_empty((*shape, value_dim), dtype=dtype)

    @property
    def capacity(self) -> int:
        """Return the number of slots per row and head."""
        return self.positions.shape[-1]

    def used(self) -> int:
        """Return the number of slots up to the last one that is occupied in any row and head. On a GPU, where counting
        means waiting, return `capacity`.
        """
        if self.positions.device.type != "cpu":
            return self.capacity
        occupied = (self.positions >= 0).flatten(0, 1).any(dim=0).nonzero()
        return int(occupied[-1]) + 1 if len(occupied) else 0

    @property
    def room(self) -> int:
        """Return the number of slots, empty and occupied, of all rows and heads together."""
        return self.positions.numel()

    @property
    def n_tokens(self) -> int:
        """Return the number of occupied slots of all rows and heads."""
        return int((self.positions >= 0).sum())

    def numbers(self, start: float) -> Tensor:
        """Return a tensor with one number for each slot, all ``start``. A policy's state consists of such tensors."""
        return torch.full(self.positions.shape, start, dtype=torch.float32, device=self.positions.device)

    def clear(self, rows: int | slice) -> None:
        """Empty the slots of some rows."""
        self.positions[rows] = EMPTY

    def opened(self) -> Store:
        """Return the store as a step works on it, with positions side by side. It shares the memory of keys and values.
        By default it is the store itself.
        """
        return self

    def close(self) -> None:  # noqa: B027  nothing to do
        """Write what an opened store has copied back to where it lies in memory; by default nothing was copied."""

    def side_by_side(self, numbers: Tensor) -> Float[Tensor, "B Hk capacity"]:
        """Return per-slot numbers, made by `numbers`, in the order of `positions`: themselves unless slots lie in a
        pool.
        """
        return numbers

    def put_back(  # noqa: B027  nothing to do
        self, numbers: Tensor, held: Float[Tensor, "B Hk capacity"]
    ) -> None:
        """Write ``held``, a result of `side_by_side`, back into ``numbers``; nothing to do where it is no copy."""

    def divided(self, sizes: Int[Tensor, "B Hk"]) -> Store:
        """Return a store in which each head has at least ``sizes`` slots: this one as it is, or an empty one with more
        slots.
        """
        missing = int(sizes.max()) - self.capacity
        return self.wider(self.capacity + missing) if missing > 0 else self

    @property
    @abc.abstractmethod
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all heads, in the model's dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the keys."""
        return self.slots().keys.dtype

    @abc.abstractmethod
    def slots(self) -> Slots:
        """Return keys, values and positions of all slots, as a backend reads and writes them; copies only of a pool
        that is not opened.
        """

    def in_ranges(self) -> tuple[Slots, Ranges | None]:
        """Return the slots as they lie in memory, and each head's range of them; ``None``: heads lie side by side."""
        return self.slots(), None

    def of_heads(self, numbers: Tensor) -> Tensor:
        """Return per-slot numbers, made by `numbers`, in the shape of the positions of `in_ranges`, not copied."""
        return numbers

    def tables(self) -> tuple[Tensor, ...]:
        """Return the tables that say which slots belong to which head; none if that never changes."""
        return ()

    def no_token(self) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Return keys and values of no token, which show the shapes of the slots."""
        keys, values, _ = self.slots()
        return keys[:, :, :0], values[:, :, :0]

    def lying(self, used: int) -> Slots | None:
        """Return the first ``used`` slots without a copy; ``None`` if keys and values can only be read as copies, or
        are written one by one at a cost, as on a GPU.
        """
        return None

    @abc.abstractmethod
    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return keys and values: copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0
        in the copies.
        """

    @abc.abstractmethod
    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty, and so do those of
        tokens at position -1.
        """

    def tokens(self, slots: Slots | View, *, used: int) -> Tokens:
        """Return tokens in the form that `take` accepts. A store that rounds has the first ``used`` of them as it
        stores them, so that `take` does not round them again.

        Tokens of a pool are copies, which stay valid when slots are overwritten. Others may be views of the slots.

        Args:
            slots: what `beside` has returned, or the slots.
            used: the number of slots among the tokens; they come first.
        """
        return Tokens.new(slots.keys, slots.values)

    def take(self, tokens: Tokens, positions: Int[Tensor, "B Hk n"], order: Int[Tensor, "B Hk n"]) -> None:
        """Overwrite the slots with the tokens at these indices. The other slots become empty.

        Args:
            tokens: what `tokens` has returned.
            positions: positions of the tokens in their new slots.
            order: the tokens' indices in ``tokens``, in the order of their new slots.
        """
        found = tokens.chosen(order).held.tensors
        self.fill(found["keys"], found["values"], positions)

    @abc.abstractmethod
    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values have this store's rows, heads, head dims, dtype and device."""

    def check_fit(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> None:
        """Refuse tokens of another shape, dtype or device.

        Raises:
            ShapeError: the tensors do not fit the store.
        """
        if not self.fits(keys, values):
            held = self.slots().keys
            raise ShapeError(
                f"The cache holds (rows, KV heads, slots, head dim) = {tuple(held.shape)} in {held.dtype} and was "
                f"given {tuple(keys.shape)} in {keys.dtype}. One cache serves one model and one batch: make a new one "
                "for another, or call reset() first."
            )

    @abc.abstractmethod
    def wider(self, capacity: int) -> Store:
        """Return an empty store of ``capacity`` slots per head, for the same rows."""

    def widened(self, capacity: int) -> Store:
        """Return a store with the same content and more slots: ``capacity`` of them."""
        wide = self.wider(capacity)
        wide.fill(*self.slots())
        return wide

    @abc.abstractmethod
    def per_row(self) -> dict[str, Tensor]:
        """Return every tensor of the store by name. The first axis of each tensor is the rows."""

    def per_slot(self) -> tuple[str, ...]:
        """Return the names of the tensors of `per_row` whose third axis is the slots. The others belong to rows as a
        whole, and are copied whole.
        """
        return ()

    @abc.abstractmethod
    def over(self, tensors: Mapping[str, Tensor]) -> Store:
        """Return a store of the same kind over other tensors, named as in `per_row`."""


def by_bits(kind: type[_S]) -> dict[str, type[_S]]:
    """Return a subclass of a store for each setting of bits, by the names of `kvkeep.kv_bits.KV_BITS`."""
    return {
        name: cast(type[_S], type(f"{kind.__name__}_{name}", (kind,), {"bits": bits})) for name, bits in KV_BITS.items()
    }


def inference(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method so that it runs outside of autograd and of inference mode.

    Autograd's graph would keep every past step alive. Tensors that are made in ``torch.inference_mode`` cannot be
    written outside of it, and slots are made and written in place in both modes.
    """

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)  # nothing to switch; entering the contexts takes longer than an eviction
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapper


# The default store: slots in the model's dtype, written in place and moved only at the end of a prompt chunk.


class DenseStore(Store):
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head.

    The layout is drawn in ``docs/layouts.md``. The tensors are never replaced, so their storage pointers stay the same
    for the life of the store, unless the number of rows changes.

    Attributes:
        keys: ``(B, Hk, capacity, D)``.
        values: ``(B, Hk, capacity, E)``.
        positions: true positions, ``-1`` = empty.
    """

    keys: Float[Tensor, "B Hk capacity D"]
    values: Float[Tensor, "B Hk capacity E"]
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        B, Hk, _, D = like_keys.shape
        self.keys = like_keys.new_zeros((B, Hk, capacity, D))
        self.values = like_values.new_zeros((B, Hk, capacity, like_values.shape[-1]))
        self.positions = torch.full((B, Hk, capacity), EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all heads, in the model's dtype."""
        per_head = sum(x.shape[-1] * x.element_size() for x in (self.keys, self.values))
        return per_head * self.positions.shape[1]

    def slots(self) -> Slots:
        """Return keys, values and positions of all slots, not copied."""
        return Slots(self.keys, self.values, self.positions)

    def lying(self, used: int) -> Slots | None:
        """Return the first ``used`` slots without a copy, or ``None`` if they are not in main memory."""
        if not self.positions.is_cpu:
            return None
        return Slots(self.keys[:, :, :used], self.values[:, :, :used], self.positions[:, :, :used])

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        n = positions.shape[-1]
        self.keys[:, :, :n] = keys
        self.values[:, :, :n] = values
        self.positions[:, :, :n] = positions
        self.positions[:, :, n:] = EMPTY

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        empty = (self.positions[:, :, :used] < 0)[..., None]
        found = [torch.cat([self.keys[:, :, :used], keys], dim=2), torch.cat([self.values[:, :, :used], values], dim=2)]
        for tensor in found:
            tensor[:, :, :used].masked_fill_(empty, 0.0)
        return found[0], found[1]

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values have this store's rows, heads, head dims, dtype and device."""
        return all(
            (new.shape[:2], new.shape[3], new.dtype, new.device)
            == (held.shape[:2], held.shape[3], held.dtype, held.device)
            for new, held in ((keys, self.keys), (values, self.values))
        )

    def wider(self, capacity: int) -> DenseStore:
        """Return an empty store of ``capacity`` slots per head, for the same rows."""
        return DenseStore(self.keys, self.values, capacity)

    def per_row(self) -> dict[str, Tensor]:
        """Return every tensor of the store by name. The first axis of each tensor is the rows."""
        return {"keys": self.keys, "values": self.values, "positions": self.positions}

    def per_slot(self) -> tuple[str, ...]:
        """Return the names of all tensors, since each has one entry per slot."""
        return ("keys", "values", "positions")

    def over(self, tensors: Mapping[str, Tensor]) -> DenseStore:
        """Return a dense store over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other.keys, other.values, other.positions = (tensors[name] for name in ("keys", "values", "positions"))
        return other


# Stores whose slots hold 8 or 4 bits per number, see `kvkeep.kv.slot_codec`. A token is coded once and never again.


class QuantizedStore(Store):
    """Codes of keys and values, scales and positions of one layer, ``capacity`` slots per row and KV head.

    ``docs/quantised.md`` draws the layout. A token with NaN or an infinity in a head leaves its slot empty there.

    Attributes:
        vectors: codes of keys and values, and scales, ``(B, Hk, capacity, ...)``; what is done to keys before.
        positions: true positions, ``-1`` = empty.
    """

    bits: tuple[int, int]
    vectors: Vectors
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        self._slots: CodedSlots | None = None  # set while a step works on the store, see `opened`
        blank = Vectors.blank(like_keys, like_values, capacity, self.bits)
        self.vectors = replace(blank, transform=KeyTransform.blank(like_keys, self.bits))
        shape = (*like_keys.shape[:2], capacity)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all heads, in the model's dtype."""
        return self.positions.shape[1] * self.vectors.token_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype."""
        return self.vectors.dtypes[0]

    def opened(self) -> QuantizedStore:
        """Return the store for a step. Its `slots` is one object, so that decoded copies are made once per step."""
        other = copy.copy(self)
        other._slots = self.slots()
        return other

    def slots(self) -> CodedSlots:
        """Return all slots, quantized as they are and not copied; of an opened store the same object at every call."""
        if self._slots is not None:
            return self._slots
        found = self.vectors.slots(self.positions)
        assert isinstance(found, CodedSlots)
        return found

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Quantize ``n <= capacity`` tokens into the first slots. The other slots become empty."""
        order = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
        self.take(Tokens.new(keys, values, self.bits, self.vectors.transform), positions, order)

    def tokens(self, slots: Slots | View, *, used: int) -> Tokens:
        """Return tokens for `take`, see `Store.tokens`. The first ``used`` are views of the quantized vectors: take
        them before the slots are overwritten.
        """
        held = self._first(used)
        if slots.positions.shape[2] == used:  # no new token; a look at `slots.keys` would decode all slots
            return Tokens(held, *self.no_token())
        return Tokens(held, slots.keys[:, :, used:], slots.values[:, :, used:])

    def take(self, tokens: Tokens, positions: Int[Tensor, "B Hk n"], order: Int[Tensor, "B Hk n"]) -> None:
        """Replace the content with some of the tokens, see `Store.take`.

        Those that lie in slots are moved without another rounding.
        """
        n, found = positions.shape[-1], tokens.chosen(order)
        for name, content in found.held.tensors.items():
            self.vectors.tensors[name][:, :, :n] = content
        self.positions[:, :, :n] = positions if found.usable is None else positions.masked_fill(~found.usable, EMPTY)
        self.positions[:, :, n:] = EMPTY

    def _first(self, used: int) -> Vectors:
        """Return views of the first ``used`` slots."""
        return self.vectors.each(lambda x: x[:, :, :used])

    def no_token(self) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Return keys and values of no token. The quantized vectors are not read."""
        return self.vectors.no_token(*self.positions.shape[:2])

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return copies of the first ``used`` slots, decoded, followed by new tokens. Empty slots are set to 0."""
        return self._first(used).beside(self.positions[:, :, :used], keys, values)

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values fit this store's rows, heads, head dims, device and the model's dtype."""
        shape = self.positions.shape[:2]
        return keys.shape[:2] == values.shape[:2] == shape and self.vectors.fit(keys, values)

    def wider(self, capacity: int) -> QuantizedStore:
        """Return an empty store of ``capacity`` slots per head, for the same rows, with the same transform of keys."""
        wide = type(self)(*self.no_token(), capacity)
        wide.vectors = replace(wide.vectors, transform=self.vectors.transform)
        return wide

    def widened(self, capacity: int) -> QuantizedStore:
        """Return a store with more slots and the same content. Nothing is rounded again."""
        wide = self.wider(capacity)
        mine, others = self.per_row(), wide.per_row()
        for name in self.per_slot():
            others[name][:, :, : self.capacity] = mine[name]
        return wide

    def per_row(self) -> dict[str, Tensor]:
        """Return every tensor of the store by name. The first axis of each tensor is the rows."""
        return {**self.vectors.tensors, **self.vectors.of_rows, "positions": self.positions}

    def per_slot(self) -> tuple[str, ...]:
        """Return the names of the tensors with one entry per slot: all but those of the keys' transform."""
        return (*self.vectors.tensors, "positions")

    def over(self, tensors: Mapping[str, Tensor]) -> QuantizedStore:
        """Return a store of the same kind over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        # the slots are a cached view of the old tensors
        other._slots, other.vectors, other.positions = None, self.vectors.over(tensors), tensors["positions"]
        return other


QUANTIZED = by_bits(QuantizedStore)
"""The stores by the name of the setting, see `kvkeep.kv_bits.check_bits`."""

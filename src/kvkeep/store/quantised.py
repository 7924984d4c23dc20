"""Stores whose slots hold 8 or 4 bits per number, see `kvkeep.codes`. A token is coded once and never again."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.codes import CodedSlots
from kvkeep.store.protocol import Store, by_bits
from kvkeep.types import EMPTY, Slots, View
from kvkeep.vectors import Tokens, Vectors


class QuantisedStore(Store):
    """Codes of keys and values, scales and positions of one layer, ``capacity`` slots per row and KV head.

    ``docs/quantised.md`` draws the layout. A token with NaN or an infinity in a head leaves its slot empty there.

    Attributes:
        vectors: codes of keys and values, and scales, ``(B, Hk, capacity, ...)``.
        positions: true positions, ``-1`` = empty.
    """

    bits: tuple[int, int]
    vectors: Vectors
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        self._slots: CodedSlots | None = None
        self.vectors = Vectors.blank(like_keys, like_values, capacity, self.bits)
        shape = (*like_keys.shape[:2], capacity)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads, in the model's dtype."""
        return self.positions.shape[1] * self.vectors.token_bytes

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.vectors.dtypes[0]

    def opened(self) -> QuantisedStore:
        """The store during a step: `slots` is always the same object, which remembers copies of its content."""
        other = copy.copy(self)
        other._slots = self.slots()
        return other

    def slots(self) -> CodedSlots:
        """The slots, which hold codes."""
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
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        order = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
        self.take(Tokens.new(keys, values, self.bits), positions, order)

    def tokens(self, slots: Slots | View, *, used: int) -> Tokens:
        """See `Store.tokens`."""
        held = self._first(used)
        if slots.positions.shape[2] == used:
            return Tokens(held, *self.no_token())
        return Tokens(held, slots.keys[:, :, used:], slots.values[:, :, used:])

    def take(self, tokens: Tokens, positions: Int[Tensor, "B Hk n"], order: Int[Tensor, "B Hk n"]) -> None:
        """See `Store.take`. The codes of tokens that lie in slots are moved as they are."""
        n, found = positions.shape[-1], tokens.chosen(order)
        for name, content in found.held.tensors.items():
            self.vectors.tensors[name][:, :, :n] = content
        self.positions[:, :, :n] = positions if found.usable is None else positions.masked_fill(~found.usable, EMPTY)
        self.positions[:, :, n:] = EMPTY

    def _first(self, used: int) -> Vectors:
        """The content of the first slots."""
        return self.vectors.each(lambda x: x[:, :, :used])

    def no_token(self) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Keys and values of no token. The codes are not read."""
        return self.vectors.no_token(*self.positions.shape[:2])

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        return self._first(used).beside(self.positions[:, :, :used], keys, values)

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, device, and the model's dtype."""
        shape = self.positions.shape[:2]
        return keys.shape[:2] == values.shape[:2] == shape and self.vectors.fit(keys, values)

    def wider(self, capacity: int) -> QuantisedStore:
        """An empty store with more slots, for the same rows."""
        return type(self)(*self.no_token(), capacity)

    def widened(self, capacity: int) -> QuantisedStore:
        """See `Store.widened`. The codes stay as they are."""
        wide = self.wider(capacity)
        mine, others = self.per_row(), wide.per_row()
        for name, content in mine.items():
            others[name][:, :, : self.capacity] = content
        return wide

    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the store by name. The first axis of each tensor is the rows."""
        return {**self.vectors.tensors, "positions": self.positions}

    def per_slot(self) -> tuple[str, ...]:
        """All tensors: they have one entry per slot."""
        return tuple(self.per_row())

    def over(self, tensors: Mapping[str, Tensor]) -> QuantisedStore:
        """A store of the same kind over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other._slots, other.vectors, other.positions = None, self.vectors.over(tensors), tensors["positions"]
        return other


QUANTISED = by_bits(QuantisedStore)
"""The stores by the name of the setting, see `kvkeep.codes.check_bits`."""

"""Stores whose slots hold 8 or 4 bits per number, see `kvkeep.codes`. A token is coded once and never again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.codes import KV_BITS, CodedSlots, Codes, blank, encode, encode_keys
from kvkeep.store.protocol import Store
from kvkeep.types import EMPTY

_CODED = ("keys", "key_scales", "values", "value_scales")


class QuantisedStore(Store):
    """Codes of keys and values, scales and positions of one layer, ``capacity`` slots per row and KV head.

    ``docs/quantised.md`` draws the layout. A token with NaN or an infinity in a head leaves its slot empty there.

    Attributes:
        bits: bits of a key's numbers and of a value's; each subclass has its own.
        keys: codes of the keys after `kvkeep.codes.hadamard`.
        key_scales: one per group of channels.
        values: codes of the values.
        value_scales: one per group of channels.
        positions: true positions, ``-1`` = empty.
    """

    bits: ClassVar[tuple[int, int]]
    keys: Int[Tensor, "B Hk capacity _"]
    key_scales: Float[Tensor, "B Hk capacity _"]
    values: Int[Tensor, "B Hk capacity _"]
    value_scales: Float[Tensor, "B Hk capacity _"]
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        self._dtypes = like_keys.dtype, like_values.dtype
        self._slots: CodedSlots | None = None
        self.keys, self.key_scales, _ = blank(like_keys, capacity, self.bits[0])
        self.values, self.value_scales, _ = blank(like_values, capacity, self.bits[1])
        shape = (*like_keys.shape[:2], capacity)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=like_keys.device)

    @classmethod
    def like(
        cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """See `Store.like`."""
        keys, values = (
            x.new_empty((*x.shape[:2], 0, x.shape[-1] * 8 // bits), dtype=dtype)
            for x, bits in zip((tensors["keys"], tensors["values"]), cls.bits, strict=True)
        )
        return keys, values

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads, in the model's dtype."""
        pairs = zip(self._codes(), self._dtypes, strict=True)
        return self.positions.shape[1] * sum(codes.dim * dtype.itemsize for codes, dtype in pairs)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self._dtypes[0]

    def _codes(self, used: int | None = None) -> tuple[Codes, Codes]:
        """The codes of the first slots, or of all."""
        keys, key_scales, values, value_scales = (getattr(self, name)[:, :, :used] for name in _CODED)
        return Codes(keys, key_scales, self.bits[0]), Codes(values, value_scales, self.bits[1])

    def opened(self) -> QuantisedStore:
        """The store during a step: `slots` is always the same object, which remembers copies of its content."""
        other = copy.copy(self)
        other._slots = self.slots()
        return other

    def slots(self) -> CodedSlots:
        """The slots, which hold codes."""
        return self._slots or CodedSlots.of(*self._codes(), self.positions, self.dtype)

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        order = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
        self.take(keys, values, positions, order, held=0)

    def take(
        self,
        keys: Float[Tensor, "B Hk S D"],
        values: Float[Tensor, "B Hk S E"],
        positions: Int[Tensor, "B Hk n"],
        order: Int[Tensor, "B Hk n"],
        *,
        held: int,
    ) -> None:
        """See `Store.take`. The codes of tokens that lie in slots are moved as they are."""
        n = positions.shape[-1]
        real = torch.ones_like(order, dtype=torch.bool)
        found: list[Tensor] = []
        for x, codes, code in zip((keys, values), self._codes(held), (encode_keys, encode), strict=True):
            if x.shape[2] == held:
                found += (_gathered(part, order) for part in codes[:2])
                continue
            new = _gathered(x[:, :, held:], order - held)
            real &= new.isfinite().all(dim=-1) | (order < held)
            found += (_either(*pair, order, held) for pair in zip(codes[:2], code(new, codes.bits)[:2], strict=True))
        for name, content in zip(_CODED, found, strict=True):
            getattr(self, name)[:, :, :n] = content
        self.positions[:, :, :n] = positions.masked_fill(~real, EMPTY)
        self.positions[:, :, n:] = EMPTY

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        empty = (self.positions[:, :, :used] < 0)[..., None]
        held = CodedSlots.of(*self._codes(used), self.positions[:, :, :used], self.dtype)
        pairs = (held.keys, keys), (held.values, values)
        found = [torch.cat([old.masked_fill(empty, 0.0), new], dim=2) for old, new in pairs]
        return found[0], found[1]

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, device, and the model's dtype."""
        return all(
            (new.shape[:2], new.shape[3], new.dtype, new.device)
            == (self.positions.shape[:2], codes.dim, dtype, self.positions.device)
            for new, codes, dtype in zip((keys, values), self._codes(), self._dtypes, strict=True)
        )

    def wider(self, capacity: int) -> QuantisedStore:
        """An empty store with more slots, for the same rows."""
        shape, device = (*self.positions.shape[:2], 0), self.positions.device
        keys, values = (
            torch.empty((*shape, codes.dim), dtype=dtype, device=device)
            for codes, dtype in zip(self._codes(), self._dtypes, strict=True)
        )
        return type(self)(keys, values, capacity)

    def widened(self, capacity: int) -> QuantisedStore:
        """See `Store.widened`. The codes stay as they are."""
        wide = self.wider(capacity)
        for name, content in self.per_row().items():
            getattr(wide, name)[:, :, : self.capacity] = content
        return wide

    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the store by name. The first axis of each tensor is the rows."""
        return {name: getattr(self, name) for name in (*_CODED, "positions")}

    def per_slot(self) -> tuple[str, ...]:
        """All tensors: they have one entry per slot."""
        return (*_CODED, "positions")

    def over(self, tensors: Mapping[str, Tensor]) -> QuantisedStore:
        """A store of the same kind over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other._slots = None
        for name in self.per_row():
            setattr(other, name, tensors[name])
        return other


class Store8(QuantisedStore):
    """Keys and values in 8 bits."""

    bits = KV_BITS["8"]


class Store4(QuantisedStore):
    """Keys and values in 4 bits."""

    bits = KV_BITS["4"]


class Store8And4(QuantisedStore):
    """Keys in 8 bits, values in 4."""

    bits = KV_BITS["k8v4"]


QUANTISED: dict[str, type[QuantisedStore]] = {"8": Store8, "4": Store4, "k8v4": Store8And4}
"""The stores by the name of the setting, see `kvkeep.codes.check_bits`."""


def _gathered(x: Tensor, order: Int[Tensor, "B Hk n"]) -> Tensor:
    """Vectors of some tokens, ``(B, Hk, n, ...)``. Numbers outside of the tokens name any token."""
    index = order.clamp(0, x.shape[2] - 1)[..., None]
    return x.gather(2, index.expand(*order.shape, x.shape[-1]))


def _either(old: Tensor, new: Tensor, order: Int[Tensor, "B Hk n"], held: int) -> Tensor:
    """The content of slots that are moved, where a token's number is one of the slots held, or of new tokens."""
    return torch.where((order < held)[..., None], _gathered(old, order), new) if held else new

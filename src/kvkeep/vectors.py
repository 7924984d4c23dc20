"""Keys and values as a store holds them: in the model's dtype, or as codes and scales, over any axes of tokens.

Slots side by side and pools that heads share hold the same tensors, which are described here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.codes import CodedSlots, Codes, blank, encode, encode_keys, finite
from kvkeep.types import Slots

Bits: TypeAlias = tuple[int, int] | None
"""Bits of a key's numbers and of a value's, see `kvkeep.codes.KV_BITS`; ``None``: both have the model's dtype."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Keys and values of tokens in the tensors in which they are stored.

    All tensors have the same axes of tokens. The last axis has the channels, or what stands for them.

    Attributes:
        tensors: ``keys`` and ``values``; if they are codes (keys after `kvkeep.codes.hadamard`), ``key_scales`` and
            ``value_scales`` as well.
        dtypes: the model's dtypes of keys and values.
        bits: bits of keys and values.
    """

    tensors: Mapping[str, Tensor]
    dtypes: tuple[torch.dtype, torch.dtype]
    bits: Bits = None

    @classmethod
    def blank(
        cls, like_keys: Float[Tensor, "*B _ D"], like_values: Float[Tensor, "*B _ E"], n: int, bits: Bits
    ) -> Vectors:
        """Zeros for ``n`` tokens in each place of the leading axes, for keys and values like these.

        Raises:
            UnsupportedModelError: the head dim cannot be packed.
        """
        dtypes = like_keys.dtype, like_values.dtype
        if bits is None:
            keys, values = (x.new_zeros((*x.shape[:-2], n, x.shape[-1])) for x in (like_keys, like_values))
            return cls({"keys": keys, "values": values}, dtypes)
        return cls(_named(blank(like_keys, n, bits[0]), blank(like_values, n, bits[1])), dtypes, bits)

    @classmethod
    def of(
        cls, keys: Float[Tensor, "B Hk n D"], values: Float[Tensor, "B Hk n E"], bits: Bits
    ) -> tuple[Vectors, Bool[Tensor, "B Hk n"] | None]:
        """New tokens as they are stored, and which may take a slot, see `kvkeep.codes.finite`; ``None``: all."""
        dtypes = keys.dtype, values.dtype
        if bits is None:
            return cls({"keys": keys, "values": values}, dtypes), None
        return cls(_named(encode_keys(keys, bits[0]), encode(values, bits[1])), dtypes, bits), finite(keys, values)

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        keys, values = self.tensors["keys"].shape[-1], self.tensors["values"].shape[-1]
        return (keys, values) if self.bits is None else (keys * 8 // self.bits[0], values * 8 // self.bits[1])

    @property
    def token_bytes(self) -> int:
        """Bytes of a key and a value in the model's dtype."""
        return sum(dim * dtype.itemsize for dim, dtype in zip(self.dims, self.dtypes, strict=True))

    def fit(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have these head dims, the model's dtypes, and this device."""
        device = self.tensors["keys"].device
        return all(
            (new.shape[-1], new.dtype, new.device) == (dim, dtype, device)
            for new, dim, dtype in zip((keys, values), self.dims, self.dtypes, strict=True)
        )

    def no_token(self, rows: int, heads: int) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Keys and values of no token in the model's dtype."""
        like = self.tensors["keys"]
        pairs = zip(self.dims, self.dtypes, strict=True)
        keys, values = (like.new_empty((rows, heads, 0, dim), dtype=dtype) for dim, dtype in pairs)
        return keys, values

    def over(self, tensors: Mapping[str, Tensor]) -> Vectors:
        """The same kind of vectors in other tensors, named as in ``tensors``. Other names are left out."""
        return replace(self, tensors={name: tensors[name] for name in self.tensors})

    def each(self, change: Callable[[Tensor], Tensor]) -> Vectors:
        """The same kind of vectors after a change of every tensor."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    def slots(self, positions: Int[Tensor, "B Hk S"]) -> Slots:
        """The vectors as slots, where they lie side by side: `kvkeep.codes.CodedSlots` if they are codes."""
        keys, values = self.tensors["keys"], self.tensors["values"]
        if self.bits is None:
            return Slots(keys, values, positions)
        codes = Codes(keys, self.tensors["key_scales"], self.bits[0])
        return CodedSlots.of(
            codes, Codes(values, self.tensors["value_scales"], self.bits[1]), positions, self.dtypes[0]
        )

    def beside(
        self, positions: Int[Tensor, "B Hk n"], keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the vectors of slots with these positions, followed by new tokens. Empty slots are set to 0."""
        held, empty = self.slots(positions), (positions < 0)[..., None]
        found = [torch.cat([old, new], dim=2) for old, new in ((held.keys, keys), (held.values, values))]
        for joined in found:
            joined[:, :, : empty.shape[2]].masked_fill_(empty, 0.0)
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens on their way into slots: some that lie in slots already, followed by new ones.

    The former are moved as they are. A store that rounds would otherwise round them again.

    Attributes:
        held: the former, side by side, as their store holds them.
        keys: keys of the new ones.
        values: values of the new ones.
        usable: which of the former may take a slot; ``None``: all.
    """

    held: Vectors
    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n E"]
    usable: Bool[Tensor, "B Hk m"] | None = None

    @classmethod
    def new(cls, keys: Float[Tensor, "B Hk n D"], values: Float[Tensor, "B Hk n E"], bits: Bits = None) -> Tokens:
        """Tokens of which none lies in slots."""
        return cls(Vectors.of(keys[:, :, :0], values[:, :, :0], bits)[0], keys, values)

    def apart(self) -> Tokens:
        """The same tokens. If others lie in slots, the new ones are copied: they may be views of memory for all."""
        if not self.held.tensors["keys"].shape[2]:
            return self
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def chosen(self, order: Int[Tensor, "B Hk n"]) -> Tokens:
        """Some of the tokens, in this order and as a store holds them, so that none is new."""
        n = self.held.tensors["keys"].shape[2]
        if not self.keys.shape[2]:
            usable = None if self.usable is None else self.usable.gather(-1, order)
            return replace(self, held=self.held.each(lambda held: _gathered(held, order)), usable=usable)
        keys, values = (_gathered(x, order - n) for x in (self.keys, self.values))
        found, usable = Vectors.of(keys, values, self.held.bits)
        if n:
            old, held = order < n, self.held.tensors
            found = found.over(
                {
                    name: torch.where(old[..., None], _gathered(held[name], order), x)
                    for name, x in found.tensors.items()
                }
            )
            usable = None if usable is None else usable | old
        return Tokens(found, keys[:, :, :0], values[:, :, :0], usable)


def _named(keys: Codes, values: Codes) -> dict[str, Tensor]:
    """The tensors of codes by name."""
    return {
        "keys": keys.numbers,
        "key_scales": keys.scales,
        "values": values.numbers,
        "value_scales": values.scales,
    }


def _gathered(x: Tensor, order: Int[Tensor, "B Hk n"]) -> Tensor:
    """Vectors of some tokens, ``(B, Hk, n, ...)``. A number that names no token gives the first or the last one."""
    B, Hk, S = x.shape[:3]
    rows, heads = (torch.arange(n, device=x.device) for n in (B, Hk))
    return x[rows[:, None, None], heads[:, None], order.clamp(0, S - 1)]  # copies vectors; `gather` copies numbers

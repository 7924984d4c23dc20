"""Slots that a backend may read where they lie, and of which everybody else gets copies side by side."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8, UInt8
from torch import Tensor

from kvkeep.kv_bits import EXPONENTS, HALVES, SCALED, TRANSFORMS, Bits, check_dim, group_size, n_normals, scale_halves
from kvkeep.types import Slots, View


class LazySlots(Slots):
    """Slots whose keys and values lie in memory in another form. Copies are made when they are first read."""

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """Return a copy of the keys."""
        return self.copy_keys()

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """Return a copy of the values."""
        return self.copy_values()

    @abc.abstractmethod
    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""

    @abc.abstractmethod
    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""

    @abc.abstractmethod
    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"] | None:
        """Write the key and value of one token of each head into the given slots. Positions are left to the caller.

        Return which heads can use their token; ``None``: all can.
        """

    # the tuple itself holds stand-ins (see `nothing`), so what reads its items gets copies

    def __iter__(self) -> Any:
        return iter(self.copied())

    def __getitem__(self, item: Any) -> Any:
        return self.copied()[item]

    def _replace(self, **changes: Any) -> Slots:  # type: ignore[override]  # copies, no longer of this class
        return self.copied()._replace(**changes)

    def copied(self) -> Slots:
        """Return the same slots as copies side by side."""
        return Slots(self.keys, self.values, self.positions)

    def forget(self) -> None:
        """Drop the copies, because the slots have changed."""
        vars(self).pop("keys", None)
        vars(self).pop("values", None)


class LazyView(View):
    """A view of such slots. Keys and values are copied when the policy first looks at them."""

    _slots: LazySlots

    @classmethod
    def of(cls, slots: LazySlots, **others: Any) -> LazyView:
        """Return a view of these slots, whose keys and values are copied only when a policy reads them.

        Args:
            slots: the slots.
            others: the other attributes of `View`.
        """
        view = cls(slots.positions, *nothing(slots.positions), **others)
        own = vars(view)
        # then the cached properties decode them, but only for a policy that looks at them
        del own["keys"], own["values"]
        own["_slots"] = slots
        return view

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """Return a copy of the keys."""
        return self._slots.keys

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """Return a copy of the values."""
        return self._slots.values


def nothing(positions: Int[Tensor, "B Hk S"]) -> tuple[Tensor, Tensor]:
    """Return stand-ins for keys and values of these slots, with no channels, for constructors that need some and never
    read them.
    """
    empty = positions.new_empty((*positions.shape, 0), dtype=torch.float32)
    return empty, empty


# Keys and values in 8 or 4 bits per number: the codes, and slots that hold them.
#
# Each token has one scale (at 4 bits and one offset) for a group of channels, so that a slot is overwritten in place
# without a look at its neighbours. Keys are transformed before they are coded (`KeyTransform`): at all bits by a
# Hadamard matrix, at 4 bits also channel by channel before it and by reflections behind it. ``docs/quantised.md`` says
# why, and draws the layout.

CODES = {8: (-127, 127), 4: (0, 15)}
"""The least and the greatest code by number of bits."""

NUMBERS = {8: torch.int8, 4: torch.uint8}
"""The dtype of a vector's numbers."""

_LARGEST_HALF = torch.finfo(torch.float16).max


class Codes(NamedTuple):
    """Vectors as whole numbers: channel = number * scale, and at 4 bits + offset, both of the channel's group.

    Attributes:
        numbers: at 8 bits one number per channel. At 4 bits two numbers, 0 to 15, per byte: byte ``i`` of a group of
            ``g`` channels holds channel ``i`` in its low half and channel ``g / 2 + i`` in its high half.
        scales: the scale of each group of channels; at 4 bits its offset follows it.
        bits: 8 or 4.
    """

    numbers: Int8[Tensor, "B Hk S D"] | UInt8[Tensor, "B Hk S half_D"]
    scales: Float[Tensor, "B Hk S halves"]
    bits: int

    @property
    def dim(self) -> int:
        """Return the number of channels of a vector."""
        return self.numbers.shape[-1] * (8 // self.bits)

    @property
    def group(self) -> int:
        """Return the number of channels that share a scale."""
        return self.dim * HALVES[self.bits] // self.scales.shape[-1]


def encode(x: Float[Tensor, "*B D"], bits: int) -> Codes:
    """Quantize vectors in groups of channels. A group that holds NaN or an infinity becomes zeros.

    In float32: at 8 bits ``scale = float16(max |x| / 127)`` and the offset is 0. At 4 bits ``offset = float16(min x)``
    and ``scale = float16((max x - offset) / 15)``. Both are limited to finite float16, and a scale is never negative.
    ``code = round((x - offset) / scale)`` with halves to even, limited to the least and the greatest code. A scale of 0
    has codes 0.

    Args:
        x: vectors. At 4 bits their length must be even.
        bits: 8 or 4.
    """
    (least, greatest), grouped = CODES[bits], x.float().unflatten(-1, (-1, group_size(x.shape[-1])))
    grouped = grouped.masked_fill(~grouped.isfinite().all(dim=-1, keepdim=True), 0.0)
    if bits == 8:
        offsets, spread = None, grouped.abs().amax(dim=-1, keepdim=True)
    else:
        # - 0.0 + 0.0 = 0.0: the offset of a group of zeros has one sign
        offsets = (grouped.amin(dim=-1, keepdim=True) + 0.0).clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
        spread = grouped.amax(dim=-1, keepdim=True) - offsets.float()
        grouped = grouped - offsets.float()
    scales = ((spread / greatest).clamp(0.0, _LARGEST_HALF) + 0.0).half()  # never - 0.0, see above
    # clamped, since half precision may have rounded a scale down; a scale of 0 has made NaN of 0 / 0
    numbers = (grouped / scales.float()).round().clamp(least, greatest).masked_fill(scales == 0, 0.0)
    if offsets is None:
        return Codes(numbers.to(torch.int8).flatten(-2), scales.squeeze(-1), bits)
    low, high = numbers.to(torch.uint8).chunk(2, dim=-1)
    return Codes((low | (high << 4)).flatten(-2), torch.cat([scales, offsets], dim=-1).flatten(-2), bits)


class KeyTransform(NamedTuple):
    """What is done to a key before it is coded, and to a query before it meets coded keys; it changes no product.

    1. Each channel of a key is divided by a power of two, and that of a query multiplied with it. So channels of which
       queries make little take little of the codes' range.
    2. Both are multiplied with `hadamard`, which spreads single large channels over their block.
    3. Both are reflected, so that the direction in which most of the head's keys lie becomes one in which all channels
       of a group are alike. What keys have of it is in their groups' offsets then, and takes nothing of the range.

    Attributes:
        exponents: of the powers of two; ``None``: all are 0.
        normals: of the reflections, one after the other: ``x - normal * (normal · x)``. The square of a normal is 2, or
            0, which leaves vectors as they are. ``None``: there are none.
    """

    exponents: Int8[Tensor, "B Hk D"] | None = None
    normals: Float[Tensor, "B Hk n D"] | None = None

    @classmethod
    def blank(cls, like: Float[Tensor, "B Hk _ D"], bits: Bits) -> KeyTransform:
        """Return exponents and normals of 0 for keys like these if they have 4 bits. Keys of more bits do without."""
        if bits is None or bits[0] != SCALED:
            return cls()
        (B, Hk, _, D), n = like.shape, n_normals(like.shape[3])
        zeros = like.new_zeros((B, Hk, D), dtype=torch.int8)
        return cls(zeros, like.new_zeros((B, Hk, n, D), dtype=torch.float32))

    @property
    def of_rows(self) -> dict[str, Tensor]:
        """Return the exponents and the normals by their names in a store; without those that are ``None``."""
        named = zip(TRANSFORMS, self, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    def keys(self, keys: Float[Tensor, "B Hk n D"]) -> Float[Tensor, "B Hk n D"]:
        """Return keys after the three steps of the transform, in float32: what is coded. No code is made yet."""
        return self.reflected(hadamard(self.scaled(keys.float(), -1)))

    def restored(self, keys: Float[Tensor, "B Hk n D"]) -> Float[Tensor, "B Hk n D"]:
        """Undo `keys`: return keys as they were before the transform, in float32."""
        return self.scaled(hadamard(self.reflected(keys.float(), back=True)), 1)

    def query(self, query: Float[Tensor, "B Hq T D"]) -> Float[Tensor, "B Hq T D"]:
        """Return queries whose products with transformed keys are those of the given ones with the keys as they were;
        in the dtype of the given ones.
        """
        return self.reflected(hadamard(self.scaled(query.float(), 1))).to(query.dtype)

    def scaled(self, x: Float[Tensor, "B H n D"], sign: int) -> Float[Tensor, "B H n D"]:
        """Return queries multiplied with the powers of two (``sign`` 1), or keys divided by them (-1). Without
        exponents return ``x`` itself.

        Query heads have the powers of their KV head.
        """
        if self.exponents is None:
            return x
        # a float32 by its bits: the exponent plus 127, from bit 23 on; pow and exp2 are not exact everywhere
        powers = ((127 + sign * self.exponents.int()) << 23).view(torch.float32)
        return x * powers.repeat_interleave(x.shape[1] // powers.shape[1], dim=1)[:, :, None]

    def reflected(self, x: Float[Tensor, "B H n D"], *, back: bool = False) -> Float[Tensor, "B H n D"]:
        """Return reflected keys or queries, in float32; ``back``: those that were reflected to the given ones. Without
        normals return ``x`` itself.

        Query heads have the normals of their KV head.
        """
        if self.normals is None:
            return x
        normals = self.normals.repeat_interleave(x.shape[1] // self.normals.shape[1], dim=1)
        each = normals[:, :, :, None].unbind(dim=2)
        for normal in reversed(each) if back else each:
            x = x - normal * _sum(normal * x)
        return x


_LANES = 16
"""Sums that the native kernel adds up side by side."""


def _sum(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B 1"]:
    """Return the sum of all channels of each vector, in one order, so that each implementation rounds alike: those of
    every 16th channel from the first to the last, and of these 16 the halves, ``a + b`` at distances 8, 4, 2 and 1.
    """
    missing = -x.shape[-1] % _LANES
    first, *others = (torch.nn.functional.pad(x, (0, missing)) if missing else x).split(_LANES, dim=-1)
    total: Tensor = functools.reduce(torch.add, others, first)
    while total.shape[-1] > 1:
        total = torch.add(*total.chunk(2, dim=-1))
    return total


_PLAIN = KeyTransform()


def encode_keys(keys: Float[Tensor, "B Hk n D"], bits: int, transform: KeyTransform = _PLAIN) -> Codes:
    """Transform keys by `KeyTransform.keys`, and return their codes in so many bits, see `encode`."""
    return encode(transform.keys(keys), bits)


def decode(codes: Codes, dtype: torch.dtype) -> Float[Tensor, "*B D"]:
    """Return the vectors that codes stand for, in a dtype, computed in float32. Transformed keys stay transformed."""
    halves = codes.scales.float().unflatten(-1, (-1, HALVES[codes.bits]))
    numbers = codes.numbers.unflatten(-1, (halves.shape[-2], -1))
    if codes.bits == 8:
        return _finite((numbers * halves).flatten(-2), dtype)
    numbers = torch.cat([numbers & 15, numbers >> 4], dim=-1)
    return _finite((numbers * halves[..., :1] + halves[..., 1:]).flatten(-2), dtype)


def _finite(x: Float[Tensor, "*B D"], dtype: torch.dtype) -> Float[Tensor, "*B D"]:
    """Cast decoded vectors to a dtype. In float16, what rounding has made too large becomes the largest finite
    number.
    """
    return x.clamp(-_LARGEST_HALF, _LARGEST_HALF).to(dtype) if dtype == torch.float16 else x.to(dtype)


def hadamard(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """Multiply vectors with an orthonormal, symmetric Hadamard matrix, which is its own inverse.

    The matrix has a block for each power of two in the head dim, the largest first: 80 = 64 + 16. Blocks are
    Sylvester's. The sums run in float32 by halves, ``(a + b, a - b)`` at distances 1, 2, 4 ..., and are multiplied with
    ``size ** -0.5`` at the end, so that each implementation rounds alike.

    Args:
        x: vectors; the result has their dtype.
    """
    turned = [_sylvester(part) for part in x.float().split(_powers(x.shape[-1]), dim=-1)]
    found: Tensor = turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)
    return found.to(x.dtype)


def _sylvester(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """Multiply vectors of a power-of-two length with Sylvester's Hadamard matrix."""
    size, distance = x.shape[-1], 1
    while distance < size:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        distance *= 2
    found: Tensor = x * size**-0.5
    return found


@functools.cache
def _powers(dim: int) -> list[int]:
    """Return the powers of two that add up to a number, the largest first."""
    return [1 << i for i in reversed(range(dim.bit_length())) if dim >> i & 1]


def blank(like: Float[Tensor, "*B _ D"], slots: int, bits: int) -> Codes:
    """Return codes of zeros for ``slots`` slots.

    Args:
        like: vectors that show channels, device, and the axes before the slots.
        slots: slots in each place of these axes.
        bits: 8 or 4.

    Raises:
        UnsupportedModelError: the head dim cannot be packed.
    """
    *rows, _, dim = like.shape
    check_dim(dim, bits)
    scales = like.new_zeros((*rows, slots, scale_halves(dim, bits)), dtype=torch.float16)
    return Codes(like.new_zeros((*rows, slots, dim * bits // 8), dtype=NUMBERS[bits]), scales, bits)


class CodedSlots(LazySlots):
    """Slots whose keys and values are codes.

    ``keys`` and ``values`` are copies in the model's dtype, keys turned back. Only `write` changes the codes.

    Attributes:
        coded_keys: codes of the keys after `transform`.
        coded_values: codes of the values.
        dtype: the model's dtype.
        transform: what was done to the keys.
    """

    coded_keys: Codes
    coded_values: Codes
    dtype: torch.dtype
    transform: KeyTransform

    @classmethod
    def of(
        cls,
        keys: Codes,
        values: Codes,
        positions: Int[Tensor, "B Hk S"],
        dtype: torch.dtype,
        transform: KeyTransform = _PLAIN,
    ) -> CodedSlots:
        """Return slots with these quantized keys and values.

        Args:
            keys: codes of the keys after ``transform``.
            values: codes of the values.
            positions: true positions.
            dtype: the model's dtype.
            transform: what was done to the keys.
        """
        made = cls(*nothing(positions), positions)
        made.coded_keys, made.coded_values, made.dtype, made.transform = keys, values, dtype, transform
        return made

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys as they were before ``transform``."""
        return _finite(self.transform.restored(decode(self.coded_keys, torch.float32)), self.dtype)

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return decode(self.coded_values, self.dtype)

    def transformed(self) -> Slots:
        """Return copies side by side in which the keys are as they were coded, for `KeyTransform.query`."""
        return Slots(decode(self.coded_keys, self.dtype), self.values, self.positions)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"]:
        """Quantize one token of each head into the given slots. Return which heads can use theirs, see `finite`."""
        self.forget()
        coded = encode_keys(keys, self.coded_keys.bits, self.transform), encode(values, self.coded_values.bits)
        for held, new in zip((self.coded_keys, self.coded_values), coded, strict=True):
            for target, content in zip(held[:2], new[:2], strict=True):  # the third field is the number of bits
                target.scatter_(2, slot[..., None].expand(content.shape), content)
        return finite(keys, values)


def finite(keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]) -> Bool[Tensor, "B Hk T"]:
    """Return whether each token can be stored in each head: quantized slots take no NaN and no infinity."""
    return (keys.isfinite().all(dim=-1)) & (values.isfinite().all(dim=-1))


# Keys and values as a store holds them: in the model's dtype, or as codes and scales, over any axes of tokens.
#
# Slots side by side and pools that heads share hold the same tensors, which are described here once.


@dataclass(frozen=True, eq=False)
class Vectors:
    """Keys and values of tokens in the tensors in which they are stored.

    All tensors have the same axes of tokens. The last axis has the channels, or what stands for them.

    Attributes:
        tensors: ``keys`` and ``values``; if they are codes (keys after ``transform``), ``key_scales`` and
            ``value_scales`` as well.
        dtypes: the model's dtypes of keys and values.
        bits: bits of keys and values.
        transform: what is done to keys before they are coded.
    """

    tensors: Mapping[str, Tensor]
    dtypes: tuple[torch.dtype, torch.dtype]
    bits: Bits = None
    transform: KeyTransform = _PLAIN

    @classmethod
    def blank(
        cls, like_keys: Float[Tensor, "*B _ D"], like_values: Float[Tensor, "*B _ E"], n: int, bits: Bits
    ) -> Vectors:
        """Return zeros for ``n`` tokens, in the form in which keys and values like these are stored: in their dtype, or
        as codes and scales. There is no transform yet.

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
        cls,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        bits: Bits,
        transform: KeyTransform = _PLAIN,
    ) -> tuple[Vectors, Bool[Tensor, "B Hk n"] | None]:
        """Return new tokens in their stored form (as they are without ``bits``, else coded, keys after ``transform``),
        and a mask of those that may take a slot, see `finite`; ``None``: all.
        """
        dtypes = keys.dtype, values.dtype
        if bits is None:
            return cls({"keys": keys, "values": values}, dtypes), None
        coded = _named(encode_keys(keys, bits[0], transform), encode(values, bits[1]))
        return cls(coded, dtypes, bits, transform), finite(keys, values)

    @property
    def dims(self) -> tuple[int, int]:
        """Return the number of channels of a key and of a value."""
        keys, values = self.tensors["keys"].shape[-1], self.tensors["values"].shape[-1]
        return (keys, values) if self.bits is None else (keys * 8 // self.bits[0], values * 8 // self.bits[1])

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one key and one value of one head in the model's dtype."""
        return sum(dim * dtype.itemsize for dim, dtype in zip(self.dims, self.dtypes, strict=True))

    def fit(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Return whether new keys and values have the head dims, the model's dtypes and the device of these vectors."""
        device = self.tensors["keys"].device
        return all(
            (new.shape[-1], new.dtype, new.device) == (dim, dtype, device)
            for new, dim, dtype in zip((keys, values), self.dims, self.dtypes, strict=True)
        )

    def no_token(self, rows: int, heads: int) -> tuple[Float[Tensor, "B Hk 0 D"], Float[Tensor, "B Hk 0 E"]]:
        """Return keys and values of no token in the model's dtype."""
        like = self.tensors["keys"]
        pairs = zip(self.dims, self.dtypes, strict=True)
        keys, values = (like.new_empty((rows, heads, 0, dim), dtype=dtype) for dim, dtype in pairs)
        return keys, values

    @property
    def of_rows(self) -> dict[str, Tensor]:
        """Return the tensors that belong to rows as a whole: those of ``transform``."""
        return self.transform.of_rows

    def over(self, tensors: Mapping[str, Tensor]) -> Vectors:
        """Return the same kind of vectors in other tensors, which are named as these vectors' own and those of
        `of_rows`.

        Other names are left out. Without the tensors of a transform the transform stays.
        """
        transform = KeyTransform(*map(tensors.get, TRANSFORMS)) if EXPONENTS in tensors else self.transform
        return replace(self, tensors={name: tensors[name] for name in self.tensors}, transform=transform)

    def each(self, change: Callable[[Tensor], Tensor]) -> Vectors:
        """Return the same kind of vectors with ``change`` applied to keys, values and scales; the transform stays."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    def slots(self, positions: Int[Tensor, "B Hk S"]) -> Slots:
        """Return these vectors with positions as slots, without a copy (as `CodedSlots` if they are quantized)."""
        keys, values = self.tensors["keys"], self.tensors["values"]
        if self.bits is None:
            return Slots(keys, values, positions)
        key_codes = Codes(keys, self.tensors["key_scales"], self.bits[0])
        value_codes = Codes(values, self.tensors["value_scales"], self.bits[1])
        return CodedSlots.of(key_codes, value_codes, positions, self.dtypes[0], self.transform)

    def beside(
        self, positions: Int[Tensor, "B Hk n"], keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Return keys and values: copies of these vectors, decoded if they are quantized, followed by new tokens.

        Where ``positions`` of these vectors are -1, the slots are empty, and the copies are 0.
        """
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
    def new(
        cls,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        bits: Bits = None,
        transform: KeyTransform = _PLAIN,
    ) -> Tokens:
        """Return new tokens, none of them in a slot yet. `chosen` will code them with ``bits`` and ``transform``."""
        return cls(Vectors.of(keys[:, :, :0], values[:, :, :0], bits, transform)[0], keys, values)

    def apart(self) -> Tokens:
        """Return the same tokens, the new ones with memory of their own. Without tokens from slots, return these tokens
        themselves.

        New ones may be views of a tensor that holds the decoded slots in front of them, and would keep all of it.
        """
        if not self.held.tensors["keys"].shape[2]:
            return self
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def chosen(self, order: Int[Tensor, "B Hk n"]) -> Tokens:
        """Return copies of the tokens at these indices, all as ``held`` and so in stored form, and which of them are
        usable. New ones are quantized if their store does; those from slots are moved without rounding.

        Args:
            order: indices that count the tokens from slots first, then the new ones.
        """
        n = self.held.tensors["keys"].shape[2]
        # no token is new, so codes are moved as they are
        if not self.keys.shape[2]:
            usable = None if self.usable is None else self.usable.gather(-1, order)
            return replace(self, held=self.held.each(lambda held: _gathered(held, order)), usable=usable)
        keys, values = (_gathered(x, order - n) for x in (self.keys, self.values))
        found, usable = Vectors.of(keys, values, self.held.bits, self.held.transform)
        if n:
            # held tokens keep their codes: a second rounding would change them
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
    """Return the tensors of quantized keys and values by name."""
    return {
        "keys": keys.numbers,
        "key_scales": keys.scales,
        "values": values.numbers,
        "value_scales": values.scales,
    }


def _gathered(x: Tensor, order: Int[Tensor, "B Hk n"]) -> Tensor:
    """Return the vectors of the tokens at these indices, ``(B, Hk, n, ...)``. An index out of range gives the first
    or the last token.
    """
    B, Hk, S = x.shape[:3]
    rows, heads = (torch.arange(n, device=x.device) for n in (B, Hk))
    return x[rows[:, None, None], heads[:, None], order.clamp(0, S - 1)]  # copies vectors; `gather` copies numbers


# Slots beside a chunk of a prompt. A kernel reads both where they lie; whoever needs them side by side gets a copy.


class Beside(LazySlots):
    """Slots where they lie, followed by new tokens. In the copies, keys and values of empty slots are 0.

    Attributes:
        held: the slots.
        new: the new tokens.
    """

    held: Slots
    new: Slots
    _first: Beside | None
    """The same slots with other positions, whose copies of keys and values serve this object too; see `at`."""

    @classmethod
    def of(cls, held: Slots, new: Slots, positions: Int[Tensor, "B Hk S"] | None = None) -> Beside:
        """Return slots with new tokens behind them.

        Args:
            held: the slots, which must not change as long as the object is used.
            new: the new tokens.
            positions: the positions of both; by default those of ``held`` and ``new``.
        """
        if positions is None:
            positions = torch.cat([held.positions, new.positions], dim=2)
        made = cls(*nothing(positions), positions)
        made.held, made.new, made._first = held, new, None
        return made

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""
        return self._first.keys if self._first else self._joined(self.held.keys, self.new.keys)

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return self._first.values if self._first else self._joined(self.held.values, self.new.values)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> None:
        """Raise `NotImplementedError`: nothing is written into slots beside a chunk."""
        raise NotImplementedError

    def _joined(self, held: Tensor, new: Tensor) -> Tensor:
        """Return held and new vectors in one tensor, with 0 in empty slots."""
        found = torch.cat([held, new], dim=2)
        found[:, :, : held.shape[2]].masked_fill_((self.held.positions < 0)[..., None], 0.0)
        return found


def at(slots: Slots, positions: Int[Tensor, "B Hk S"]) -> Slots:
    """Return the same slots with other positions. Where keys and values must be copied to be read, as those of
    `Beside`, copies are made once for both.
    """
    if not isinstance(slots, Beside):
        return slots._replace(positions=positions)
    made = Beside.of(slots.held, slots.new, positions)
    made._first = slots._first or slots
    return made


def pieces(slots: Slots) -> tuple[Slots, ...]:
    """Return the slots as parts, each with keys and values in one tensor: two for `Beside`, the slots and the chunk,
    otherwise one.
    """
    if not isinstance(slots, Beside):
        return (slots,)
    used = slots.held.positions.shape[2]
    return (
        Slots(slots.held.keys, slots.held.values, slots.positions[:, :, :used]),
        Slots(slots.new.keys, slots.new.values, slots.positions[:, :, used:]),
    )

"""Bytes of keys, values and what lies beside them, from the shapes of a model's layers.

``docs/layouts.md`` draws the tensors behind the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.budget import Number
from kvkeep.errors import UnsupportedOperationError
from kvkeep.kv.slot_codec import KV_BITS, check_dim, groups

_FLOAT32 = 4
_SCALE = 2
"""Bytes of the scale of a group of codes."""

_POSITION = 4
_COUNTERS = 24
"""Bytes of a row's three int64 counters: tokens seen, tokens of the prompt, identity."""

_SEEN = 16
"""Bytes of two of them, which each layer has for itself."""

_RANGE = 24
"""Bytes of a head's budget, first entry and number of entries in a pool."""

_LOST = 16
"""Bytes of a head's four float32 sums of attention mass, evicted and all."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's keys and values.

    Attributes:
        kv_heads: number of KV heads.
        key_dim: numbers in a key.
        value_dim: numbers in a value.
        window: sliding window in tokens; ``None``: full attention.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all heads; a number has ``itemsize`` bytes."""
        return self.kv_heads * (self.key_dim + self.value_dim) * itemsize

    def slot_bytes(self, itemsize: int, kv_bits: str | None) -> int:
        """Bytes of one token's keys and values in the slots of all heads, scales included.

        Args:
            itemsize: bytes of a number where slots have the model's dtype.
            kv_bits: bits of keys and values, a name of `kvkeep.kv.slot_codec.KV_BITS`; ``None``: the model's dtype.
        """
        if kv_bits is None:
            return self.token_bytes(itemsize)
        pairs = list(zip((self.key_dim, self.value_dim), KV_BITS[kv_bits], strict=True))
        for dim, bits in pairs:
            check_dim(dim, bits)
        return self.kv_heads * sum(dim * bits // 8 + _SCALE * groups(dim) for dim, bits in pairs)

    def widened_bytes(self, itemsize: int) -> int:
        """Bytes of the float32 copy of a token that attention makes; 0 if the cache is float32."""
        return self.token_bytes(_FLOAT32) if itemsize < _FLOAT32 else 0


def full_bytes(layers: Iterable[LayerShape], tokens: int, itemsize: int) -> int:
    """Bytes of one row in a full cache; a layer with a sliding window holds at most the window."""
    return sum(
        (tokens if layer.window is None else min(tokens, layer.window)) * layer.token_bytes(itemsize)
        for layer in layers
    )


def block_bytes(
    layer: LayerShape,
    budget: Number,
    itemsize: int,
    *,
    states: int = 0,
    per_head: int = 0,
    own_budgets: int = 0,
    kv_bits: str | None = None,
) -> int:
    """Bytes that kvkeep allocates for one row in one layer: the formula of ``docs/layouts.md``.

    Args:
        layer: its shape.
        budget: tokens that stay, at most the window; of each head where heads have budgets of their own.
        itemsize: bytes of a number in keys and values.
        states: float32 numbers of policy state per slot.
        per_head: float32 numbers of policy state per KV head.
        own_budgets: budgets that are stored for the row: one if rows differ, one per KV head if heads differ.
        kv_bits: see `LayerShape.slot_bytes`.
    """
    heads, beside = layer.kv_heads, _POSITION + _FLOAT32 * states
    own = heads * (_LOST + _FLOAT32 * per_head) + _COUNTERS + 8 * own_budgets
    if isinstance(budget, int):
        return (budget + 1) * (layer.slot_bytes(itemsize, kv_bits) + heads * beside) + own
    pool = heads * (-(-sum(budget) // heads) + 1) + 1  # one entry belongs to no head
    return pool * (layer.slot_bytes(itemsize, kv_bits) // heads + beside) + own + 16 * heads


def joint_bytes(
    layers: Sequence[LayerShape],
    budget: int,
    itemsize: int,
    *,
    states: int = 0,
    per_head: int = 0,
    kv_bits: str | None = None,
) -> int:
    """Bytes of one row in all layers, where the heads of all layers share one pool; arguments as for `block_bytes`.

    Raises:
        UnsupportedOperationError: the layers' heads have different shapes.
    """
    if len({(layer.key_dim, layer.value_dim, layer.kv_heads) for layer in layers}) > 1:
        raise UnsupportedOperationError(
            "`head_budget=global` needs layers with heads of one shape, and those of this model differ. Use "
            "`head_budget=ada` or a profile."
        )
    heads, one = sum(layer.kv_heads for layer in layers), layers[0].slot_bytes(itemsize, kv_bits) // layers[0].kv_heads
    pool = heads * (budget + 1) + 1  # one entry belongs to no head
    own = heads * (_LOST + _FLOAT32 * per_head + _RANGE) + _COUNTERS + _SEEN * (len(layers) - 1)
    return pool * (one + _POSITION + _FLOAT32 * states) + own


def shared_bytes(first_budget: int, last_budget: int) -> int:
    """Bytes that the layers of one row share under a policy that prunes from layer to layer.

    These are the first layer's tokens with their importance, and the tokens that the last layer left.
    """
    return 12 * (first_budget + 1) + 8 * (last_budget + 1)

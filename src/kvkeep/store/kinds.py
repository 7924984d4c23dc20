"""The kind of store for a layout of slots and a number of bits."""

from __future__ import annotations

from kvkeep.store.dense import DenseStore
from kvkeep.store.pooled import PooledStore
from kvkeep.store.protocol import Store, by_bits
from kvkeep.store.quantised import QUANTISED

POOLED = by_bits(PooledStore)
"""The pools of codes by the name of the setting, see `kvkeep.codes.check_bits`."""


def kind_of(kv_bits: str | None, *, pooled: bool) -> type[Store]:
    """The kind of store for slots.

    Args:
        kv_bits: bits of keys and values, a name of `kvkeep.codes.KV_BITS`; ``None``: the model's dtype.
        pooled: whether heads own ranges of a pool.
    """
    if kv_bits is None:
        return PooledStore if pooled else DenseStore
    return POOLED[kv_bits] if pooled else QUANTISED[kv_bits]

"""Pools whose slots hold 8 or 4 bits per number, and the kind of store for a layout of slots and bits."""

from __future__ import annotations

from kvkeep.codes import KV_BITS
from kvkeep.store.dense import DenseStore
from kvkeep.store.pooled import PooledStore
from kvkeep.store.protocol import Store
from kvkeep.store.quantised import QUANTISED


class Pool8(PooledStore):
    """Keys and values in 8 bits."""

    bits = KV_BITS["8"]


class Pool4(PooledStore):
    """Keys and values in 4 bits."""

    bits = KV_BITS["4"]


class Pool8And4(PooledStore):
    """Keys in 8 bits, values in 4."""

    bits = KV_BITS["k8v4"]


POOLED: dict[str | None, type[PooledStore]] = {None: PooledStore, "8": Pool8, "4": Pool4, "k8v4": Pool8And4}
"""The pools by the name of the setting, see `kvkeep.codes.check_bits`."""


def kind_of(kv_bits: str | None, *, pooled: bool) -> type[Store]:
    """The kind of store for slots.

    Args:
        kv_bits: bits of keys and values, a name of `kvkeep.codes.KV_BITS`; ``None``: the model's dtype.
        pooled: whether heads own ranges of a pool.
    """
    if pooled:
        return POOLED[kv_bits]
    return DenseStore if kv_bits is None else QUANTISED[kv_bits]

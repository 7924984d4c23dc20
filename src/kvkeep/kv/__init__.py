"""The memory of a layer: a `Store` holds keys, values and positions, and a `Block` is all that the layer allocates."""

from kvkeep.kv.block import Block, add_state, beside, lacks, settle, view_of
from kvkeep.kv.joint_block import JointBlock, PartBlock, divide, give
from kvkeep.kv.pooled_store import POOLED, PooledStore, kind_of
from kvkeep.kv.row_copy import (
    Pack,
    RowCopy,
    check_row,
    check_rows,
    has_room,
    pin_row,
    put_row,
    put_rows,
    take_row,
    take_rows,
)
from kvkeep.kv.store import QUANTIZED, DenseStore, QuantizedStore, Store, inference

__all__ = [
    "POOLED",
    "QUANTIZED",
    "Block",
    "DenseStore",
    "JointBlock",
    "Pack",
    "PartBlock",
    "PooledStore",
    "QuantizedStore",
    "RowCopy",
    "Store",
    "add_state",
    "beside",
    "check_row",
    "check_rows",
    "divide",
    "give",
    "has_room",
    "inference",
    "kind_of",
    "lacks",
    "pin_row",
    "put_row",
    "put_rows",
    "settle",
    "take_row",
    "take_rows",
    "view_of",
]

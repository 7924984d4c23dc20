"""The memory of a layer: a `Store` holds keys, values and positions, and a `Block` is all that the layer allocates."""

from kvkeep.store.block import Block
from kvkeep.store.cascade import Alone, Cascade
from kvkeep.store.chunk import beside, settle
from kvkeep.store.dense import DenseStore
from kvkeep.store.joint import JointBlock, PartBlock, check_together, divide, give, make_room
from kvkeep.store.kinds import POOLED, kind_of
from kvkeep.store.pooled import PooledStore
from kvkeep.store.protocol import Store, inference
from kvkeep.store.quantised import QUANTISED, QuantisedStore
from kvkeep.store.row import Pack, RowCopy, check_row, has_room, pin_row, put_row, take_row
from kvkeep.store.several import check_rows, put_rows, take_rows
from kvkeep.store.sharing import add_state, lacks
from kvkeep.store.view import view_of

__all__ = [
    "POOLED",
    "QUANTISED",
    "Alone",
    "Block",
    "Cascade",
    "DenseStore",
    "JointBlock",
    "Pack",
    "PartBlock",
    "PooledStore",
    "QuantisedStore",
    "RowCopy",
    "Store",
    "add_state",
    "beside",
    "check_row",
    "check_rows",
    "check_together",
    "divide",
    "give",
    "has_room",
    "inference",
    "kind_of",
    "lacks",
    "make_room",
    "pin_row",
    "put_row",
    "put_rows",
    "settle",
    "take_row",
    "take_rows",
    "view_of",
]

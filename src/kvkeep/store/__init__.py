"""Where keys, values and positions live. A `protocol.Store` holds them, a `block` is all that a layer allocates."""

from kvkeep.store.block import Block
from kvkeep.store.cascade import Alone, Cascade
from kvkeep.store.dense import DenseStore
from kvkeep.store.inference import inference
from kvkeep.store.protocol import Store

__all__ = ["Alone", "Block", "Cascade", "DenseStore", "Store", "inference"]

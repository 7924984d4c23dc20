"""Where keys, values and positions live. `dense` keeps them in the model's dtype; a `block` is all a layer holds."""

from kvkeep.store.block import Block
from kvkeep.store.cascade import Cascade, alone
from kvkeep.store.dense import DenseStore
from kvkeep.store.inference import inference

__all__ = ["Block", "Cascade", "DenseStore", "alone", "inference"]

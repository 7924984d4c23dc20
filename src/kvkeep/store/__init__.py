"""Where keys, values and positions live. `dense` keeps them in the model's dtype."""

from kvkeep.store.dense import DenseStore

__all__ = ["DenseStore"]

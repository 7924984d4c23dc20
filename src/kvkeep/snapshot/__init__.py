"""A sequence's memory as an object: copied, saved, restored."""

from kvkeep.snapshot.contents import Contents, put, take
from kvkeep.snapshot.layers import open_layer

__all__ = ["Contents", "open_layer", "put", "take"]

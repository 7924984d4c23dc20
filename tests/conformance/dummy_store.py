"""A store written from the protocol alone: float32 slots whatever the model's dtype, slots of all heads side by side.

In memory: ``(B, capacity, Hk, D)``, keys and values. Half precision is widened when it is written.
"""

import torch

from kvkeep.kv.store import Store
from kvkeep.types import EMPTY, Slots


class DummyStore(Store):
    def __init__(self, like_keys, like_values, capacity):
        B, Hk, _, D = like_keys.shape
        self.model = [(x.shape[1], x.shape[3], x.dtype, x.device) for x in (like_keys, like_values)]
        self.keys = torch.zeros(B, capacity, Hk, D, device=like_keys.device)
        self.values = torch.zeros(B, capacity, Hk, like_values.shape[-1], device=like_keys.device)
        self.positions = torch.full((B, Hk, capacity), EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def token_bytes(self):
        return sum(heads * dim * dtype.itemsize for heads, dim, dtype, _ in self.model)

    def slots(self):
        return Slots(self.keys.transpose(1, 2), self.values.transpose(1, 2), self.positions)

    def beside(self, keys, values, *, used):
        empty = (self.positions[:, :, :used] < 0)[..., None]
        held = (tensor[:, :, :used].masked_fill(empty, 0.0) for tensor in self.slots()[:2])
        return tuple(torch.cat([old, new.float()], dim=2) for old, new in zip(held, (keys, values), strict=True))

    def fill(self, keys, values, positions):
        n = positions.shape[-1]
        for held, new in zip(self.slots(), (keys, values, positions), strict=True):
            held[:, :, :n] = new
        self.positions[:, :, n:] = EMPTY

    def fits(self, keys, values):
        asked = [(x.shape[1], x.shape[3], x.dtype, x.device) for x in (keys, values)]
        return asked == self.model and len(keys) == len(values) == len(self.positions)

    def wider(self, capacity):
        like = (
            torch.empty(len(self.positions), heads, 1, dim, dtype=dtype, device=device)
            for heads, dim, dtype, device in self.model
        )
        return DummyStore(*like, capacity)

    def per_row(self):
        return {"k": self.keys, "v": self.values, "p": self.positions}

    def over(self, tensors):
        other = object.__new__(DummyStore)
        other.model = self.model
        other.keys, other.values, other.positions = (tensors[name] for name in "kvp")
        return other

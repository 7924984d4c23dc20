"""The default store: slots in the model's dtype, written in place and moved only at the end of a prompt chunk."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.store.protocol import Store
from kvkeep.types import EMPTY, Slots


class DenseStore(Store):
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head.

    The layout is drawn in ``docs/layouts.md``. The tensors are never replaced, so their storage pointers stay the same
    for the life of the store, unless the number of rows changes.

    Attributes:
        keys: ``(B, Hk, capacity, D)``.
        values: ``(B, Hk, capacity, E)``.
        positions: true positions, ``-1`` = empty.
    """

    keys: Float[Tensor, "B Hk capacity D"]
    values: Float[Tensor, "B Hk capacity E"]
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        B, Hk, _, D = like_keys.shape
        self.keys = like_keys.new_zeros((B, Hk, capacity, D))
        self.values = like_values.new_zeros((B, Hk, capacity, like_values.shape[-1]))
        self.positions = torch.full((B, Hk, capacity), EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads, in the model's dtype."""
        per_head = sum(x.shape[-1] * x.element_size() for x in (self.keys, self.values))
        return per_head * self.positions.shape[1]

    def slots(self) -> Slots:
        """The slots themselves, as attention reads them."""
        return Slots(self.keys, self.values, self.positions)

    def lying(self, used: int) -> Slots | None:
        """The first ``used`` slots where they lie, in main memory."""
        if not self.positions.is_cpu:
            return None
        return Slots(self.keys[:, :, :used], self.values[:, :, :used], self.positions[:, :, :used])

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content with ``n <= capacity`` tokens, in place. The other slots become empty."""
        n = positions.shape[-1]
        self.keys[:, :, :n] = keys
        self.values[:, :, :n] = values
        self.positions[:, :, :n] = positions
        self.positions[:, :, n:] = EMPTY

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots, followed by new tokens. Empty slots are set to 0."""
        empty = (self.positions[:, :, :used] < 0)[..., None]
        found = [torch.cat([self.keys[:, :, :used], keys], dim=2), torch.cat([self.values[:, :, :used], values], dim=2)]
        for tensor in found:
            tensor[:, :, :used].masked_fill_(empty, 0.0)
        return found[0], found[1]

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, dtype and device."""
        return all(
            (new.shape[:2], new.shape[3], new.dtype, new.device)
            == (held.shape[:2], held.shape[3], held.dtype, held.device)
            for new, held in ((keys, self.keys), (values, self.values))
        )

    def wider(self, capacity: int) -> DenseStore:
        """An empty store with more slots, for the same rows."""
        return DenseStore(self.keys, self.values, capacity)

    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the store by name. The first axis of each tensor is the rows."""
        return {"keys": self.keys, "values": self.values, "positions": self.positions}

    def per_slot(self) -> tuple[str, ...]:
        """All tensors: they have one entry per slot."""
        return ("keys", "values", "positions")

    def over(self, tensors: Mapping[str, Tensor]) -> DenseStore:
        """A dense store over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other.keys, other.values, other.positions = (tensors[name] for name in ("keys", "values", "positions"))
        return other

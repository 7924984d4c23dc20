"""What a store is: how the keys, values and positions of one layer lie in memory."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.types import Slots


class Store(abc.ABC):
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head, allocated once.

    A new store is empty, and it is for the rows, heads, head dims, dtype and device of the keys and values it is given.
    The slots may have another dtype than the model and any layout: whoever writes into them rounds.

    Attributes:
        positions: true positions, ``-1`` = empty.
    """

    positions: Int[Tensor, "B Hk capacity"]

    @abc.abstractmethod
    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int): ...

    @property
    def capacity(self) -> int:
        """Slots per row and head."""
        return self.positions.shape[-1]

    def used(self) -> int:
        """Slots up to the last occupied one of any head; on a GPU, where asking means waiting, all of them."""
        if self.positions.device.type != "cpu":
            return self.capacity
        occupied = (self.positions >= 0).flatten(0, 1).any(dim=0).nonzero()
        return int(occupied[-1]) + 1 if len(occupied) else 0

    @property
    @abc.abstractmethod
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads, in the model's dtype."""

    @abc.abstractmethod
    def slots(self) -> Slots:
        """The slots as a backend reads and writes them; live."""

    @abc.abstractmethod
    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots with new tokens after them. What is left in empty slots becomes 0."""

    @abc.abstractmethod
    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content by ``n <= capacity`` tokens, in place; the other slots become empty."""

    @abc.abstractmethod
    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, dtype and device."""

    @abc.abstractmethod
    def wider(self, capacity: int) -> Store:
        """An empty store with more slots, for the same rows."""

    @abc.abstractmethod
    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the store by name; the first axis of each is that of the rows."""

    @abc.abstractmethod
    def over(self, tensors: Mapping[str, Tensor]) -> Store:
        """The same store over other tensors, named as in `per_row`."""

"""What a store is: how the keys, values and positions of one layer lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.types import Slots


class Store(Protocol):
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head, allocated once.

    Attributes:
        positions: true positions, ``-1`` = empty.
    """

    positions: Int[Tensor, "B Hk capacity"]

    @property
    def capacity(self) -> int:
        """Slots per row and head."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads, in the model's dtype."""

    def slots(self) -> Slots:
        """The slots as a backend reads and writes them; live."""

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots with new tokens after them. What is left in empty slots becomes 0."""

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content by ``n <= capacity`` tokens, in place; the other slots become empty."""

    def used(self) -> int:
        """Slots up to the last occupied one of any head; on a GPU, where asking means waiting, all of them."""

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, dtype and device."""

    def wider(self, capacity: int) -> Self:
        """An empty store with more slots, for the same rows."""

    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the store by name; the first axis of each is that of the rows."""

    def over(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same store over other tensors, named as in `per_row`."""

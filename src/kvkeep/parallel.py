"""The KV heads of a model that is split over processes: which of them this process holds, and how it asks the others.

Under tensor parallelism each process (rank) computes attention for heads that lie next to each other, and keeps the
slots of these. Whatever looks at all heads of a layer goes through `Heads`, and nothing else waits for another process.
Without tensor parallelism every method returns what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Heads:
    """The KV heads of each layer that this process holds. All ranks must call the same methods in the same order.

    Attributes:
        rank: number of this process.
        ranks: number of processes that hold heads; 1: this one holds all.
        count: KV heads of a layer over all processes; 0: not known, where one process holds all.
    """

    rank: int = 0
    ranks: int = 1
    count: int = 0

    def all(self, mine: Shaped[Tensor, "B Hk *rest"]) -> Shaped[Tensor, "B heads *rest"]:
        """The numbers of all heads in their order, from those of this process's heads. Shapes are alike everywhere."""
        return mine if self.ranks == 1 else torch.cat(self._gathered(mine), dim=1)

    def all_slots(self, mine: Shaped[Tensor, "B Hk S"], empty: int | float) -> Shaped[Tensor, "B heads most"]:
        """`all` for slots, of which ranks may have different numbers: the fewer ones follow after empty ones.

        A chunk's tokens, which come last, therefore stay in the same columns in all heads.

        Args:
            mine: numbers of slots.
            empty: the number of a slot that is added.
        """
        if self.ranks == 1:
            return mine
        most = self.most(mine.shape[-1], mine.device)
        return self.all(torch.nn.functional.pad(mine, (most - mine.shape[-1], 0), value=empty))

    def mine(self, whole: Shaped[Tensor, "B heads *rest"]) -> Shaped[Tensor, "B Hk *rest"]:
        """The numbers of this process's heads, from those of all heads."""
        return whole if self.ranks == 1 else whole.chunk(self.ranks, dim=1)[self.rank]

    def numbers(self, mine: int, device: torch.device) -> Int[Tensor, " heads"]:
        """The numbers of this process's heads among all heads of a layer, for ``mine`` heads on each process."""
        return torch.arange(self.rank * mine, (self.rank + 1) * mine, device=device)

    def most(self, number: int, device: torch.device) -> int:
        """The largest of a number of each process."""
        if self.ranks == 1:
            return number
        return int(torch.stack(self._gathered(torch.tensor(number, device=device))).max())

    def agreed(self, tokens: Sequence[int | None], device: torch.device) -> list[int | None]:
        """Tokens as the first process has chosen them; ``None``: none."""
        if self.ranks == 1:
            return list(tokens)
        told = torch.tensor([-1 if token is None else token for token in tokens], device=device)
        dist.broadcast(told, 0)
        return [None if token < 0 else token for token in told.tolist()]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all processes, in their order."""
        sent = (mine.to(torch.uint8) if mine.dtype == torch.bool else mine).contiguous()
        found = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(found, sent)
        return [one.to(mine.dtype) for one in found]


ALONE = Heads()
"""One process holds all heads."""

"""The record of one policy's run: when each head dropped each token, with which score, beside whose.

A token that was dropped never comes back, so one number for each token and head says what the head holds at every
moment. A moment is a chunk of the prompt or a token of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.explain.overheard import Heard
from kvkeep.explain.watch import Watch

HELD = -1
"""Stands for the moment of a drop that has not come."""


@dataclass(frozen=True, eq=False)
class Answered:
    """The end of a run.

    Attributes:
        ids: the answer's tokens, the end token among them.
        heads: the layer and the number of each KV head.
        budgets: slots of each head that may stay occupied.
        allocated_bytes: the bounded memory.
        full_bytes: keys and values of a full cache for the same tokens.
    """

    ids: list[int]
    heads: list[tuple[int, int]]
    budgets: list[int]
    allocated_bytes: int
    full_bytes: int


@dataclass(eq=False)
class Ledger:
    """What happened to each of ``n`` tokens in each of ``H`` heads, of all layers one after the other.

    Attributes:
        dropped: the moment at which a head dropped a token, `HELD` if it has not.
        scores: the score of a token when it was dropped; NaN if it had none, as behind a sliding window.
        mass: attention that the tokens read so far received in a moment, averaged over heads.
        total: attention that tokens received from all later queries, by head.
        rows: attention of the query that chose an answer's token, averaged over heads.
        rivals: position of the lowest token that stayed and was not protected, -1 if there was none.
        rival_scores: its score.
        read: tokens of the prompt and of the answer so far.
        answered: the end of the run.
    """

    dropped: Int[Tensor, "H n"]
    scores: Float[Tensor, "H n"]
    total: Float[Tensor, "H n"]
    mass: list[Float[Tensor, " _"]] = field(default_factory=list)
    rows: list[Float[Tensor, " n"]] = field(default_factory=list)
    rivals: list[Int[Tensor, " H"]] = field(default_factory=list)
    rival_scores: list[Float[Tensor, " H"]] = field(default_factory=list)
    read: int = 0
    answered: Answered = field(default_factory=lambda: Answered([], [], [], 0, 0))

    @classmethod
    def of(cls, heads: int, length: int) -> Ledger:
        """An empty record."""
        dropped = torch.full((heads, length), HELD, dtype=torch.int16)
        return cls(dropped, torch.full((heads, length), torch.nan), torch.zeros(heads, length))

    @property
    def moments(self) -> int:
        """Moments so far."""
        return len(self.mass)

    def lacks(self, moment: int) -> Bool[Tensor, "H n"]:
        """Which tokens each head had dropped when a moment began."""
        return (self.dropped >= 0) & (self.dropped < moment)

    def note(self, watches: dict[int, Watch], heard: dict[int, Heard], last: int) -> None:
        """Add a moment.

        Args:
            watches: the layers after the step.
            heard: scores of layers in which tokens competed.
            last: tokens read so far.
        """
        self.read = last
        received = torch.cat([one.keys.mass for one in watches.values()]).cpu()
        self.total += received
        self.mass.append(received[:, :last].mean(dim=0))
        held = torch.cat([one.held for one in watches.values()]).cpu()
        gone = (self.dropped == HELD) & ~held
        gone[:, last:] = False
        self.dropped[gone] = self.moments - 1
        scores, free = self._compared(watches, heard)
        self.scores[gone] = scores[gone]
        standing = scores.masked_fill(~(held & free) | scores.isnan(), torch.inf)
        lowest = standing.amin(dim=-1)
        there = lowest < torch.inf
        self.rivals.append(torch.where(there, (standing == lowest[:, None]).int().argmax(dim=-1), -1))
        self.rival_scores.append(lowest.masked_fill(~there, torch.nan))

    def choose(self, watches: dict[int, Watch]) -> None:
        """Note the attention of the newest query, which chooses the next token of the answer."""
        rows = torch.cat([one.keys.newest for one in watches.values()]).cpu()
        self.rows.append(rows.mean(dim=0))

    def _compared(
        self, watches: dict[int, Watch], heard: dict[int, Heard]
    ) -> tuple[Float[Tensor, "H n"], Bool[Tensor, "H n"]]:
        """The scores by position, NaN where there is none, and which tokens were not protected."""
        length, scores, free = self.total.shape[1], [], []
        for number, one in watches.items():
            heads = one.held.shape[0]
            table, open_ = torch.full((heads, length + 1), torch.nan), torch.zeros(heads, length + 1, dtype=torch.bool)
            if (found := heard.get(number)) is not None:
                places = found.positions.cpu().long().expand(heads, -1) % (length + 1)
                table.scatter_(-1, places, found.scores.cpu())
                open_.scatter_(-1, places, ~found.protected.cpu())
            scores.append(table[:, :length])
            free.append(open_[:, :length])
        return torch.cat(scores), torch.cat(free)

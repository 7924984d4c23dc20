"""The trial of smaller budgets at the end of a prompt, and the reduction of a row to the one that was chosen.

A prompt that is read in one piece is attended to in full before anything is evicted. So the cuts of smaller budgets are
known from the same scores, without a second run of the model. The row is cut to the largest budget in every layer; when
the model has run, the loss is the mean over all layers, and the row is reduced to the tokens of the budget that is
chosen. It is then what it would have been under that budget from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import loss, scores
from kvkeep.budget import largest
from kvkeep.engine.batch import Batch
from kvkeep.engine.choice import SHARES
from kvkeep.engine.rows import Rows
from kvkeep.engine.segments import Segment
from kvkeep.errors import PolicyError
from kvkeep.eviction import shielded
from kvkeep.policies.base import Policy
from kvkeep.store import Block, inference
from kvkeep.types import EMPTY, Report, State, View

_LATER = torch.iinfo(torch.int32).max


@dataclass(frozen=True, eq=False)
class Cut:
    """The cut of a smaller budget in one layer, for some rows.

    Attributes:
        positions: the tokens that would stay, in order, then `EMPTY`.
        gone: mass of the other tokens in each head.
    """

    positions: Int[Tensor, "B Hk n"]
    gone: Float[Tensor, "B Hk"]


@Policy.register
class Watched:
    """A policy whose step over the end of a prompt is noted before it scores; otherwise it is that policy.

    Args:
        policy: the policy.
        note: is given the view, the state before the step, the report, and the state after it.
    """

    def __init__(self, policy: Policy, note: Callable[[View, State, Report, State], None]) -> None:
        self._policy, self._note = policy, note
        self._observed: tuple[State, Report] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __str__(self) -> str:
        return str(self._policy)

    def observe(self, state: State, view: View, report: Report) -> State:
        """The policy's state after a step."""
        self._observed = state, report
        return self._policy.observe(state, view, report)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The policy's scores."""
        assert self._observed is not None
        (before, report), self._observed = self._observed, None
        self._note(view, before, report, state)
        return self._policy.score(view, state)


class Trial:
    """Watches a batch of prompts in every layer, and reduces its guarded rows afterwards.

    Args:
        batch: whole prompts.
        rows: the rows of the engine.
    """

    def __init__(self, batch: Batch, rows: Rows) -> None:
        self._rows = rows
        self._guarded = {one.row: one for one in batch.requests if len(one.levels) > 1 and one.row is not None}
        self._cuts: dict[tuple[int, int], list[Cut]] = {}

    @classmethod
    def of(cls, batch: Batch, rows: Rows) -> Trial | None:
        """Return the trial of a batch; ``None`` if no row of it has a budget to choose."""
        return cls(batch, rows) if batch.fresh and any(one.levels for one in batch.requests) else None

    def watch(self, layer: int, segment: Segment, policy: Policy) -> Policy:
        """Return the policy of some rows of a layer, which notes the cuts of smaller budgets when asked for scores."""
        if not any(segment.start <= row < segment.stop for row in self._guarded):
            return policy
        return cast(Policy, Watched(policy, partial(self._note, layer, segment, policy)))

    def _note(
        self, layer: int, segment: Segment, policy: Policy, view: View, before: State, report: Report, after: State
    ) -> None:
        """Note the cuts of one layer.

        Raises:
            PolicyError: the smaller budgets' tokens are not among those of the larger ones, or their state differs.
        """
        last = _kept(policy, view, after)
        for place in reversed(range(len(SHARES))):
            numbers = [self._number(row, place, layer) for row in range(segment.start, segment.stop)]
            column = torch.tensor(numbers, device=view.seen.device)[:, None]
            asked = dataclasses.replace(view, budget=torch.minimum(column, torch.as_tensor(view.budget).to(column)))
            stays = _kept(policy, asked, after)
            if bool((stays & ~last).any()) or not _same_state(policy.observe(before, asked, report), after):
                raise PolicyError(
                    f"{policy} keeps tokens under a smaller budget that it evicts under a larger one, or rates them "
                    "otherwise, so no budget can be chosen for it. Leave `guard` out, or give another policy."
                )
            last = stays
            cuts = self._cuts.setdefault((layer, segment.start), [])
            gone = report.mass.masked_fill(stays | (view.positions < 0), 0.0).sum(dim=-1)
            cuts.insert(0, Cut(_in_order(view.positions, stays), gone))

    def _number(self, row: int, place: int, layer: int) -> int:
        """The budget of one row in one layer at one of the smaller budgets; without any, more than it has."""
        one = self._guarded.get(row)
        if one is None or place >= len(one.levels) - 1:
            return _LATER
        return largest([self._rows.numbers(one.policy, one.levels[place])[layer]])

    @inference
    def settle(self) -> None:
        """Choose the budgets of the guarded rows, and reduce the rows to the tokens of these budgets."""
        for row, one in self._guarded.items():
            found = [self._loss(row, place) for place in range(len(one.levels) - 1)]
            guard = cast(float, one.request.guard)
            fits = [place for place, lost in enumerate(found) if lost is not None and lost <= guard]
            if not fits:
                continue
            one.budget = one.levels[fits[0]]
            for block, (_, (positions, gone)) in zip(self._rows.blocks_of(row), self._of(row, fits[0]), strict=True):
                _reduce(block, positions)
                block.lost[0, :, 0] = gone
            self._rows.limit_row(row, one.policy, one.budget)

    def _of(self, row: int, place: int) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        """The positions and the lost mass of one row at a smaller budget in each layer."""
        start = max(start for _, start in self._cuts if start <= row)
        layers = sorted(layer for layer, first in self._cuts if first == start)
        cuts = [(layer, self._cuts[layer, start][place]) for layer in layers]
        return [(layer, (cut.positions[row - start], cut.gone[row - start])) for layer, cut in cuts]

    def _loss(self, row: int, place: int) -> float | None:
        """The share that one row loses at a smaller budget."""
        sums = self._rows.lost_of(row)
        for layer, (_, gone) in self._of(row, place):
            sums[layer][..., 0] = self._rows.heads.all(gone[None])[0]
        return loss.mean(sums).prompt


def _kept(policy: Policy, view: View, state: State) -> Bool[Tensor, "B Hk S"]:
    """Whether each token stays, see `kvkeep.eviction.cut`."""
    return scores.keep(shielded(policy, view, state), view.positions, view.budget)


def _in_order(positions: Int[Tensor, "B Hk S"], stays: Bool[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk n"]:
    """The positions of the tokens that stay, in order, then `EMPTY`."""
    most = int(stays.sum(dim=-1).max())
    found = positions.masked_fill(~stays, _LATER).sort(dim=-1).values[..., :most]
    return found.masked_fill(found == _LATER, EMPTY)


def _same_state(one: State, other: State) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _reduce(block: Block, positions: Int[Tensor, "Hk n"]) -> None:
    """Reduce a block of one row to some of its tokens, in order."""
    held, n = block.store.positions, positions.shape[-1]
    (ordered, order), wanted = held.masked_fill(held < 0, _LATER).sort(dim=-1), positions[None]
    wanted = wanted.masked_fill(wanted < 0, _LATER).contiguous()
    index = order.gather(-1, torch.searchsorted(ordered, wanted).clamp(max=held.shape[-1] - 1))
    block.store.take(block.store.tokens(block.store.slots(), used=held.shape[-1]), positions[None], index)
    for tensor in block.of_slots().values():
        tensor[..., :n] = tensor.gather(-1, index)

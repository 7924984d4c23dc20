"""Neighbouring rows of several owners: one run of the model, and in each layer one step for each owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.policies.base import Policy
from kvkeep.types import AttentionOptions, Phase, Stepper


class Owner(NamedTuple):
    """How a row's steps are taken.

    Attributes:
        policy: the eviction policy.
        pinned: whether the row has pins. A kernel for whole steps knows nothing of them.
    """

    policy: Policy
    pinned: bool = False


class Segment(NamedTuple):
    """Neighbouring rows of equal owners."""

    owner: Owner
    start: int
    stop: int


def segments(owners: Sequence[Owner | None], start: int, stop: int, default: Policy) -> tuple[Segment, ...]:
    """Cut a range of rows where the owner changes. A row without an owner joins the rows before it."""
    first = next((one for one in owners[start:stop] if one is not None), Owner(default))
    found = [Segment(first, start, start)]
    for row, owner in enumerate(owners[start:stop], start):
        if owner is not None and owner != found[-1].owner:
            found.append(Segment(owner, row, row))
        found[-1] = found[-1]._replace(stop=row + 1)
    return tuple(found)


class Segments:
    """Takes the steps of neighbouring rows that have layers of their own, and holds nothing itself.

    The model's matrices are read once for all rows; attention, statistics and eviction run once for each part.

    Args:
        parts: the rows of each part, counted from the first part's first row, and the part's layer.
    """

    def __init__(self, parts: Sequence[tuple[slice, Stepper]]) -> None:
        self._parts = parts

    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B Hq T E"]:
        """`kvkeep.Layer.step` of each part on its own rows."""
        done = []
        for rows, part in self._parts:
            mine = None if real is None else real[rows]
            done.append(part.step(query[rows], keys[rows], values[rows], options=options, phase=phase, real=mine))
        return torch.cat(done)


def joined(parts: Sequence[tuple[Segment, Stepper]]) -> Stepper:
    """The layers of neighbouring segments as one."""
    start = parts[0][0].start
    steppers = [(slice(one.start - start, one.stop - start), layer) for one, layer in parts]
    return steppers[0][1] if len(steppers) == 1 else Segments(steppers)

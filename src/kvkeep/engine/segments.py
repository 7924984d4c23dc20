"""Neighbouring rows under several policies: one run of the model, and in each layer one step for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.policies.base import Policy
from kvkeep.types import AttentionOptions, Phase, Stepper


class Segment(NamedTuple):
    """Neighbouring rows under one policy."""

    policy: Policy
    start: int
    stop: int


def segments(owners: Sequence[Policy | None], start: int, stop: int, default: Policy) -> tuple[Segment, ...]:
    """Cut a range of rows where the policy changes. A row without an owner joins the rows before it."""
    policy = next((one for one in owners[start:stop] if one is not None), default)
    found = [Segment(policy, start, start)]
    for row, owner in enumerate(owners[start:stop], start):
        if owner is not None and owner != found[-1].policy:
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

"""One run of the model whose parts each layer steps one by one: rows under several policies, and joined batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.handing import HandingLayer, PhasedCache
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


class Part(NamedTuple):
    """A batch within the tokens of a run.

    Attributes:
        rows: number of rows.
        length: tokens of each row, padding included.
        real: which tokens are real; ``None``: all.
        cache: the batch's rows.
    """

    rows: int
    length: int
    real: Bool[Tensor, "n T"] | None
    cache: PhasedCache


class Joined:
    """Takes the steps of batches whose tokens lie one after the other in a single row, and holds nothing itself.

    Args:
        parts: the batches, in the order of their tokens.
        steppers: the layer of each batch.
    """

    def __init__(self, parts: Sequence[Part], steppers: Sequence[Stepper]) -> None:
        self._parts, self._steppers = parts, steppers

    def step(
        self,
        query: Float[Tensor, "1 Hq N D"],
        keys: Float[Tensor, "1 Hk N D"],
        values: Float[Tensor, "1 Hk N E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 N"] | None = None,
    ) -> Float[Tensor, "1 Hq N E"]:
        """`kvkeep.Layer.step` of each batch on its own tokens, in its own phase."""
        done, start = [], 0
        for part, stepper in zip(self._parts, self._steppers, strict=True):
            stop = start + part.rows * part.length
            mine = (_rows(tensor[:, :, start:stop], part.rows) for tensor in (query, keys, values))
            out = stepper.step(*mine, options=options, phase=part.cache.phase or phase, real=part.real)
            done.append(out.transpose(0, 1).flatten(1, 2)[None])
            start = stop
        return torch.cat(done, dim=2)


def _rows(tensor: Float[Tensor, "1 H N D"], rows: int) -> Float[Tensor, "n H T D"]:
    """Cut a row of tokens into rows of equal length."""
    _, H, N, D = tensor.shape
    return tensor.view(H, rows, N // rows, D).transpose(0, 1)


def joined(parts: Sequence[Part]) -> PhasedCache:
    """Return a cache for one run of the model over all batches. Their layers have slots, and no other state."""
    layers: list[Any] = []
    for same in zip(*(part.cache.layers for part in parts), strict=True):
        layers.append(HandingLayer(Joined(parts, [layer.stepper for layer in same]), same[0].window))
    cache = PhasedCache(layers=layers)
    cache.phase, cache.latent = parts[0].cache.phase, parts[0].cache.latent
    return cache

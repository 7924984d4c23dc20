"""One run of the model over several batches: each layer steps batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.cache.hf_layers import HandingLayer, PhasedCache
from kvkeep.types import AttentionOptions, Phase, Stepper


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

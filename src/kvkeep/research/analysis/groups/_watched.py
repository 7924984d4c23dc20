"""Layers that remember: the inputs of a whole text, and the attention of each decoded row over what was held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.backends import reference
from kvkeep.cache import BoundedCache, BoundedLayer
from kvkeep.layer import Layer
from kvkeep.policies.base import Policy
from kvkeep.registry import parse
from kvkeep.types import AttentionOptions, Phase


@dataclass(frozen=True)
class Tape:
    """What one layer was given for a whole text under the full cache."""

    query: Float[Tensor, "1 Hq n D"]
    keys: Float[Tensor, "1 Hk n D"]
    values: Float[Tensor, "1 Hk n E"]
    options: AttentionOptions

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.query.shape[2]

    def weights(self, first: int) -> Float[Tensor, "Hq R n"]:
        """The full cache's attention of the rows from ``first`` on."""
        heads, n = self.keys.shape[1], self.length
        positions = torch.arange(n, device=self.keys.device)
        return reference.probabilities(
            self.query[:, :, first:],
            self.keys,
            positions[None, first:],
            positions.expand(1, heads, n),
            self.options,
        )[0].flatten(0, 1)


class Taping(Layer):
    """A layer that keeps everything and remembers what it was given in its one step."""

    tape: Tape

    def step(
        self,
        query: Float[Tensor, "1 Hq T D"],
        keys: Float[Tensor, "1 Hk T D"],
        values: Float[Tensor, "1 Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 T"] | None = None,
    ) -> Float[Tensor, "1 Hq T E"]:
        """Remember the inputs; then as `Layer.step`."""
        self.tape = Tape(query.clone(), keys.clone(), values.clone(), options)
        return super().step(query, keys, values, options=options, phase=phase, real=real)


class Watched(Layer):
    """A bounded layer that remembers the attention of its decode steps, by the true positions of the keys."""

    def __init__(self, policy: Policy, budget: int, *, index: int, window: int | None, length: int):
        super().__init__(policy, budget, index=index, window=window)
        self._length = length
        self._rows: list[Float[Tensor, "Hq n"]] = []

    @property
    def weights(self) -> Float[Tensor, "Hq R n"]:
        """One row per decode step; 0 for keys that are not held."""
        return torch.stack(self._rows, dim=1)

    def step(
        self,
        query: Float[Tensor, "1 Hq T D"],
        keys: Float[Tensor, "1 Hk T D"],
        values: Float[Tensor, "1 Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 T"] | None = None,
    ) -> Float[Tensor, "1 Hq T E"]:
        """Remember a single token's attention over what is held and itself; then as `Layer.step`."""
        if query.shape[2] == 1:
            self._rows.append(self._row(query, keys, options))
        return super().step(query, keys, values, options=options, phase=phase, real=real)

    def _row(
        self, query: Float[Tensor, "1 Hq 1 D"], keys: Float[Tensor, "1 Hk 1 D"], options: AttentionOptions
    ) -> Float[Tensor, "Hq n"]:
        now = self.seen.view(1, 1)
        held = torch.cat([self.store.positions, now.expand(1, keys.shape[1], 1).int()], dim=-1)
        all_keys = torch.cat([self.store.slots().keys, keys], dim=2)
        p = reference.probabilities(query, all_keys, now, held, options)[0, :, :, 0]
        row = p.new_zeros(*p.shape[:2], self._length + 1)  # the last column is for empty slots
        place = held[0, :, None].long().where(held[0, :, None] >= 0, self._length).expand_as(p)
        return row.scatter_(-1, place, p)[..., :-1].flatten(0, 1)


def cache_of(config: Any, make: Callable[[int, int | None], Layer]) -> BoundedCache:
    """A cache whose layers are made from their number in the model and their sliding window."""
    cache = BoundedCache(config, "local", budget=1)
    for index, outer in enumerate(cache.layers):
        if isinstance(outer, BoundedLayer):
            outer.layer = make(index, outer.layer.window)
    return cache


@torch.inference_mode()
def tapes(model: Any, ids: Int[Tensor, "1 n"]) -> list[Tape]:
    """Run a text under the full cache; what each layer was given."""
    n = ids.shape[1]
    cache = cache_of(model.config, lambda index, window: Taping(parse("full"), n, index=index, window=window))
    model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [layer.tape for layer in cache.bounded_layers().values() if isinstance(layer, Taping)]

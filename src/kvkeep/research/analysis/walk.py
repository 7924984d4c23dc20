"""One pass over a text under the full cache, in blocks of queries, that shows every row of attention on its way.

The model runs block by block over a cache that keeps everything. Each layer's softmax rows are computed from the very
queries and keys that the model handed over, so scaling, groups, windows, soft caps and sinks are the model's own. One
block of one layer exists at a time: memory grows with the text, not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.cache import BoundedCache, BoundedLayer
from kvkeep.errors import ShapeError, UnsupportedModelError
from kvkeep.layer import Layer
from kvkeep.models.device import enough_memory
from kvkeep.registry import parse
from kvkeep.research.analysis.measure import Mlp, Rows
from kvkeep.research.analysis.mlp_blocks import Watched
from kvkeep.types import AttentionOptions, Phase

BLOCK = 128
"""Rows that are shown at once."""


@runtime_checkable
class Sees(Protocol):
    """What a walk hands its rows to; `Measurement` is one."""

    def rows(self, rows: Rows) -> None:
        """Take some rows of one layer's attention."""

    def mlp(self, mlp: Mlp) -> None:
        """Take some tokens of one layer's MLP block."""


class Shown(Layer):
    """A layer that keeps everything and hands on the rows of attention of each step.

    Args:
        number: what rows call the layer.
        index: its number in the model.
        window: its sliding window.
        length: tokens of the text.
        take: what the rows are handed to; ``None`` if nobody reads them.
    """

    def __init__(
        self, number: int, index: int, window: int | None, *, length: int, take: Callable[[Rows], object] | None
    ):
        super().__init__(parse("full"), length, index=index, window=window)
        self._number, self._length, self._take = number, length, take

    def open(self, keys: Float[Tensor, "1 Hk T D"], values: Float[Tensor, "1 Hk T E"]) -> None:
        """Room for the whole text, in the model's dtype."""
        if not self.allocated:
            self._keys = keys.new_empty(*keys.shape[1:2], self._length, keys.shape[3])
            self._values = values.new_empty(*values.shape[1:2], self._length, values.shape[3])
            self.allocated = True

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
        """Attend over all tokens so far, in float32, and hand the rows on.

        Raises:
            ShapeError: there are more tokens than were announced.
        """
        first, last = self.columns, self.columns + query.shape[2]
        if last > self._length:
            raise ShapeError(f"The walk has room for {self._length} tokens and was given {last}.")
        self._keys[:, first:last], self._values[:, first:last] = keys[0], values[0]
        self.columns = last
        values = self._values[:, :last].float()
        logits = scaled_logits(query[0].float(), self._keys[:, :last].float(), options)
        logits = logits.masked_fill(~visible(first, last, options.window, logits.device), -torch.inf)
        weights = probabilities(logits, options.sinks)
        groups = weights.unflatten(0, (values.shape[0], -1))
        out: Tensor = (groups @ values[:, None]).flatten(0, 1)
        if self._take is not None:
            self._take(Rows(self._number, first, weights.cpu(), values.cpu(), logits.cpu()))
        return out[None].to(query.dtype)


def scaled_logits(
    query: Float[Tensor, "Hq R D"], keys: Float[Tensor, "Hk S D"], options: AttentionOptions
) -> Float[Tensor, "Hq R S"]:
    """Logits of every pair, soft-capped where the model does that."""
    groups = query.unflatten(0, (keys.shape[0], -1))
    logits: Tensor = (groups @ keys[:, None].mT).flatten(0, 1).mul_(options.scaling)
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    return logits


def visible(first: int, last: int, window: int | None, device: torch.device) -> Bool[Tensor, "R S"]:
    """Which keys each of the rows ``first … last - 1`` sees."""
    rows = torch.arange(first, last, device=device)[:, None]
    columns = torch.arange(last, device=device)
    seen: Tensor = columns <= rows
    return seen if window is None else seen & (columns > rows - window)


def probabilities(logits: Float[Tensor, "Hq R S"], sinks: Float[Tensor, " Hq"] | None) -> Float[Tensor, "Hq R S"]:
    """Softmax; a learned sink takes its part and is left out."""
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
    weights: Tensor = logits.softmax(dim=-1)
    return weights if sinks is None else weights[..., :-1]


@dataclass(frozen=True)
class Anatomy:
    """What one token tells about a model.

    Attributes:
        n_layers: layers with attention.
        n_heads: query heads of each.
        n_kv_heads: key-value heads of each.
        no_mlp: why the MLP blocks cannot be shown; ``None`` if they can.
        no_units: why their hidden units cannot be shown; ``None`` if they can.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    no_mlp: str | None
    no_units: str | None


class _FirstLook:
    """Remembers the shapes of what it is shown."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []
        self.units: list[bool] = []
        self.reasons: list[str] = []

    def rows(self, rows: Rows) -> None:
        self.heads.append((rows.weights.shape[0], rows.values.shape[0]))

    def mlp(self, mlp: Mlp) -> None:
        self.units.append(mlp.units is not None)


def look(model: Any, token: int) -> Anatomy:
    """Run one token to see what a walk will show.

    Raises:
        UnsupportedModelError: no layer has attention, or layers differ in their heads.
    """
    seen = _FirstLook()
    walk(model, torch.tensor([token]), seen, refuse=seen.reasons.append)
    if len(set(seen.heads)) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of these (query, key-value) heads: {sorted(set(seen.heads))}. "
            "Analyses compare layers head by head and need the same in all of them."
        )
    no_mlp = seen.reasons[0] if seen.reasons else None
    plain = None if seen.units and all(seen.units) else "its MLP blocks do not have one set of units for every token"
    return Anatomy(len(seen.heads), *seen.heads[0], no_mlp, no_mlp or plain)


@torch.inference_mode()
def walk(
    model: Any,
    tokens: Int[Tensor, " n"],
    sees: Sees,
    *,
    reads: frozenset[str] = frozenset({"attention", "mlp"}),
    block: int = BLOCK,
    progress: Callable[[float], object] = lambda share: None,
    refuse: Callable[[str], object] = lambda reason: None,
) -> None:
    """Run a text through a model and show every row of attention and every MLP block on the way.

    Args:
        model: the model, attached and in evaluation mode.
        tokens: the text.
        sees: what is shown.
        reads: what of both is shown.
        block: rows at a time.
        progress: called with the share of the work that is done; rows get longer, so it grows with their square.
        refuse: called with the reason where a layer's MLP block cannot be shown.

    Raises:
        InputError: the device's memory is too small.
        UnsupportedModelError: the model's attention cannot be reached.

    Cost:
        Keys and values of the text, and about eight tensors of ``heads · block · tokens`` float32.
    """
    cache = BoundedCache(model.config, "local", budget=1)
    take = sees.rows if "attention" in reads else None
    for number, (index, layer) in enumerate(cache.bounded_layers().items()):
        outer = cache.layers[index]
        assert isinstance(outer, BoundedLayer)
        outer.layer = Shown(number, index, layer.window, length=len(tokens), take=take)
    numbers = {index: number for number, index in enumerate(cache.bounded_layers())}
    with Watched(model, numbers if "mlp" in reads else {}, sees.mlp, refuse), enough_memory(model.device):
        for first in range(0, len(tokens), block):
            ids = tokens[None, first : first + block].to(model.device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            progress(((first + ids.shape[1]) / len(tokens)) ** 2)

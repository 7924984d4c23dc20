"""A walk: one pass over a text under the full cache, in blocks of queries, that shows every row of attention.

The model runs block by block over a cache that keeps everything. Each layer's softmax rows are computed from the
queries and keys that the model hands over, so scaling, groups, windows, soft caps and sinks are the model's own. One
block of one layer exists at a time: memory grows with the text, not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_probe import LayerStep, WholeHistory, probe_cache
from kvkeep.backends import reference
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import UnsupportedModelError
from kvkeep.models.device import enough_memory
from kvkeep_lab.analysis.measure import AttentionRows, Mlp
from kvkeep_lab.analysis.mlp_blocks import Watched

BLOCK = 128
"""Rows that are shown at a time."""
_FLOAT32 = 4


@runtime_checkable
class Sees(Protocol):
    """Takes the rows of a walk; `Measurement` is one."""

    def rows(self, rows: AttentionRows) -> None:
        """Take some rows of one layer's attention."""

    def mlp(self, mlp: Mlp) -> None:
        """Take some tokens of one layer's MLP block."""


class RowReader(WholeHistory):
    """Stands in for a layer, with full attention in float32, and hands on the rows of attention of each step.

    Args:
        number: the layer's number in `AttentionRows`.
        length: tokens of the text.
        take_rows: called with the rows; ``None`` if nobody reads them.
    """

    def __init__(self, number: int, *, length: int, take_rows: Callable[[AttentionRows], object] | None):
        super().__init__(length)
        self._number, self._take_rows = number, take_rows

    def attend(
        self, step: LayerStep, keys: Float[Tensor, "1 Hk S D"], values: Float[Tensor, "1 Hk S E"]
    ) -> Float[Tensor, "1 Hq T E"]:
        """Attend over all tokens so far and hand the rows on."""
        first = self.columns - step.query.shape[2]
        columns = torch.arange(self.columns, device=keys.device)[None]
        sees = reference.visible(columns[:, first:], columns[None], step.options.window)
        logits = reference.logits(step.query.float(), keys, sees, step.options)
        weights = reference.softmax(logits, step.options.sinks)
        out: Tensor = (weights @ values[:, :, None]).flatten(1, 2)
        if self._take_rows is not None:
            shown = (weights[0].flatten(0, 1), values[0], logits[0].flatten(0, 1))
            self._take_rows(AttentionRows(self._number, first, *(tensor.cpu() for tensor in shown)))
        return out


@dataclass(frozen=True)
class Anatomy:
    """The shape of a model, as one token shows it.

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
    """Remembers the shapes of everything that it is shown."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []
        self.units: list[bool] = []
        self.reasons: list[str] = []

    def rows(self, rows: AttentionRows) -> None:
        self.heads.append((rows.weights.shape[0], rows.values.shape[0]))

    def mlp(self, mlp: Mlp) -> None:
        self.units.append(mlp.units is not None)


def look(model: Any, token: int) -> Anatomy:
    """Run one token to find out what a walk will show.

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
        sees: takes the rows and the MLP blocks.
        reads: which of ``attention`` and ``mlp`` to show.
        block: rows at a time.
        progress: called with the share of the work that is done, which grows with the square of the tokens read.
        refuse: called with the reason if a layer's MLP block cannot be shown.

    Raises:
        InputError: the device's memory is too small.
        UnsupportedModelError: the model's attention cannot be reached.

    Cost:
        Keys and values of the text, and `walk_bytes`.
    """
    numbers = {index: number for number, index in enumerate(windows_of(model.config))}
    take_rows = sees.rows if "attention" in reads else None

    def reader(index: int) -> RowReader:
        return RowReader(numbers[index], length=len(tokens), take_rows=take_rows)

    cache, _ = probe_cache(model.config, reader)
    with Watched(model, numbers if "mlp" in reads else {}, sees.mlp, refuse), enough_memory(model.device):
        for first in range(0, len(tokens), block):
            ids = tokens[None, first : first + block].to(model.device)
            model(input_ids=ids, **handed(model, cache), use_cache=True, logits_to_keep=1)
            progress(((first + ids.shape[1]) / len(tokens)) ** 2)


def walk_bytes(query_heads: int, layer_bytes: int, tokens: int) -> int:
    """Estimate a walk's working memory: eight tensors of rows of attention, and a layer's keys and values in float32.

    Args:
        query_heads: number of query heads.
        layer_bytes: bytes of a token's keys and values in the largest layer, in float32.
        tokens: tokens of the text.
    """
    return tokens * (8 * query_heads * BLOCK * _FLOAT32 + layer_bytes)

"""Hidden units of MLP blocks: how often they are active, and the model with some of them silenced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep_lab.analysis.measure import Mlp, Rows, Skipped
from kvkeep_lab.analysis.mlp_blocks import decoder_layers, is_activation

RELATIVE = 0.01
"""Share of a layer's largest activation that an active unit exceeds, where activations are never exactly 0."""

CALIBRATION = 128
"""Number of first tokens of a text that give each layer's largest activation."""


class Frequencies:
    """Counts, for each unit of each layer, the tokens in which it is active.

    Args:
        n_layers: number of layers.
        halves_at: number of tokens in the first half of the text.
    """

    def __init__(self, n_layers: int, *, halves_at: int) -> None:
        self._halves_at = halves_at
        self._waiting: list[list[Mlp]] = [[] for _ in range(n_layers)]
        self._limit: list[float | None] = [None] * n_layers
        self._tokens = torch.zeros(n_layers, 2, dtype=torch.float64)
        self._positive: list[Tensor | None] = [None] * n_layers
        self._large: list[Tensor | None] = [None] * n_layers
        self._zeros = self._seen = 0

    def rows(self, rows: Rows) -> None:
        """Ignore attention."""

    def mlp(self, mlp: Mlp) -> None:
        """Count some tokens of a layer; the first ones wait until its largest activation is known.

        Raises:
            Skipped: the block has no activations of its own.
        """
        if mlp.units is None:
            raise Skipped("the MLP blocks of this model have no hidden activation for every token")
        if self._limit[mlp.layer] is None:
            self._waiting[mlp.layer].append(mlp)
            if mlp.first + len(mlp.units) >= CALIBRATION:
                self._settle(mlp.layer)
        else:
            self._count(mlp.layer, mlp.first, mlp.units)

    @property
    def has_zeros(self) -> bool:
        """Whether more than 1 % of the activations are exactly 0, as with ReLU."""
        self._finish()
        return self._zeros > 0.01 * self._seen

    def positive(self) -> list[Float[Tensor, " u"]]:
        """Per layer and unit: the share of tokens with an activation above 0."""
        self._finish()
        return [counts.sum(dim=0) / n.sum() for counts, n in zip(_all(self._positive), self._tokens, strict=True)]

    def large(self) -> list[Float[Tensor, " u"]]:
        """Per layer and unit: the share of tokens with a size above 1 % of the layer's largest in the first tokens."""
        self._finish()
        return [counts.sum(dim=0) / n.sum() for counts, n in zip(_all(self._large), self._tokens, strict=True)]

    def halves(self) -> tuple[list[Float[Tensor, " u"]], list[Float[Tensor, " u"]]]:
        """As `positive`, for each half of the text alone."""
        self._finish()
        pairs = [counts / n.clamp(min=1)[:, None] for counts, n in zip(_all(self._positive), self._tokens, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _finish(self) -> None:
        for layer, limit in enumerate(self._limit):
            if limit is None and self._waiting[layer]:
                self._settle(layer)

    def _settle(self, layer: int) -> None:
        waiting, self._waiting[layer] = self._waiting[layer], []
        units = torch.cat([mlp.units for mlp in waiting if mlp.units is not None])
        self._limit[layer] = RELATIVE * float(units[:CALIBRATION].abs().max())
        self._count(layer, waiting[0].first, units)

    def _count(self, layer: int, first: int, units: Float[Tensor, "R u"]) -> None:
        limit = self._limit[layer] or 0.0
        positive, large = self._positive[layer], self._large[layer]
        if positive is None or large is None:
            positive, large = (torch.zeros(2, units.shape[1], dtype=torch.float64) for _ in range(2))
            self._positive[layer], self._large[layer] = positive, large
        cut = min(max(self._halves_at - first, 0), len(units))
        for half, part in enumerate((units[:cut], units[cut:])):
            positive[half] += (part > 0).sum(dim=0)
            large[half] += (part.abs() > limit).sum(dim=0)
            self._tokens[layer, half] += len(part)
        self._zeros += int((units == 0).sum())
        self._seen += units.numel()


class Hushed:
    """A context in which some hidden units of a model are silent: their activation is 0.

    Args:
        model: the model.
        units: the silent units of each layer with attention.

    Raises:
        Skipped: a layer has no activation function of its own, or several.
    """

    def __init__(self, model: nn.Module, units: Sequence[Bool[Tensor, " u"]]):
        config: Any = model.config
        layers = decoder_layers(model)
        if layers is None:
            raise Skipped("the model's list of decoder layers was not found")
        numbers = BoundedCache(config, "local", budget=1).bounded_layers()
        self._places = [(_activation(layers[index]), silent) for index, silent in zip(numbers, units, strict=True)]
        self._handles: list[Any] = []

    def __enter__(self) -> Hushed:
        for module, silent in self._places:
            self._handles.append(module.register_forward_hook(_silencer(silent)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def _activation(layer: nn.Module) -> nn.Module:
    found = [module for module in layer.modules() if is_activation(module)]
    if len(found) != 1:
        raise Skipped(f"a decoder layer has {len(found)} activation functions, so its hidden units cannot be silenced")
    return found[0]


def _silencer(silent: Bool[Tensor, " u"]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], made: Tensor) -> Tensor:
        return made.masked_fill(silent.to(made.device), 0.0)

    return hook


def _all(counts: list[Tensor | None]) -> list[Tensor]:
    """The counts of every layer.

    Raises:
        Skipped: a layer was never shown.
    """
    if any(found is None for found in counts):
        raise Skipped("the MLP blocks of this model were not found")
    return [found for found in counts if found is not None]

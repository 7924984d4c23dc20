"""A model before its weights are read: its shapes and limits, and how its weights are stored."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvkeep.planning.cost import ModelShape, Packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WHOLE = 0
"""Stands for all rows or all columns in the size of a group."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the weights of linear layers are stored.

    Attributes:
        method: its name in the configuration.
        bits: of a weight.
        group: rows (outputs) and columns (inputs) of a block of weights with a scale of its own; 0 means all.
        group_bits: of a block's scale and zero point.
        column_bits: of each input of a layer.
        kept: names or patterns of modules that stay in the model's dtype.
        head: whether the output layer is quantised too, unless it is among ``kept``.
        experts_only: whether other linear layers stay in the model's dtype.
    """

    method: str
    bits: int
    group: tuple[int, int] = (1, WHOLE)
    group_bits: int | float = 0
    column_bits: int = 0
    kept: tuple[str, ...] = ()
    head: bool = False
    experts_only: bool = False

    def size(self, outputs: int, inputs: int) -> float:
        """Return the bytes of a stored matrix with so many outputs and inputs, scales and zero points included."""
        rows, columns = self.group
        blocks = math.ceil(outputs / (rows or outputs)) * math.ceil(inputs / (columns or inputs))
        return (outputs * inputs * self.bits + blocks * self.group_bits + inputs * self.column_bits) / 8

    def keeps(self, name: str) -> bool:
        """Return whether the module of this dotted name is among those that stay in the model's dtype."""
        return any(_names(pattern, name) for pattern in self.kept)

    def __str__(self) -> str:
        blocks = {(1, WHOLE): "row", (WHOLE, WHOLE): "matrix"}.get(self.group)
        if blocks is None:
            blocks = f"{self.group[1]} weights of a row" if self.group[0] == 1 else f"block of {self.group}"
        scales = f" and {self.group_bits:g} more for every {blocks}" if self.group_bits else ""
        return f"{self.method}, {self.bits:g} bits{scales}"


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern means a module: by whole words of its dotted name, by the name's end, or as an
    expression (``re:…``) that matches its beginning.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:  # a configuration's text that is no expression means nothing
            return False
    return f".{pattern}." in f".{name}." or (bool(pattern) and name.endswith(pattern))


_NONE_PACKED = Packed()


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The shapes and limits of a model that kvkeep can run.

    Attributes:
        name: hub name, folder or configuration file.
        source: the configuration, or the folder or file in which it stands.
        shape: the model as numbers, with its layers that have keys and values, in order.
        indices: the numbers of these layers in the model.
        other_layers: number of layers without keys and values.
        dtype: of the checkpoint; ``None`` if the configuration does not say.
        trained_length: positions that the model was trained for; ``None`` if the configuration does not say.
        position_limit: positions in a table of learned ones; ``None`` if there is no such table.
        is_quantized: whether the checkpoint's weights are stored in fewer bits than their dtype has.
        scheme: how quantised weights are stored; ``None`` if there are none, or if their bytes are not known.
        packed: the quantised weights.
        file_bytes: bytes of all weights of a GGUF file, which stay packed on the device that is chosen by itself here;
            ``None`` for other models, and where they are unpacked.
    """

    name: str
    source: PreTrainedConfig | str
    shape: ModelShape
    indices: tuple[int, ...]
    other_layers: int = 0
    dtype: torch.dtype | None
    trained_length: int | None
    position_limit: int | None = None
    is_quantized: bool = False
    scheme: Scheme | None = None
    packed: Packed = _NONE_PACKED
    file_bytes: int | None = None

    @property
    def windows(self) -> dict[int, int | None]:
        """Return the sliding window of each layer with keys and values, by its number; ``None`` for full attention."""
        return {index: layer.window for index, layer in zip(self.indices, self.shape.layers, strict=True)}

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        """Return the model's configuration. It is read with transformers, once, if the model was counted without it."""
        if not isinstance(self.source, str):
            return self.source
        from kvkeep.models.load import quiet, read_config

        with quiet():
            return read_config(self.source)

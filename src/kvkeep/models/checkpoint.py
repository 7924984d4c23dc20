"""A model that kvkeep can run, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Model: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
"""Names for modules that do not import transformers."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that kvkeep can run, before its weights are read.

    Attributes:
        name: hub name or folder.
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        position_limit: positions in a table of learned ones; ``None`` if there is no such table.
        allow_pickle: whether weights may come from files that are not safetensors.
        parameters: number of parameters that the configuration describes; 0 if unknown.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    position_limit: int | None
    allow_pickle: bool
    parameters: int = 0

    @property
    def trained_length(self) -> int | None:
        """Return how many positions the model was trained for; ``None`` if its configuration does not say."""
        return trained_length(self.config)

    def max_model_len(self, *, slot_positions: bool) -> int | None:
        """Return the most tokens of a prompt and its answer: the trained length, or ``None`` under slot positions."""
        return None if slot_positions else self.trained_length


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return how many positions a model was trained for; ``None`` if its configuration does not say."""
    length: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has learned, which is its trained length; ``None`` if it has no table of them.

    A table of positions is an embedding, other than the tokens', with as many rows as the trained length, or up to two
    more.
    """
    limit = trained_length(model.config)
    tokens = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    if limit and any(0 <= table.num_embeddings - limit <= 2 for table in tables):  # OPT's has two more
        return limit
    return None

"""The model and the settings of an engine, as its snapshots name them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from kvkeep.cache.layer_layout import Layout
from kvkeep.errors import PolicyError
from kvkeep.models.load import Model, Tokenizer
from kvkeep.models.weight_hash import fingerprint
from kvkeep.policies.registry import spec
from kvkeep.snapshot import Fingerprint
from kvkeep.snapshot.fingerprint import hash_of_config, name_of_config, rule


@dataclass(eq=False)
class Identity:
    """The model and the settings of an engine.

    Attributes:
        model: the model, attached.
        tokenizer: the engine's, if it has one.
        chunk: prompt tokens per step; ``None``: a whole prompt.
        dtype: dtype of the keys; ``None`` before there are rows.
    """

    model: Model
    tokenizer: Tokenizer | None
    chunk: int | None
    dtype: str | None = None

    @property
    def weights(self) -> str:
        """A hash of the model's weights as they are now."""
        return fingerprint(self.model)

    @cached_property
    def _tokenizer_hash(self) -> str | None:
        """A hash of the tokens and their numbers."""
        if self.tokenizer is None or not hasattr(self.tokenizer, "get_vocab"):
            return None
        words = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(words).encode()).hexdigest()[:16]

    @cached_property
    def _config(self) -> str:
        return hash_of_config(self.model.config)

    def checked(self, layout: Layout) -> Layout:
        """The layout, if its profile of heads is one of these weights, or if it has none.

        Raises:
            InputError: the profile belongs to other weights.
        """
        if layout.profile is not None:
            layout.profile.check_weights(lambda: self.weights)
        return layout

    def fingerprint(self, layout: Layout, budget: int) -> Fingerprint:
        """Return what a memory belongs to.

        Args:
            layout: the policy, and how the budget is spread over the layers.
            budget: tokens kept per layer and head.
        """
        try:
            policy = spec(layout.policy)
        except PolicyError:  # it is not registered
            policy = str(layout.policy)
        return Fingerprint(
            model=name_of_config(self.model.config),
            config=self._config,
            policy=policy,
            budget=budget,
            layer_budget=rule(layout.layer_budget),
            head_budget=layout.head_budget,
            dtype=self.dtype,
            positions="true" if layout.rotation is None else "slot",
            chunk=self.chunk,
            kv_bits=layout.kv_bits,
            weights=self.weights,
            tokenizer=self._tokenizer_hash,
        )

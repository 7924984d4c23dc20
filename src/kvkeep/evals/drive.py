"""A model and its bounded cache, fed piece by piece: the same path as ``generate``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.evals.setup import PLAIN, Setup
from kvkeep.models.text import Writer
from kvkeep.policies.base import Policy

BATCH_TOKENS = 16_384
"""Prompt tokens that run through the model at once."""


class Drive:
    """Feeds one batch through a model with a cache of its own.

    Args:
        writer: the model.
        policy: the eviction policy.
        budgets: tokens kept per layer and head, one per row.
        first: identity of the first row for policies with randomness; the others count up from it.
        setup: how the cache is made, beside policy and budgets.
    """

    def __init__(self, writer: Writer, policy: Policy, budgets: Sequence[int], *, first: int = 0, setup: Setup = PLAIN):
        self.model = writer.model
        self.cache = setup.cache(writer.checkpoint, policy, budgets, first=first)
        self._real: Tensor | None = None

    @torch.inference_mode()
    def feed(
        self, ids: Int[Tensor, "B n"], real: Bool[Tensor, "B n"] | None = None, *, last_only: bool = False
    ) -> Float[Tensor, "B m V"]:
        """Run ``n`` new columns through the model.

        Args:
            ids: token ids.
            real: which of them are tokens; ``None``: all, and all before them too.
            last_only: compute the logits of the last column only.

        Returns:
            Logits of all ``n`` columns, or of the last one.
        """
        ids = ids.to(self.model.device)
        out = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=int(last_only),
            **({} if real is None else self._padding(real.to(ids.device))),
        )
        logits: Tensor = out.logits
        return logits

    def _padding(self, real: Bool[Tensor, "B n"]) -> dict[str, Tensor]:
        self._real = real if self._real is None else torch.cat([self._real, real], dim=1)
        positions = self._real.long().cumsum(dim=1)[:, -real.shape[1] :] - 1
        return {"attention_mask": self._real.long(), "position_ids": positions.clamp(min=0)}


def batches(lengths: Sequence[int]) -> list[slice]:
    """Cut rows into batches of at most `BATCH_TOKENS` columns (but at least one row each)."""
    size = max(1, BATCH_TOKENS // max(lengths))
    return [slice(start, start + size) for start in range(0, len(lengths), size)]


def left_padded(rows: Sequence[Int[Tensor, "_"]]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of different lengths as one batch, padded on the left, and which columns are tokens."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]

"""One run of the model over some rows, through the same cache and attention as ``generate``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.engine.choice import Trial
from kvkeep.engine.graph import Graphs
from kvkeep.engine.rows import Rows
from kvkeep.engine.scheduler import Batch
from kvkeep.errors import UnsupportedModelError
from kvkeep.models.load import Model

_ALONE = {
    "kosmos-2.5": "counts positions in a way of its own",
    "recurrent_gemma": "keeps the state of a sequence in the model instead of the cache",
}
"""Model types that cannot run several sequences at once, and why."""


class Runner:
    """Feeds batches to a model.

    Args:
        model: the model, attached.
        graphs: whether decode steps are recorded as CUDA graphs. On other devices nothing is recorded, but steps run
            as they would be recorded.

    Attributes:
        graphs: the recorded steps, or ``None``.

    Raises:
        UnsupportedModelError: the model's forward cannot run sequences of different lengths at once.
    """

    def __init__(self, model: Model, *, graphs: bool = False) -> None:
        self._model = model
        known = inspect.signature(model.forward).parameters
        why = _ALONE.get(model.config.model_type, None if "position_ids" in known else "takes no position_ids")
        if why is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} {why}, so an engine cannot run sequences of different lengths on it. Use "
                "model.generate with a BoundedCache."
            )
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self.graphs = Graphs(model, self._options) if graphs else None

    @torch.inference_mode()
    def run(self, batch: Batch, rows: Rows) -> Float[Tensor, "n V"]:
        """Feed a batch and return the logits after each row's last token; the next run may overwrite them."""
        if self.graphs is not None and (logits := self.graphs.run(batch, rows)) is not None:
            return logits
        device = self._model.device
        T = max(map(len, batch.tokens))
        ids, positions, real = [], [], []
        for first, tokens in zip(batch.positions, batch.tokens, strict=True):
            pad = T - len(tokens)  # in front, so that the last column holds every row's last token
            ids.append([0] * pad + list(tokens))
            positions.append([0] * pad + list(range(first, first + len(tokens))))
            real.append([False] * pad + [True] * len(tokens))
        trial = Trial.of(batch, rows)
        watch = None if trial is None else trial.watch
        mask = None if all(map(all, real)) else torch.tensor(real, device=device)
        out = self._model(
            input_ids=torch.tensor(ids, device=device),
            position_ids=torch.tensor(positions, device=device),
            attention_mask=mask,
            past_key_values=rows.part(batch.start, batch.stop, batch.phase, fresh=batch.fresh, watch=watch),
            use_cache=True,
            **self._options,
        )
        if trial is not None:
            trial.settle()
        last: Tensor = out.logits[:, -1]
        return last

    def forget(self) -> None:
        """Drop all recorded steps, because the rows that they read and write are about to go."""
        if self.graphs is not None:
            self.graphs.clear()

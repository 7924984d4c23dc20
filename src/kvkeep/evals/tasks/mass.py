"""Retained attention mass, teacher-forced: the share of the full cache's attention that falls on the tokens held.

The full cache runs once, and every layer's queries, keys and values are recorded. Each policy is replayed on that
record: the prompt as one chunk, then token by token. Before each token, the full cache's attention of that token to
the tokens held, and to itself, is added up. All policies get the same inputs, so only their choices differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_probe import LayerTape, tapes
from kvkeep.budget import by_head
from kvkeep.evals import task
from kvkeep.evals.forward import PLAIN, Drive, Setup
from kvkeep.evals.task import Options, Task, TaskOutcome
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy

PROMPT = 384
"""Tokens of the prompt. Prompt and rows together are no longer than the model's trained length."""

ROWS = 128
"""Tokens after the prompt; their attention is measured."""

TEXTS = 4
"""Texts, unless the user gives a limit."""


@final
@dataclass
class RetainedMass(Task):
    """Mean retained mass, beside that of the best fixed set in hindsight and of the best set for each row.

    Attributes:
        ids: the texts.
        rows: measured tokens of each text.
        text: the source of the texts.
        tapes: the record of each layer, by its number in the model.
        full: the full cache's attention of the measured rows, averaged over the query heads of a group.
    """

    name: ClassVar[str] = "mass"
    VERSION: ClassVar[int] = 1
    headline: ClassVar[str] = "mass"

    ids: Int[Tensor, "B T"]
    rows: int
    text: str
    tapes: dict[int, LayerTape] = field(default_factory=dict)
    full: dict[int, Float[Tensor, "B Hk R T"]] = field(default_factory=dict)

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> RetainedMass:
        """Return the task, with the text cut into texts of equal length; of a short text fewer ones, or a shorter one.

        Raises:
            InputError: the text has fewer tokens than `task.SHORTEST`.
        """
        length = min(PROMPT + ROWS, checkpoint.trained_length or PROMPT + ROWS)
        ids = task.windows(checkpoint, options, rows=options.limit or TEXTS, length=length)
        return cls(ids, max(1, ids.shape[1] * ROWS // (PROMPT + ROWS)), task.describe(options))

    def settings(self) -> dict[str, Any]:
        """Return the source and the number of the texts."""
        return {"text": self.text, "texts": self.ids.shape[0]}

    def cases(self) -> dict[str, list[int]]:
        """Return the only case, named by the length of the prompt and the number of measured rows."""
        return {f"prompt={self._prompt},rows={self.rows}": [self._prompt] * len(self.ids)}

    @property
    def new_tokens(self) -> int:
        """Return the number of measured rows."""
        return self.rows

    @property
    def _prompt(self) -> int:
        """Return the number of tokens before the measured ones."""
        return self.ids.shape[1] - self.rows

    def prepare(self, writer: Writer) -> None:
        """Run the full cache once, record every layer, and compute the attention of the measured rows."""
        self.tapes = tapes(writer.model, self.ids)
        self.full = {i: tape.weights(self._prompt).mean(dim=2).float() for i, tape in self.tapes.items()}

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Replay the policy on the full cache's record, token by token in every layer, and return the share of the full
        cache's attention that falls on the tokens held.
        """
        cache = Drive(writer, policy, budgets, setup=setup).cache  # the model does not run: its layers are fed alone
        layers = cache.bounded_layers()
        for index, tape in self.tapes.items():
            tape.feed(layers[index], 0, self._prompt)
        held: dict[int, list[Tensor]] = {index: [] for index in self.tapes}
        for row in range(self.rows):
            for index, tape in self.tapes.items():
                held[index].append(task.held(self.full[index][:, :, row], layers[index].store.positions))
                tape.feed(layers[index], self._prompt + row, self._prompt + row + 1)
        each = {i: by_head(layers[i].budgets, full.shape[1]) for i, full in self.full.items()}
        room = [max(sum(row) // len(row) for row in each[i]) for i in held]  # layers and heads may differ
        return TaskOutcome(
            self._score({i: torch.stack(rows, dim=-1) for i, rows in held.items()}, room), cache.memory()
        )

    def _score(self, held: dict[int, Float[Tensor, "B Hk R"]], room: Sequence[int]) -> dict[str, Any]:
        """Return the retained attention, that of the best sets, and the distance from these (``regret``).

        They are means over texts and rows: over all heads, and some also for each layer and head.

        Args:
            held: layer → attention to the tokens held, without each row's own.
            room: the tokens that the best sets of each layer may have.
        """
        full = [self.full[index] for index in held]
        mass = _per_head([h + task.own(p) for h, p in zip(held.values(), full, strict=True)])
        dynamic = _per_head([task.best_dynamic(p, n) for p, n in zip(full, room, strict=True)])
        static = _per_head([task.best_static(p, n) for p, n in zip(full, room, strict=True)])
        return {
            "mass": _mean(mass),
            "best_dynamic": _mean(dynamic),
            "best_static": _mean(static),
            "regret": max(0.0, _mean(dynamic) - _mean(mass)),  # nothing beats the best set but by rounding
            "regret_static": _mean(static) - _mean(mass),  # below 0 if a set that changes holds more
            "n": self.rows * len(self.ids),
            "layers": list(held),
            "mass_by_head": mass,
            "best_dynamic_by_head": dynamic,
            "best_static_by_head": static,
        }


def _per_head(layers: Sequence[Float[Tensor, "B Hk R"]]) -> list[list[float]]:
    """Return the mean over texts and rows for each layer and KV head."""
    return [[round(value, 7) for value in layer.double().mean(dim=(0, 2)).tolist()] for layer in layers]


def _mean(layers: list[list[float]]) -> float:
    """Return the mean over layers and heads."""
    values = [value for layer in layers for value in layer]
    return sum(values) / len(values)

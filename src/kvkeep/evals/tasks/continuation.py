"""Perplexity of what follows a text that was cut: the text's own next tokens, fed one by one.

The text is one chunk and is then cut to the budget. The first token after it follows from the whole text and is the
same for every policy, so it does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.evals import task
from kvkeep.evals.forward import PLAIN, Drive, Setup, batches
from kvkeep.evals.task import Options, Task, TaskOutcome
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

TEXT = 1024
"""Tokens of a text before the cut; text and new tokens together are at most the trained length."""

TEXTS = 8
"""Default number of texts."""

NEW = 64
"""Tokens after the cut that count."""


@final
@dataclass(frozen=True)
class Continuation(Task):
    """Perplexity per token of the tokens after the cut, without the first of them.

    Attributes:
        ids: the texts, each with what follows it.
        new: tokens after the cut that count.
        text: the source of the texts.
    """

    name: ClassVar[str] = "continuation"
    VERSION: ClassVar[int] = 1
    headline: ClassVar[str] = "perplexity"

    ids: Int[Tensor, "B n"]
    new: int
    text: str

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Continuation:
        """Return the task, with the source cut into texts and what follows each; a short source gives fewer or shorter
        ones.

        Raises:
            InputError: the source has fewer tokens than `task.SHORTEST`.
        """
        room = checkpoint.trained_length or TEXT + NEW + 1
        new = min(NEW, max(1, room // 8))
        length = min(TEXT, room - new - 1) + new + 1
        ids = task.windows(checkpoint, options, rows=options.limit or TEXTS, length=length)
        # the whole source may be shorter than the texts that were asked for
        return cls(ids, min(new, max(1, ids.shape[1] // 8)), task.describe(options))

    def settings(self) -> dict[str, Any]:
        """Return the source and the number of the texts."""
        return {"text": self.text, "texts": self.ids.shape[0]}

    def cases(self) -> dict[str, list[int]]:
        """Return the only case, named by the lengths of the texts and of their continuations."""
        return {f"text={self._before},new={self.new}": [self._before] * len(self.ids)}

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens after the eviction."""
        return self.new + 1

    @property
    def _before(self) -> int:
        """Return how many tokens are read before the cut."""
        # the first token after the cut is fed but not measured: its logits come from the whole text
        return self.ids.shape[1] - self.new - 1

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Read the texts under a policy, feed what follows token by token, and return the perplexity."""
        losses, memory = [], MemoryUsage()
        for at in batches([self.ids.shape[1]] * len(self.ids)):
            drive = Drive(writer, policy, budgets[at], first=at.start, setup=setup)
            losses.append(self._losses(drive, self.ids[at]))
            memory += drive.cache.memory()
        return TaskOutcome(_score(torch.cat(losses)), memory)

    def _losses(self, drive: Drive, ids: Int[Tensor, "B n"]) -> Float[Tensor, "B new"]:
        """Feed a batch, the text at once and what follows it token by token, and return the loss of each measured token
        after the cut, in nats.
        """
        drive.feed(ids[:, : self._before], last_only=True)  # what follows from the whole text does not count
        found = []
        for column in range(self._before, ids.shape[1] - 1):
            logits = drive.feed(ids[:, column : column + 1])
            found.append(task.nll(logits, ids[:, column + 1 : column + 2].to(logits.device)).cpu())
        return torch.cat(found, dim=1)


def _score(losses: Float[Tensor, "B new"]) -> dict[str, Any]:
    """Return the score of losses: perplexity and mean loss over all tokens, their number, and each text's mean loss, by
    which policies are compared text by text.
    """
    mean = losses.double().mean().item()
    by_text = [round(loss, 6) for loss in losses.double().mean(dim=1).tolist()]
    # e^710 is more than a float holds
    return {"perplexity": math.exp(min(mean, 700.0)), "nll": mean, "n": losses.numel(), "nll_by_text": by_text}

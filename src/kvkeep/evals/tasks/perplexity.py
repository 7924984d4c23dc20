"""Perplexity of running text under eviction, by position.

Each window is a row. It is fed in pieces of ``stride`` tokens from its first token on. After every piece the cache is
cut to the budget, so a token sees at most the budget and its own piece. With stride 1 this is decoding.
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
from kvkeep.evals.task import Options, Task, TaskOutcome, check_positions, past_training
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

WINDOW = 1024
"""Default tokens of a window; fewer if the model was trained for fewer."""

WINDOWS = 8
"""Default number of windows."""


@final
@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity per token, without the first token of each window.

    Attributes:
        ids: the windows.
        stride: tokens that are fed at once.
        text: the source of the windows.
        notes_: what `notes` returns, whose name is taken by the property.
    """

    name: ClassVar[str] = "perplexity"
    VERSION: ClassVar[int] = 1
    headline: ClassVar[str] = "perplexity"

    ids: Int[Tensor, "B T"]
    stride: int
    text: str
    notes_: tuple[str, ...] = ()

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Perplexity:
        """Return the task, with the text cut into windows of equal length; a short text gives fewer or shorter ones.

        Raises:
            InputError: the text is too short, or the model has too few learned positions for a window.
        """
        length = options.window or min(WINDOW, checkpoint.trained_length or WINDOW)
        check_positions(checkpoint, length, cls.name, "window")
        ids = task.windows(checkpoint, options, rows=options.limit or WINDOWS, length=length)
        notes = past_training(checkpoint, ids.shape[1], "perplexity")
        return cls(ids, options.stride, task.describe(options), tuple(notes))

    def settings(self) -> dict[str, Any]:
        """Return the source of the text, and the number of windows."""
        return {"text": self.text, "windows": self.ids.shape[0]}

    def cases(self) -> dict[str, list[int]]:
        """Return the only case, named by window and stride."""
        rows, length = self.ids.shape
        return {f"window={length},stride={self.stride}": [length] * rows}

    @property
    def new_tokens(self) -> int:
        """Return 0, since no token follows a window."""
        return 0

    @property
    def notes(self) -> list[str]:
        """Return the notes about windows longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Feed all windows in pieces under a policy, and return the perplexity."""
        losses, memory = [], MemoryUsage()
        for at in batches([self.ids.shape[1]] * len(self.ids)):
            drive = Drive(writer, policy, budgets[at], first=at.start, setup=setup)
            losses.append(feed_in_pieces(drive, self.ids[at], self.stride))
            memory += drive.cache.memory()
        return TaskOutcome(_score(torch.cat(losses)), memory)


def feed_in_pieces(drive: Drive, ids: Int[Tensor, "B T"], stride: int) -> Float[Tensor, "B n"]:
    """Feed rows in pieces of ``stride`` tokens, and return the loss in nats of every token but the first, ``n = T -
    1``.
    """
    pieces = []
    for start in range(0, ids.shape[1] - 1, stride):
        stop = min(start + stride, ids.shape[1] - 1)  # nothing follows the last token
        logits = drive.feed(ids[:, start:stop])
        pieces.append(task.nll(logits, ids[:, start + 1 : stop + 1].to(logits.device)).cpu())
    return torch.cat(pieces, dim=1)


def _score(losses: Float[Tensor, "B n"]) -> dict[str, Any]:
    """Return the score of losses: perplexity and mean loss of all tokens, their number, and the mean loss in each range
    of positions of the predicted token (`task.position_buckets`).
    """
    mean = losses.double().mean().item()
    buckets = [
        {"from": start, "to": stop, "n": part.numel(), "nll": part.double().mean().item()}
        for start, stop in task.position_buckets(losses.shape[1] + 1)
        for part in [losses[:, start - 1 : stop - 1]]
    ]
    # e^710 is more than a float holds
    return {"perplexity": math.exp(min(mean, 700.0)), "nll": mean, "n": losses.numel(), "buckets": buckets}

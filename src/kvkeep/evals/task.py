"""What a task is: questions or texts made with the tokenizer alone, a reference by the full cache, and a run."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.errors import InputError
from kvkeep.evals.drive import PLAIN, Setup
from kvkeep.memory import Memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer
from kvkeep.models.tiny.recall import most_facts
from kvkeep.models.tiny.wordings import HELD_OUT
from kvkeep.policies.base import Policy

SHORTEST_WINDOW = 16
"""Tokens of a perplexity window, at least."""

ASK = ("prompt", "later")
"""When the question of a recall prompt comes: with the text, or after the text was cut to the budget."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user can choose about tasks.

    Attributes:
        seed: chooses questions, windows of a text, and the package's own text.
        limit: questions per context, or texts, instead of each task's own number.
        text: content of a text file; ``None`` for the package's own text.
        contexts: lengths of recall prompts in tokens.
        facts: facts in a recall prompt.
        depths: where asked facts stand, in [0, 1]; empty for evenly spread.
        ask: ``prompt``: the policy has read the question when it cuts the text; ``later``: it has not.
        window: tokens of a perplexity window; ``None`` for 1024, or the trained length if that is less.
        stride: tokens that perplexity feeds at once.
    """

    seed: int = 0
    limit: int | None = None
    text: str | None = None
    contexts: tuple[int, ...] = (512, 1024)
    facts: int = 16
    depths: tuple[float, ...] = ()
    ask: str = "prompt"
    window: int | None = None
    stride: int = 16

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: one is out of range.
        """
        low = {"--limit": self.limit, "--context": min(self.contexts, default=0), "--facts": self.facts}
        for name, value in {**low, "--window": self.window, "--stride": self.stride}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} {value} leaves nothing to measure; give 1 or more.")
        if self.window is not None and self.window < SHORTEST_WINDOW:
            raise InputError(f"--window {self.window} is too short to say anything; give {SHORTEST_WINDOW} or more.")
        if self.facts > (most := most_facts(HELD_OUT)):
            raise InputError(f"--facts {self.facts} is more than there are names and things for; give {most} or fewer.")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"--depths {self.depths}: a depth is a share of the text, from 0 (start) to 1 (end).")
        if self.ask not in ASK:
            raise InputError(f"--ask {self.ask!r} is no way to ask; use {' or '.join(ASK)}.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"--seed {self.seed} is outside 0 … 2^31 - 1.")


@dataclass(frozen=True)
class Outcome:
    """What a run of a task measured.

    Attributes:
        score: the numbers of the row; plain data for JSON.
        memory: what the caches held at the end, summed over batches.
    """

    score: dict[str, Any]
    memory: Memory


class Task(abc.ABC):
    """One task. `load` makes it, `prepare` runs the full cache where that is needed, `run` measures one policy.

    Class attributes:
        name: the task's name, as the user writes it.
        VERSION: raised by every change that changes results; stored with them, and never mixed.
        headline: the one number of `Outcome.score` that stands in tables.
    """

    name: ClassVar[str]
    VERSION: ClassVar[int]
    headline: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Task:
        """Make the task's data; needs no weights.

        Raises:
            InputError: the data or the options cannot be used with this model.
        """

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that results depend on, besides the model and what a case's name says."""

    @abc.abstractmethod
    def cases(self) -> dict[str, list[int]]:
        """The task's parts, each with the lengths that a budget in percent refers to, one per row, in tokens."""

    @property
    @abc.abstractmethod
    def new_tokens(self) -> int:
        """Tokens that follow after those of `cases`, which a policy without eviction needs room for."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the results should know."""
        return []

    def prepare(self, writer: Writer) -> None:  # noqa: B027  (most tasks need nothing)
        """Run the full cache for what all policies are compared with; called once, before the first run."""

    @abc.abstractmethod
    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> Outcome:
        """Measure one policy with these budgets, one per row of the case, in caches that are made like this."""


def check_positions(checkpoint: Checkpoint, tokens: int, task: str, option: str) -> None:
    """Refuse what would run over the end of a table of learned positions.

    Raises:
        InputError: it would.
    """
    limit = checkpoint.position_limit
    if limit is not None and tokens > limit:
        raise InputError(
            f"{task} needs {tokens} positions, and {checkpoint.name} has learned only {limit}. No eviction policy "
            f"changes that: give a smaller {option}, or choose a model with rotary positions."
        )


def past_training(checkpoint: Checkpoint, tokens: int, task: str) -> list[str]:
    """A note if a text is longer than the model was trained for."""
    trained = checkpoint.trained_length
    if trained is None or tokens <= trained:
        return []
    return [f"{task}: {tokens} tokens are more than the {trained} that the model was trained for."]

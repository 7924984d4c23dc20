"""The seam of tasks that read a text, are asked about it, and grade the reply: they only make `Item`s and grade them.

As in recall, a question is read before the cut (``ask=inside``) or follows the cut (``ask=later``).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import metrics, replies
from kvkeep.evals.drive import PLAIN, Drive, Setup
from kvkeep.evals.replies import Replies
from kvkeep.evals.task import Options, Outcome, Task, check_positions, past_training
from kvkeep.kv.memory_usage import Memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.tokenization import Writer, encode, encode_rest
from kvkeep.policies.base import Policy

_MOST = 8
"""Parts for each token of a prompt beyond which no longer text is looked for."""

_Made = TypeVar("_Made", bound="Answered")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A text, a question about it, and what a right reply has.

    Attributes:
        text: the text.
        question: follows the text directly.
        lead: the beginning of the reply, which the model continues.
        answers: the right answers.
        classes: all classes, for tasks that grade by them.
        depth: where the answer stands in the text, in [0, 1]; ``None`` if it has no place.
        chat: whether a chat template may be used.
    """

    text: str
    question: str
    lead: str = ""
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    depth: float | None = None
    chat: bool = True


@dataclass(frozen=True)
class Prompt:
    """An item as tokens; see `kvkeep.evals.replies.Prompt`."""

    item: Item
    ids: Int[Tensor, " n"]
    first: int
    document: int
    number: int = 0


@dataclass(frozen=True)
class Case:
    """A part of a task.

    Attributes:
        prompts: its questions.
        new: most tokens of a reply.
        grade: grades a reply, in [0, 1].
    """

    prompts: list[Prompt]
    new: int
    grade: Callable[[Item, str], float]


@dataclass(frozen=True)
class Answered(Task):
    """A task of items. A subclass has a name, a version, and `make`."""

    headline: ClassVar[str] = "score"
    items: ClassVar[int] = 20
    """Default number of items per case."""

    options: Options
    made: dict[str, Case]
    about: dict[str, Any]
    notes_: tuple[str, ...] = ()

    @classmethod
    def load(cls: type[_Made], checkpoint: Checkpoint, options: Options) -> _Made:
        """Make the items.

        Raises:
            InputError: the data cannot be used, or a text cannot be made as short as was asked.
        """
        later = ",ask=later" if options.ask == "later" else ""
        about: dict[str, Any] = {"items": options.limit or cls.items}
        notes: list[str] = []
        made = {f"{name}{later}": case for name, case in cls.make(checkpoint, options, about, notes).items()}
        longest = max(len(prompt.ids) + case.new for case in made.values() for prompt in case.prompts)
        check_positions(checkpoint, longest, cls.name, "contexts")
        return cls(options, made, about, (*notes, *past_training(checkpoint, longest, cls.name)))

    @classmethod
    @abc.abstractmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> Mapping[str, Case]:
        """The cases by name.

        Args:
            checkpoint: the model.
            options: the user's choices.
            about: gets everything that results depend on beside the names of cases.
            notes: gets notes for the user.

        Raises:
            InputError: see `load`.
        """

    def settings(self) -> dict[str, Any]:
        """Everything that results depend on."""
        return self.about

    def cases(self) -> dict[str, list[int]]:
        """Each case, with the lengths of its prompts, or of its texts if questions are asked later."""
        later = self.options.ask == "later"
        return {
            name: [prompt.first if later else len(prompt.ids) for prompt in case.prompts]
            for name, case in self.made.items()
        }

    @property
    def new_tokens(self) -> int:
        """Tokens of the longest reply, and of the longest question if it is asked later."""
        later = self.options.ask == "later"
        return max(
            case.new + (len(prompt.ids) - prompt.first if later else 0)
            for case in self.made.values()
            for prompt in case.prompts
        )

    @property
    def notes(self) -> list[str]:
        """Notes about texts that were cut, left out, or longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> Outcome:
        """Ask all questions of a case, and grade the replies."""
        made, done = self.made[case], list(self._ask(writer, case, policy, budgets, setup))
        texts = [text for batch in done for text in batch.texts]
        grades = self.grades(case, texts)
        kept = torch.cat([batch.kept for batch in done]).mean(dim=0)
        score = {
            **_score(made.prompts, grades),
            **self.more(case, texts),
            "kept": [round(share, 6) for share in kept.tolist()],
        }
        return Outcome(score, sum((batch.memory for batch in done), Memory()))

    def grades(self, case: str, texts: Sequence[str]) -> list[float]:
        """The grade of each reply."""
        made = self.made[case]
        return [made.grade(prompt.item, text) for prompt, text in zip(made.prompts, texts, strict=True)]

    def more(self, case: str, texts: Sequence[str]) -> dict[str, Any]:
        """Further numbers of a case's score, from all replies together."""
        return {}

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup
    ) -> Iterator[Replies]:
        def drive(at: Sequence[int], first: int) -> Drive:
            return Drive(writer, policy, [budgets[i] for i in at], first=first, setup=setup)

        ask = replies.later if self.options.ask == "later" else replies.inside
        return ask(writer, self.made[case].prompts, drive, self.made[case].new)


def _score(prompts: Sequence[Prompt], grades: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "score": sum(grades) / len(grades),
        "n": len(grades),
        "grades": [round(grade, 4) for grade in grades],
    }
    by_depth = [[0.0, 0] for _ in range(metrics.TENTHS)]
    for prompt, grade in zip(prompts, grades, strict=True):
        if prompt.item.depth is not None:
            place = by_depth[metrics.tenth_of(prompt.item.depth)]
            place[0], place[1] = round(place[0] + grade, 4), place[1] + 1
    return found | ({"by_depth": by_depth} if any(n for _, n in by_depth) else {})


class TooShortError(InputError):
    """An item does not fit into its context."""


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompt_of(checkpoint: Checkpoint, item: Item, ask: str, document: int) -> Prompt:
    """An item as tokens, in the chat template if there is one and the item may use it."""
    ids = tokens_of(checkpoint, item)
    if ask != "later":
        return Prompt(item, ids, len(ids) - 1, document)
    other = encode(checkpoint, f"{item.text} ;", raw=not item.chat)[0]
    size = min(len(ids), len(other))
    differs = (ids[:size] != other[:size]).nonzero()
    same = int(differs[0]) if len(differs) else size
    return Prompt(item, ids, max(1, min(same, len(ids) - 1)), document)


def tokens_of(checkpoint: Checkpoint, item: Item) -> Int[Tensor, " n"]:
    """The tokens of text, question and lead."""
    if not item.chat or checkpoint.tokenizer.chat_template is None:
        return encode(checkpoint, f"{item.text}{item.question}{item.lead}", raw=True)[0]
    ids = encode(checkpoint, f"{item.text}{item.question}")[0]
    return torch.cat([ids, encode_rest(checkpoint, item.lead.strip())[0]]) if item.lead.strip() else ids


def fitting(checkpoint: Checkpoint, make: Callable[[int], Item], room: int, least: int, about: str) -> Item:
    """The longest item that has at most ``room`` tokens.

    Args:
        checkpoint: the model.
        make: makes an item from a number of parts, such as sentences; more parts make a longer text, unless there are
            no more (a single document).
        room: most tokens of the prompt.
        least: fewest parts.
        about: the item's name in messages.

    Raises:
        TooShortError: even the fewest parts have more tokens.
    """
    low, high = least, least
    if (size := len(tokens_of(checkpoint, make(low)))) > room:
        raise TooShortError(
            f"{about} cannot be made: its shortest prompt has {size} tokens, and {max(0, room)} are left for it."
        )
    step = max(1, least, math.ceil(room / 64))
    while len(tokens_of(checkpoint, make(high + step))) <= room:
        high, step = high + step, 2 * step
        if step > _MOST * room:
            return make(high)
    low, high = high, high + step
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(tokens_of(checkpoint, make(middle))) <= room
        low, high = (middle, high) if fits else (low, middle)
    return make(low)

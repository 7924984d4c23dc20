"""Multiple choice with solved examples, as in the tables of H2O: the likeliest choice counts.

The examples and the question are one chunk, which is cut to the budget (``ask=inside``), or the examples alone are
(``ask=later``). The choices follow token by token in copies of that memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from kvkeep.errors import InputError
from kvkeep.evals import choices, parts, sources
from kvkeep.evals.choices import Choice
from kvkeep.evals.drive import PLAIN, Setup
from kvkeep.evals.harness.scoring import Bounded, Pair, scores
from kvkeep.evals.task import Options, Outcome, Task, check_positions, past_training
from kvkeep.kv.memory_usage import Memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.tokenization import Writer, encode
from kvkeep.policies.base import Policy

QUESTIONS = 100
"""Default number of questions per data set."""

_BETWEEN = "\n\n"


@dataclass(frozen=True)
class _Asked:
    """A question as tokens: a pair for each choice, and the lengths of the choices in characters."""

    pairs: tuple[Pair, ...]
    sizes: tuple[int, ...]
    right: int


@dataclass(frozen=True)
class _Given:
    """Budgets by the length of a text."""

    numbers: dict[int, int]

    def of(self, length: int) -> int:
        return self.numbers[length]


@final
@dataclass(frozen=True)
class MultipleChoice(Task):
    """Share of questions whose right choice is the likeliest one, one case per data set."""

    name: ClassVar[str] = "choice"
    VERSION: ClassVar[int] = 1
    headline: ClassVar[str] = "score"

    options: Options
    asked: dict[str, list[_Asked]]
    notes_: tuple[str, ...]

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> MultipleChoice:
        """Make the questions.

        Raises:
            InputError: a file is missing or of another format, or there are too few examples.
        """
        if options.ask == "later" and not options.shots:
            raise InputError("shots=0 leaves nothing to cut before the question: give examples, or ask inside.")
        chosen = parts.chosen(cls.name, options.parts, choices.NAMES, choices.known_in(options.data) or choices.NAMES)
        later = ",ask=later" if options.ask == "later" else ""
        asked = {f"{name},shots={options.shots}{later}": _all(checkpoint, options, name) for name in chosen}
        longest = max(len(p.context) + len(p.continuation) for found in asked.values() for q in found for p in q.pairs)
        check_positions(checkpoint, longest, cls.name, "shots")
        return cls(options, asked, tuple(past_training(checkpoint, longest, cls.name)))

    def settings(self) -> dict[str, Any]:
        """The number of questions, and a hash of the files."""
        data = sources.fingerprint(self.options.data, list(choices.SOURCES.values()))
        return {"questions": self.options.limit or QUESTIONS, "data": data}

    def cases(self) -> dict[str, list[int]]:
        """Each data set, with the length of every context, or of its examples if the question comes later."""
        return {name: [pair.length for one in found for pair in one.pairs] for name, found in self.asked.items()}

    @property
    def new_tokens(self) -> int:
        """Tokens after the cut of the longest context and choice."""
        return max(
            len(pair.context) - pair.first + len(pair.continuation)
            for found in self.asked.values()
            for one in found
            for pair in one.pairs
        )

    @property
    def notes(self) -> list[str]:
        """Notes about texts longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> Outcome:
        """Score all choices of a data set."""
        pairs = [pair for one in self.asked[case] for pair in one.pairs]
        given = _Given({pair.length: budget for pair, budget in zip(pairs, budgets, strict=True)})
        memories: list[Memory] = []
        bounded = Bounded(writer=writer, policy=policy, budget=given, setup=setup, on_memory=memories.append)
        found = dict(scores(bounded, pairs))
        values = iter(found[place][0] for place in range(len(pairs)))
        return Outcome(
            _score([[next(values) for _ in one.pairs] for one in self.asked[case]], self.asked[case]),
            sum(memories, Memory()),
        )


def _all(checkpoint: Checkpoint, options: Options, name: str) -> list[_Asked]:
    """The questions of a data set, each with examples of its own."""
    found = choices.questions(name, options.data)
    if len(found) <= options.shots:
        raise InputError(f"{name} has {len(found)} questions, too few for shots={options.shots} and one to ask.")
    n = min(options.limit or QUESTIONS, len(found))
    return [_one(checkpoint, options, name, found, (options.seed * n + i) % len(found)) for i in range(n)]


def _one(checkpoint: Checkpoint, options: Options, name: str, found: Sequence[Choice], number: int) -> _Asked:
    others = [i for i in range(len(found)) if i != number]
    shown = random.Random(f"{name} {options.seed} {number}").sample(others, options.shots)
    before = "".join(found[i].solved + _BETWEEN for i in shown)
    one = found[number]
    later = options.ask == "later"
    pairs = tuple(
        _pair(checkpoint, before, context, choice, later)
        for context, choice in zip(one.contexts, one.choices, strict=True)
    )
    return _Asked(pairs, tuple(len(choice) for choice in one.choices), one.right)


def _pair(checkpoint: Checkpoint, before: str, context: str, choice: str, later: bool) -> Pair:
    whole, prompt = (_tokens(checkpoint, text) for text in (before + context + choice, before + context))
    first = len(prompt) - 1
    if later:
        examples = _tokens(checkpoint, before.removesuffix(_BETWEEN))
        same = (i for i, (a, b) in enumerate(zip(examples, prompt, strict=False)) if a != b)
        first = min(next(same, len(examples)), first)
    first = max(1, first)
    return Pair(prompt, whole[len(prompt) :], first, first if later else len(prompt))


def _tokens(checkpoint: Checkpoint, text: str) -> tuple[int, ...]:
    return tuple(encode(checkpoint, text, raw=True)[0].tolist())


def _score(found: Sequence[Sequence[float]], asked: Sequence[_Asked]) -> dict[str, Any]:
    """Accuracy by log-likelihood, and by log-likelihood per character (lm-eval's ``acc`` and ``acc_norm``)."""
    rights, normed = [], []
    for values, one in zip(found, asked, strict=True):
        rights.append(max(range(len(values)), key=values.__getitem__) == one.right)
        shares = [value / size for value, size in zip(values, one.sizes, strict=True)]
        normed.append(max(range(len(shares)), key=shares.__getitem__) == one.right)
    n = len(asked)
    guess = sum(1 / len(one.pairs) for one in asked) / n
    return {
        "score": sum(rights) / n,
        "normed": sum(normed) / n,
        "n": n,
        "guess": guess,
        "grades": [float(right) for right in rights],
    }

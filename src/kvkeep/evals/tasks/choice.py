"""Multiple choice with solved examples, as in the tables of H2O: the likeliest choice counts.

The examples and the question are one chunk, which is cut to the budget (``ask=inside``), or the examples alone are
(``ask=later``). The choices follow token by token in copies of that memory.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from kvkeep.errors import InputError
from kvkeep.evals import datasets, task
from kvkeep.evals.datasets import HubDataset, Source, text
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.lm_eval.scoring import BoundedModel, ContextPair, scores
from kvkeep.evals.task import Options, Task, TaskOutcome, check_positions, past_training
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer, encode
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

# Multiple-choice questions from public files: COPA, OpenBookQA, ARC, PIQA, WinoGrande, MathQA, RTE and HellaSwag.
#
# A file ``NAME.jsonl`` has the format of the data set's authors, or the rows of the hub's copy; ``NAME.json`` has that
# of LLM-Adapters: a list of objects with ``instruction`` and ``answer``.

# MathQA's options: "a ) 38 , b ) 27", also with capitals, in a list's brackets and quotes, or with the letter twice
_OPTION = re.compile(r"""(?:^|,)[\s\['"]*([a-eA-E])\s*\)(?:\s*\1\s*\))?""")
# LLM-Adapters' choices: "Answer1: a cat Answer2: a dog"
_MARK = re.compile(r"(?:Answer|Solution|Option)(\d): ")


@dataclass(frozen=True)
class Choice:
    """A question.

    Attributes:
        contexts: the text before each choice; the same for all choices, but in WinoGrande.
        choices: what may follow.
        right: the number of the right one.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    right: int

    @property
    def solved(self) -> str:
        """Return the question with its answer, as a solved example."""
        return self.contexts[self.right] + self.choices[self.right]


def questions(name: str, data: str | None) -> list[Choice]:
    """Return all questions of a data set.

    Args:
        name: the data set, one of `NAMES`.
        data: the folder with its file, or ``hub``.

    Raises:
        InputError: the data set is missing, or an entry has another format.
    """
    found = datasets.rows(data, SOURCES[name], f"choice's {name}")
    adapted = found.name.endswith(".json")
    return found.read(lambda row: _adapted(name, row) if adapted else _READERS[name](row), f"question of {name}")


def _adapted(name: str, row: Mapping[str, str]) -> Choice:
    """Return the question of an entry of LLM-Adapters' file for a data set, where question and choices are one text.

    Raises:
        ValueError: there are no choices, or the answer is none of them.
    """
    if name == "mathqa":
        question, _, options = row["instruction"].rpartition("The options:")
        return _mathqa({"Problem": question, "options": options, "correct": row["answer"]})
    before, _, _ = row["instruction"].partition("Answer format:")
    # the words before the first colon only ask for a choice
    asked, *rest = _MARK.split(before.split(": ", 1)[1])
    choices = [part.strip() for part in rest[1::2]]  # between them stand the numbers of `_MARK`
    right = int(re.sub(r"\D", "", row["answer"])) - 1  # an answer is a word with a number, such as "solution1"
    if not choices or not all(choices) or not 0 <= right < len(choices):
        raise ValueError("no choices, or another answer")
    if name == "winogrande":
        return _filled(asked.strip(), choices, right)
    return _asked(name, asked.strip(), choices, right)


def _asked(name: str, question: str, choices: list[str], right: int) -> Choice:
    """Return a question in lm-eval's wording: OpenBookQA's choices continue the question, others answer it."""
    context = question if name == "openbookqa" else f"Question: {question}\nAnswer:"
    return Choice((context,) * len(choices), tuple(f" {choice}" for choice in choices), right)


def _filled(sentence: str, options: list[str], right: int) -> Choice:
    """Return a question of WinoGrande: the contexts are the sentence up to its blank with each option in it, and every
    choice is the same rest of the sentence.

    Raises:
        ValueError: the sentence has no blank.
    """
    before, blank, after = sentence.partition("_")
    if not blank:
        raise ValueError("the sentence has no blank")
    return Choice(tuple(before + option for option in options), (f" {after.strip()}",) * len(options), right)


def _copa(row: Mapping[str, Any]) -> Choice:
    """Return a question of COPA. Premise and choice are joined by "because" or "therefore", as in lm-eval.

    Raises:
        ValueError: the question is neither for a cause nor for an effect.
    """
    link = {"cause": "because", "effect": "therefore"}.get(row["question"])
    if link is None:
        raise ValueError(f"'question' is {row['question']!r}, neither 'cause' nor 'effect'")
    # without the period, so that the sentence goes on
    context = f"{text(row, 'premise').strip()[:-1]} {link}"
    choices = [text(row, "choice1"), text(row, "choice2")]
    said = tuple(f" {choice[0].lower()}{choice[1:]}" for choice in choices)
    return Choice((context,) * 2, said, _one_of(row["label"], 2))


def _science(name: str) -> Callable[[Mapping[str, Any]], Choice]:
    """Return a function that makes a question of a row of ARC or OpenBookQA, in lm-eval's wording for ``name``.

    It reads both formats: each choice is an object, or labels and texts are two lists (the hub).
    """

    def read(row: Mapping[str, Any]) -> Choice:
        """Return the question of a row."""
        if isinstance(asked := row.get("question"), Mapping):
            stem = text(asked, "stem")
            pairs = [(choice["label"], text(choice, "text")) for choice in asked["choices"]]
        else:
            stem = text(row, "question_stem" if "question_stem" in row else "question")
            said = _texts(row["choices"], "text")
            pairs = list(zip(row["choices"]["label"], said, strict=True))
        labels = [label for label, _ in pairs]
        return _asked(name, stem, [choice for _, choice in pairs], _among(text(row, "answerKey").strip(), labels))

    return read


def _piqa(row: Mapping[str, Any]) -> Choice:
    """Return a question of PIQA."""
    return _asked("piqa", text(row, "goal"), [text(row, "sol1"), text(row, "sol2")], _one_of(row["label"], 2))


def _winogrande(row: Mapping[str, Any]) -> Choice:
    """Return a question of WinoGrande: one sentence, whose gap each choice fills."""
    options = [text(row, "option1"), text(row, "option2")]
    return _filled(text(row, "sentence"), options, _among(text(row, "answer"), ("1", "2")))


def _mathqa(row: Mapping[str, Any]) -> Choice:
    """Return the question of an entry of MathQA.

    Its options are one text, as in ``a ) 38 , b ) 27``, or a list of such texts.

    Raises:
        ValueError: the question or an option is empty.
    """
    options, question = _OPTION.split(text(row, "options")), row["Problem"].strip()
    letters, choices = options[1::2], [part.strip(" ,[]'\"") for part in options[2::2]]
    if not question or not all(choices):
        raise ValueError("a question or an option is empty")
    return _asked("mathqa", question, choices, _among(row["correct"].lower(), [letter.lower() for letter in letters]))


_RTE = ("premise", "hypothesis"), ("sentence1", "sentence2")
"""Fields of the two texts in SuperGLUE and in GLUE."""


def _rte(row: Mapping[str, Any]) -> Choice:
    """Return the question of an entry of GLUE (``sentence1``, 0 for entailment) or SuperGLUE (``premise``, a word as
    label).
    """
    said, asked = (text(row, name) for name in _RTE[0 if "premise" in row else 1])
    label = row["label"] if isinstance(row["label"], int) else _among(row["label"], ("entailment", "not_entailment"))
    context = f"{said.strip()}\nQuestion: {asked.strip()} True or False?\nAnswer:"
    return Choice((context,) * 2, (" True", " False"), _one_of(label, 2))


def _hellaswag(row: Mapping[str, Any]) -> Choice:
    """Return a question of HellaSwag, its text cleaned as in lm-eval."""
    before, after = row["ctx_a"], row["ctx_b"]
    # the words and the capital are lm-eval's
    context = _plain(f"{text(row, 'activity_label')}: {before} {after[:1].upper()}{after[1:].lower()}")
    endings = [f" {_plain(ending)}" for ending in _listed(row, "endings")]
    # the label is a number in the authors' file, and a text in the hub's copy
    return Choice(
        (context,) * len(endings), tuple(endings), _among(str(row["label"]), [*map(str, range(len(endings)))])
    )


def _plain(text: str) -> str:
    """Return a text of WikiHow without its marks, as lm-eval reads it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that has to be a list of texts.

    Raises:
        ValueError: the field is no list, or an entry is no text.
    """
    return [text({name: value}, name) for value in _listed(row, name)]


def _listed(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that has to be a list: of a text, each letter would be taken for an entry.

    Raises:
        ValueError: the field is no list.
    """
    if not isinstance(row[name], list):
        raise ValueError(f"{name!r} is {row[name]!r:.20}, no list")
    return list(row[name])


def _among(label: object, known: Sequence[object]) -> int:
    """Return the place of the right answer's label among the known ones.

    Raises:
        ValueError: it is none of them.
    """
    if label not in known:
        raise ValueError(f"the answer {label!r} names no choice")
    return known.index(label)


def _one_of(label: object, n: int) -> int:
    """Return the number of the right one of ``n`` choices, counted from 0, after a check of its range.

    Raises:
        ValueError: the label is no such number.
    """
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < n:
        raise ValueError(f"the label {label!r} names no choice")
    return label


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Choice]] = {
    "copa": _copa,
    "openbookqa": _science("openbookqa"),
    "piqa": _piqa,
    "winogrande": _winogrande,
    "arc_easy": _science("arc_easy"),
    "mathqa": _mathqa,
    "rte": _rte,
    "hellaswag": _hellaswag,
}

NAMES = tuple(_READERS)

_PLACES = {
    "copa": HubDataset("aps/super_glue", "copa", "validation"),
    "openbookqa": HubDataset("allenai/openbookqa", "main", "test"),
    "piqa": HubDataset("baber/piqa", None, "validation"),
    "winogrande": HubDataset("allenai/winogrande", "winogrande_xl", "validation"),
    "arc_easy": HubDataset("allenai/ai2_arc", "ARC-Easy", "test"),
    "mathqa": HubDataset("regisss/math_qa", None, "test"),
    "rte": HubDataset("nyu-mll/glue", "rte", "validation"),
    "hellaswag": HubDataset("Rowan/hellaswag", None, "validation"),
}
"""The copies that lm-eval 0.4.13 reads, with its splits."""

SOURCES: Mapping[str, Source] = {
    name: Source(
        (f"{name}.jsonl", f"{name}.json"),
        f"{name}'s {place.split} set as its authors publish it (JSON lines), or LLM-Adapters' file (JSON)",
        name,
        place,
    )
    for name, place in _PLACES.items()
}


def known_in(data: str | None) -> list[str]:
    """Return the data sets that are available in the folder ``data``, or with ``hub`` on the hub."""
    return [name for name in NAMES if datasets.has(data, SOURCES[name])]


QUESTIONS = 100
"""Default number of questions per data set."""

_BETWEEN = "\n\n"


@dataclass(frozen=True)
class _Asked:
    """A question as tokens.

    Attributes:
        pairs: what stands before a choice, and the choice; one for each.
        sizes: the lengths of the choices in characters, without the blank before each.
        right: the number of the right one.
    """

    pairs: tuple[ContextPair, ...]
    sizes: tuple[int, ...]
    right: int


@dataclass(frozen=True)
class _Given:
    """Budgets by the length of a text."""

    numbers: dict[int, int]

    def of(self, length: int) -> int:
        """Return the budget of a text of this length."""
        return self.numbers[length]


@final
@dataclass(frozen=True)
class MultipleChoice(Task):
    """Share of questions whose right choice is the likeliest one, one case per data set.

    Attributes:
        options: the user's choices.
        asked: the questions of each case.
        notes_: what `notes` returns, whose name is taken by the property.
    """

    name: ClassVar[str] = "choice"
    VERSION: ClassVar[int] = 2
    headline: ClassVar[str] = "score"

    options: Options
    asked: dict[str, list[_Asked]]
    notes_: tuple[str, ...]

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> MultipleChoice:
        """Return the task with its questions made.

        Raises:
            InputError: a file is missing or of another format, or there are too few questions for the examples.
        """
        if options.ask == "later" and not options.shots:
            raise InputError("shots=0 leaves nothing to cut before the question: give examples, or ask inside.")
        # without any file all are tried, and the error says what is missing
        chosen = task.chosen(cls.name, options.parts, NAMES, known_in(options.data) or NAMES)
        later = ",ask=later" if options.ask == "later" else ""
        asked = {f"{name},shots={options.shots}{later}": _all(checkpoint, options, name) for name in chosen}
        longest = max(
            len(p.context) + len(p.continuation) for questions in asked.values() for q in questions for p in q.pairs
        )
        check_positions(checkpoint, longest, cls.name, "shots")
        return cls(options, asked, tuple(past_training(checkpoint, longest, cls.name)))

    def settings(self) -> dict[str, Any]:
        """Return the most questions of a data set, and a hash of all data sets' files, chosen or not; or ``hub``."""
        # of all files, so that results of other parts can be added to the same folder
        data = datasets.fingerprint(self.options.data, list(SOURCES.values()))
        return {"questions": self.options.limit or QUESTIONS, "data": data}

    def cases(self) -> dict[str, list[int]]:
        """Return each data set with the length of every context, or of its examples if the question comes later."""
        return {
            name: [pair.length for question in asked for pair in question.pairs] for name, asked in self.asked.items()
        }

    @property
    def new_tokens(self) -> int:
        """Return the most tokens that follow a cut: the rest of a context, and a choice."""
        return max(
            len(pair.context) - pair.first + len(pair.continuation)
            for questions in self.asked.values()
            for question in questions
            for pair in question.pairs
        )

    @property
    def notes(self) -> list[str]:
        """Return sentences about texts longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Score all choices of a data set under a policy, and return how often the right one is the likeliest."""
        pairs = [pair for question in self.asked[case] for pair in question.pairs]
        # the budget of a text follows from its length alone
        given = _Given({pair.length: budget for pair, budget in zip(pairs, budgets, strict=True)})
        memories: list[MemoryUsage] = []
        bounded = BoundedModel(writer=writer, policy=policy, budget=given, setup=setup, on_memory=memories.append)
        found = dict(scores(bounded, pairs))
        values = iter(found[place][0] for place in range(len(pairs)))
        return TaskOutcome(
            _score([[next(values) for _ in question.pairs] for question in self.asked[case]], self.asked[case]),
            sum(memories, MemoryUsage()),
        )


def _all(checkpoint: Checkpoint, options: Options, name: str) -> list[_Asked]:
    """Return ``options.limit`` questions of a data set as tokens, each with solved examples of its own; by default
    `QUESTIONS`, and no more than there are.

    Raises:
        InputError: there are too few questions for the examples.
    """
    found = questions(name, options.data)
    if len(found) <= options.shots:
        raise InputError(f"{name} has {len(found)} questions, too few for shots={options.shots} and one to ask.")
    n = min(options.limit or QUESTIONS, len(found))
    # the next seed goes on where this one ends
    return [_one(checkpoint, options, name, found, (options.seed * n + i) % len(found)) for i in range(n)]


def _one(checkpoint: Checkpoint, options: Options, name: str, found: Sequence[Choice], number: int) -> _Asked:
    """Return the question of a number in ``found`` as tokens: each choice with what stands before it.

    That begins with solved examples, which are drawn from the other questions.
    """
    others = [i for i in range(len(found)) if i != number]
    # by the question's number, so that a run of more questions has the same ones before each
    shown = random.Random(f"{name} {options.seed} {number}").sample(others, options.shots)
    before = "".join(found[i].solved + _BETWEEN for i in shown)
    one = found[number]
    later = options.ask == "later"
    pairs = tuple(
        _pair(checkpoint, before, context, choice, later)
        for context, choice in zip(one.contexts, one.choices, strict=True)
    )
    # at least 1: of an ending that was only a mark, nothing but the blank is left
    return _Asked(pairs, tuple(max(1, len(choice) - 1) for choice in one.choices), one.right)


def _pair(checkpoint: Checkpoint, before: str, context: str, choice: str, later: bool) -> ContextPair:
    """Return a context and a choice as tokens, and how many tokens are read before the cut.

    Args:
        checkpoint: the model.
        before: the solved examples.
        context: the question; it follows the examples.
        choice: a choice; it follows the question.
        later: whether the examples alone are read before the cut; else the context but for its last token.
    """
    whole, prompt = (_tokens(checkpoint, text) for text in (before + context + choice, before + context))
    # the prompt's last token runs under the budget: its logits score the choice's first token
    first = len(prompt) - 1
    if later:
        examples = _tokens(checkpoint, before.removesuffix(_BETWEEN))
        # a tokenizer may join the examples' end with what follows: only the tokens before it are cut
        same = (i for i, (a, b) in enumerate(zip(examples, prompt, strict=False)) if a != b)
        first = min(next(same, len(examples)), first)
    first = max(1, first)  # of nothing, nothing could be cut
    return ContextPair(prompt, whole[len(prompt) :], first, first if later else len(prompt))


def _tokens(checkpoint: Checkpoint, text: str) -> tuple[int, ...]:
    """Return a text's tokens, without the chat template."""
    return tuple(encode(checkpoint, text, raw=True)[0].tolist())


def _score(found: Sequence[Sequence[float]], asked: Sequence[_Asked]) -> dict[str, Any]:
    """Return the share of questions whose right choice is the likeliest (``score``), or the likeliest per character
    (``normed``), the share that guessing would get, and each question's grade by the former.

    The two shares are lm-eval's ``acc`` and ``acc_norm``.

    Args:
        found: the log-likelihood of each choice of each question.
        asked: the questions.
    """
    rights, normed = [], []
    for values, one in zip(found, asked, strict=True):
        rights.append(max(range(len(values)), key=values.__getitem__) == one.right)
        shares = [value / size for value, size in zip(values, one.sizes, strict=True)]
        normed.append(max(range(len(shares)), key=shares.__getitem__) == one.right)
    n = len(asked)
    guess = sum(1 / len(question.pairs) for question in asked) / n
    return {
        "score": sum(rights) / n,
        "normed": sum(normed) / n,
        "n": n,
        "guess": guess,
        "grades": [float(right) for right in rights],
    }

"""Multiple-choice questions from public files: COPA, OpenBookQA, ARC, PIQA, WinoGrande, MathQA, RTE and HellaSwag.

A file ``NAME.jsonl`` has the format of the data set's authors, ``NAME.json`` that of LLM-Adapters: a list of objects
with ``instruction`` and ``answer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InputError
from kvkeep.evals import sources
from kvkeep.evals.sources import Source

_OPTION = re.compile(r"""(?:^|,)[\s\['"]*([a-eA-E])\s*\)(?:\s*\1\s*\))?""")
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
        """The question with its answer, as an example."""
        return self.contexts[self.right] + self.choices[self.right]


def questions(name: str, folder: str | None) -> list[Choice]:
    """All questions of a data set.

    Raises:
        InputError: the file is missing, or an entry has another format.
    """
    path = sources.found(folder, _source(name), f"choice's {name}")
    adapted = path.suffix == ".json"
    rows = sources.whole(path) if adapted else sources.lines(path, {})
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} is no list of questions.")
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(_adapted(name, row) if adapted else _READERS[name](row))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            place = "Entry" if adapted else "Line"
            raise InputError(f"{place} {number} of {path} is no question of {name}: {error!r:.80}.") from error
    return found


def _source(name: str) -> Source:
    public = f"{name}'s test or validation set as its authors publish it (JSON lines), or LLM-Adapters' file (JSON)"
    return Source((f"{name}.jsonl", f"{name}.json"), public)


def _adapted(name: str, row: Mapping[str, str]) -> Choice:
    """An entry of LLM-Adapters: question and choices stand in one text."""
    if name == "mathqa":
        question, _, options = row["instruction"].rpartition("The options:")
        return _mathqa({"Problem": question, "options": options, "correct": row["answer"]})
    text, _, _ = row["instruction"].partition("Answer format:")
    asked, *rest = _MARK.split(text.split(": ", 1)[1])
    choices = [part.strip() for part in rest[1::2]]
    right = int(re.sub(r"\D", "", row["answer"])) - 1
    if not choices or not 0 <= right < len(choices):
        raise ValueError("no choices, or another answer")
    if name == "winogrande":
        return _filled(asked.strip(), choices, right)
    return _asked(name, asked.strip(), choices, right)


def _asked(name: str, question: str, choices: list[str], right: int) -> Choice:
    """lm-eval's wording: OpenBookQA continues the question, the others answer it."""
    context = question if name == "openbookqa" else f"Question: {question}\nAnswer:"
    return Choice((context,) * len(choices), tuple(f" {choice}" for choice in choices), right)


def _filled(sentence: str, options: list[str], right: int) -> Choice:
    """WinoGrande: the same end of a sentence after each option."""
    before, blank, after = sentence.partition("_")
    if not blank:
        raise ValueError("the sentence has no blank")
    return Choice(tuple(before + option for option in options), (f" {after.strip()}",) * len(options), right)


def _copa(row: Mapping[str, Any]) -> Choice:
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    context = f"{row['premise'].strip()[:-1]} {link}"
    choices = [row["choice1"], row["choice2"]]
    said = tuple(f" {choice[0].lower()}{choice[1:]}" for choice in choices)
    return Choice((context,) * 2, said, _one_of(row["label"], 2))


def _science(name: str) -> Callable[[Mapping[str, Any]], Choice]:
    def read(row: Mapping[str, Any]) -> Choice:
        choices = row["question"]["choices"]
        right = [one["label"] for one in choices].index(row["answerKey"])
        return _asked(name, row["question"]["stem"], [one["text"] for one in choices], right)

    return read


def _piqa(row: Mapping[str, Any]) -> Choice:
    return _asked("piqa", row["goal"], [row["sol1"], row["sol2"]], _one_of(row["label"], 2))


def _winogrande(row: Mapping[str, Any]) -> Choice:
    return _filled(row["sentence"], [row["option1"], row["option2"]], _one_of(int(row["answer"]) - 1, 2))


def _mathqa(row: Mapping[str, Any]) -> Choice:
    """The options stand in one text, as in ``a ) 38 , b ) 27 , c ) 30``, or as a list of such texts."""
    options, question = _OPTION.split(row["options"]), row["Problem"].strip()
    letters, choices = options[1::2], [part.strip(" ,[]'\"") for part in options[2::2]]
    if not question or not all(choices):
        raise ValueError("a question or an option is empty")
    return _asked("mathqa", question, choices, [one.lower() for one in letters].index(row["correct"].lower()))


def _rte(row: Mapping[str, Any]) -> Choice:
    """An entry of GLUE (``sentence1``, 0 for entailment) or of SuperGLUE (``premise``, the label as a word)."""
    said, asked = (row["premise"], row["hypothesis"]) if "premise" in row else (row["sentence1"], row["sentence2"])
    label = row["label"] if isinstance(row["label"], int) else ("entailment", "not_entailment").index(row["label"])
    context = f"{said.strip()}\nQuestion: {asked.strip()} True or False?\nAnswer:"
    return Choice((context,) * 2, (" True", " False"), _one_of(label, 2))


def _hellaswag(row: Mapping[str, Any]) -> Choice:
    before, after = row["ctx_a"], row["ctx_b"]
    context = _plain(f"{row['activity_label']}: {before} {after[:1].upper()}{after[1:].lower()}")
    endings = [f" {_plain(ending)}" for ending in row["endings"]]
    return Choice((context,) * len(endings), tuple(endings), _one_of(int(row["label"]), len(endings)))


def _plain(text: str) -> str:
    """Text of WikiHow without its marks, as lm-eval reads it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _one_of(label: object, n: int) -> int:
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


def known_in(folder: str | None) -> list[str]:
    """The data sets whose files are there."""
    return [name for name in NAMES if sources.has(folder, _source(name))]

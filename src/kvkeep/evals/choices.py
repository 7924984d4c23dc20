"""Multiple-choice questions from public files: COPA, OpenBookQA, ARC, PIQA, WinoGrande, MathQA, RTE and HellaSwag.

A file ``NAME.jsonl`` has the format of the data set's authors, or the rows of the hub's copy; ``NAME.json`` has that of
LLM-Adapters: a list of objects with ``instruction`` and ``answer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.evals import sources
from kvkeep.evals.hub import Place
from kvkeep.evals.sources import Source, text

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


def questions(name: str, data: str | None) -> list[Choice]:
    """All questions of a data set.

    Args:
        name: the data set, one of `NAMES`.
        data: the folder with its file, or ``hub``.

    Raises:
        InputError: the data set is missing, or an entry has another format.
    """
    found = sources.rows(data, SOURCES[name], f"choice's {name}")
    adapted = found.name.endswith(".json")
    return found.read(lambda row: _adapted(name, row) if adapted else _READERS[name](row), f"question of {name}")


def _adapted(name: str, row: Mapping[str, str]) -> Choice:
    """An entry of LLM-Adapters: question and choices stand in one text."""
    if name == "mathqa":
        question, _, options = row["instruction"].rpartition("The options:")
        return _mathqa({"Problem": question, "options": options, "correct": row["answer"]})
    before, _, _ = row["instruction"].partition("Answer format:")
    asked, *rest = _MARK.split(before.split(": ", 1)[1])
    choices = [part.strip() for part in rest[1::2]]
    right = int(re.sub(r"\D", "", row["answer"])) - 1
    if not choices or not all(choices) or not 0 <= right < len(choices):
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
    link = {"cause": "because", "effect": "therefore"}.get(row["question"])
    if link is None:
        raise ValueError(f"'question' is {row['question']!r}, neither 'cause' nor 'effect'")
    context = f"{text(row, 'premise').strip()[:-1]} {link}"
    choices = [text(row, "choice1"), text(row, "choice2")]
    said = tuple(f" {choice[0].lower()}{choice[1:]}" for choice in choices)
    return Choice((context,) * 2, said, _one_of(row["label"], 2))


def _science(name: str) -> Callable[[Mapping[str, Any]], Choice]:
    """ARC and OpenBookQA: each choice is an object with label and text, or labels and texts are two lists (the hub)."""

    def read(row: Mapping[str, Any]) -> Choice:
        if isinstance(asked := row.get("question"), Mapping):
            stem = text(asked, "stem")
            pairs = [(one["label"], text(one, "text")) for one in asked["choices"]]
        else:
            stem = text(row, "question_stem" if "question_stem" in row else "question")
            said = _texts(row["choices"], "text")
            pairs = list(zip(row["choices"]["label"], said, strict=True))
        labels = [label for label, _ in pairs]
        return _asked(name, stem, [choice for _, choice in pairs], _among(text(row, "answerKey").strip(), labels))

    return read


def _piqa(row: Mapping[str, Any]) -> Choice:
    return _asked("piqa", text(row, "goal"), [text(row, "sol1"), text(row, "sol2")], _one_of(row["label"], 2))


def _winogrande(row: Mapping[str, Any]) -> Choice:
    options = [text(row, "option1"), text(row, "option2")]
    return _filled(text(row, "sentence"), options, _among(text(row, "answer"), ("1", "2")))


def _mathqa(row: Mapping[str, Any]) -> Choice:
    """The options stand in one text, as in ``a ) 38 , b ) 27 , c ) 30``, or as a list of such texts."""
    options, question = _OPTION.split(text(row, "options")), row["Problem"].strip()
    letters, choices = options[1::2], [part.strip(" ,[]'\"") for part in options[2::2]]
    if not question or not all(choices):
        raise ValueError("a question or an option is empty")
    return _asked("mathqa", question, choices, _among(row["correct"].lower(), [one.lower() for one in letters]))


_RTE = ("premise", "hypothesis"), ("sentence1", "sentence2")


def _rte(row: Mapping[str, Any]) -> Choice:
    """An entry of GLUE (``sentence1``, 0 for entailment) or of SuperGLUE (``premise``, the label as a word)."""
    said, asked = (text(row, name) for name in _RTE[0 if "premise" in row else 1])
    label = row["label"] if isinstance(row["label"], int) else _among(row["label"], ("entailment", "not_entailment"))
    context = f"{said.strip()}\nQuestion: {asked.strip()} True or False?\nAnswer:"
    return Choice((context,) * 2, (" True", " False"), _one_of(label, 2))


def _hellaswag(row: Mapping[str, Any]) -> Choice:
    before, after = row["ctx_a"], row["ctx_b"]
    context = _plain(f"{text(row, 'activity_label')}: {before} {after[:1].upper()}{after[1:].lower()}")
    endings = [f" {_plain(ending)}" for ending in row["endings"]]
    return Choice(
        (context,) * len(endings), tuple(endings), _among(str(row["label"]), [*map(str, range(len(endings)))])
    )


def _plain(text: str) -> str:
    """Text of WikiHow without its marks, as lm-eval reads it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    """A field that has to be a list of texts."""
    if not isinstance(row[name], list):
        raise ValueError(f"{name!r} is {row[name]!r:.20}, no list")
    return [text({name: one}, name) for one in row[name]]


def _among(label: object, known: Sequence[object]) -> int:
    if label not in known:
        raise ValueError(f"the answer {label!r} names no choice")
    return known.index(label)


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

_PLACES = {
    "copa": Place("aps/super_glue", "copa", "validation"),
    "openbookqa": Place("allenai/openbookqa", "main", "test"),
    "piqa": Place("baber/piqa", None, "validation"),
    "winogrande": Place("allenai/winogrande", "winogrande_xl", "validation"),
    "arc_easy": Place("allenai/ai2_arc", "ARC-Easy", "test"),
    "mathqa": Place("regisss/math_qa", None, "test"),
    "rte": Place("nyu-mll/glue", "rte", "validation"),
    "hellaswag": Place("Rowan/hellaswag", None, "validation"),
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
    """The data sets that are there."""
    return [name for name in NAMES if sources.has(data, SOURCES[name])]

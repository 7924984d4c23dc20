"""RULER's questions about documents (qa_1 from SQuAD, qa_2 from HotpotQA), with other documents as distraction."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InputError
from kvkeep.evals import sources
from kvkeep.evals.answered import Item
from kvkeep.evals.hub import Place
from kvkeep.evals.sources import Source, text

_ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

SOURCES = {
    "qa_1": Source(
        ("squad.json", "dev-v2.0.json"),
        "SQuAD 2.0's development set as its authors publish it (JSON)",
        "squad_v2",
        Place("rajpurkar/squad_v2", None, "validation"),
    ),
    "qa_2": Source(
        ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
        "HotpotQA's development set with distractors as its authors publish it (JSON)",
        "hotpot_qa",
        Place("hotpotqa/hotpot_qa", "distractor", "validation"),
    ),
}


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        question: the question.
        answers: right answers.
        needed: numbers of the documents with the answer.
        near: numbers of documents about the same thing.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Documents and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


def library(name: str, data: str | None) -> Library:
    """The documents and questions of ``qa_1`` or ``qa_2``.

    Raises:
        InputError: the file is missing, or of another format.
    """
    source = SOURCES[name]
    read = sources.rows(data, source, f"ruler's {name}")
    what = f"part of {source.public}"
    found = _squad(read.read(_flat, what)) if name == "qa_1" else _hotpot(read.read(_entry, what))
    if not found.questions:
        raise InputError(f"{read.name} has no question with an answer.")
    return found


_Flat = tuple[str, str, str, tuple[str, ...]]


def _squad(rows: Iterable[Sequence[_Flat]]) -> Library:
    """The authors' file is one object with articles and their paragraphs; the hub has a row for each question."""
    asked = [one for row in rows for one in row]
    numbers = {said: i for i, said in enumerate(sorted({said for _, said, _, _ in asked}))}
    about: dict[str, set[int]] = {}
    for article, said, _, _ in asked:
        about.setdefault(article, set()).add(numbers[said])
    questions = [
        Asked(question, answers, (numbers[said],), tuple(sorted(about[article] - {numbers[said]})))
        for article, said, question, answers in asked
        if answers
    ]
    return Library(tuple(numbers), tuple(questions))


def _flat(row: Mapping[str, Any]) -> list[_Flat]:
    """Article, paragraph, question and different answers of each question; a paragraph without any has empty ones."""
    if "data" not in row:
        return [(text(row, "title"), text(row, "context"), text(row, "question"), _different(row["answers"]["text"]))]
    found: list[_Flat] = []
    for number, article in enumerate(row["data"], 1):
        for place, paragraph in enumerate(article["paragraphs"], 1):
            try:
                found += _paragraph(str(number), paragraph)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said = f"no {error}" if isinstance(error, KeyError) else f"{error}"
                raise ValueError(f"paragraph {place} of article {number}: {said}") from error
    return found


def _paragraph(article: str, paragraph: Mapping[str, Any]) -> Iterator[_Flat]:
    context = text(paragraph, "context")
    yield article, context, "", ()
    for one in paragraph["qas"]:
        answers = [] if one.get("is_impossible", False) else [answer["text"] for answer in one["answers"]]
        yield article, context, text(one, "question"), _different(answers)


def _different(answers: Any) -> tuple[str, ...]:
    """The answers, each once. A blank one would be found in every reply."""
    if not isinstance(answers, list):
        raise ValueError(f"answers are {answers!r:.20}, no list")
    return tuple(dict.fromkeys(text({"answer": answer}, "answer") for answer in answers))


def _hotpot(rows: Sequence[tuple[str, str, Sequence[str]]]) -> Library:
    texts = sorted({said for _, _, shown in rows for said in shown})
    numbers = {said: i for i, said in enumerate(texts)}
    questions = [Asked(asked, (answer,), tuple(numbers[said] for said in shown)) for asked, answer, shown in rows]
    return Library(tuple(texts), tuple(questions))


def _entry(row: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Question, answer and documents, which are pairs of title and sentences, or two lists in the hub's copy."""
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    shown = [_document(title, said) for title, said in pairs]
    if not shown:
        raise ValueError("it has no documents")
    return text(row, "question"), text(row, "answer"), shown


def _document(title: Any, said: Any) -> str:
    if not isinstance(title, str) or not isinstance(said, list):
        raise ValueError("'context' holds no titles and lists of sentences")
    return f"{title}\n{''.join(said)}"


def items(found: Library, asked: Asked, seed: str) -> Callable[[int], Item]:
    """Makes a prompt with the needed documents and this many others, in a random order."""

    def make(n: int) -> Item:
        drawn = random.Random(seed)
        near = drawn.sample(asked.near, len(asked.near))
        far = [i for i in range(len(found.documents)) if i not in {*asked.needed, *near}]
        others = [*near, *drawn.sample(far, len(far))]
        chosen = [*asked.needed, *(others[:n] if n <= len(others) or not others else _again(others, n))]
        drawn.shuffle(chosen)
        shown = "\n\n".join(f"Document {i}:\n{found.documents[number]}" for i, number in enumerate(chosen, 1))
        return Item(
            text=f"{_ASK}\n\nThe following are given documents.\n\n{shown}\n\n",
            question=f"{_ASK}\n\nQuestion: {asked.question}",
            lead=" Answer:",
            answers=asked.answers,
        )

    return make


def _again(others: list[int], n: int) -> list[int]:
    """Documents from the start again, where there are too few."""
    return [others[i % len(others)] for i in range(n)]

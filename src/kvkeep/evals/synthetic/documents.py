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
from kvkeep.evals.sources import Source

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
    try:
        found = _squad(read.rows) if name == "qa_1" else _hotpot(read.rows)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{read.name} has another format than {source.public}: {error!r:.80}.") from error
    if not found.questions:
        raise InputError(f"{read.name} has no question with an answer.")
    return found


def _squad(rows: Sequence[Mapping[str, Any]]) -> Library:
    """The authors' file is one object with articles and their paragraphs; the hub has a row for each question."""
    asked = list(_flat(rows))
    numbers = {text: i for i, text in enumerate(sorted({text for _, text, _, _ in asked}))}
    about: dict[str, set[int]] = {}
    for article, text, _, _ in asked:
        about.setdefault(article, set()).add(numbers[text])
    questions = [
        Asked(question, answers, (numbers[text],), tuple(sorted(about[article] - {numbers[text]})))
        for article, text, question, answers in asked
        if answers
    ]
    return Library(tuple(numbers), tuple(questions))


def _flat(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Article, paragraph, question and different answers of each question; a paragraph without any has empty ones."""
    for row in rows:
        if "data" not in row:
            yield str(row["title"]), str(row["context"]), str(row["question"]), _different(row["answers"]["text"])
            continue
        for number, article in enumerate(row["data"]):
            for paragraph in article["paragraphs"]:
                yield str(number), str(paragraph["context"]), "", ()
                for one in paragraph["qas"]:
                    answers = () if one.get("is_impossible", False) else (answer["text"] for answer in one["answers"])
                    yield str(number), str(paragraph["context"]), str(one["question"]), _different(answers)


def _different(answers: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str, answers)))


def _hotpot(rows: Sequence[Mapping[str, Any]]) -> Library:
    """Documents are pairs of title and sentences; in the hub's copy titles and sentences are two lists."""
    shown = [[f"{title}\n{''.join(said)}" for title, said in _documents(row["context"])] for row in rows]
    texts = sorted({text for some in shown for text in some})
    numbers = {text: i for i, text in enumerate(texts)}
    questions = [
        Asked(str(row["question"]), (str(row["answer"]),), tuple(numbers[text] for text in some))
        for row, some in zip(rows, shown, strict=True)
    ]
    return Library(tuple(texts), tuple(questions))


def _documents(context: Any) -> list[tuple[str, list[str]]]:
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    return [(str(title), list(said)) for title, said in pairs]


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

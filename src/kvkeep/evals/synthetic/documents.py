"""RULER's questions about documents (qa_1 from SQuAD, qa_2 from HotpotQA), with other documents as distraction."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.errors import InputError
from kvkeep.evals import sources
from kvkeep.evals.answered import Item
from kvkeep.evals.sources import Source

_ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

SOURCES = {
    "qa_1": Source(("squad.json", "dev-v2.0.json"), "SQuAD 2.0's development set as its authors publish it (JSON)"),
    "qa_2": Source(
        ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
        "HotpotQA's development set with distractors as its authors publish it (JSON)",
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


def library(name: str, folder: str | None) -> Library:
    """The documents and questions of ``qa_1`` or ``qa_2``.

    Raises:
        InputError: the file is missing, or of another format.
    """
    source = SOURCES[name]
    path = sources.found(folder, source, f"ruler's {name}")
    content = sources.whole(path)
    try:
        found = _squad(content) if name == "qa_1" else _hotpot(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path} has another format than {source.public}: {error!r:.80}.") from error
    if not found.questions:
        raise InputError(f"{path} has no question with an answer.")
    return found


def _squad(content: dict[str, list[dict[str, list[dict[str, object]]]]]) -> Library:
    articles = [entry["paragraphs"] for entry in content["data"]]
    numbers = {text: i for i, text in enumerate(sorted({str(p["context"]) for part in articles for p in part}))}
    questions = []
    for part in articles:
        about = {numbers[str(paragraph["context"])] for paragraph in part}
        for paragraph in part:
            own = numbers[str(paragraph["context"])]
            for qa in paragraph["qas"]:  # type: ignore[attr-defined]
                answers = tuple(dict.fromkeys(str(answer["text"]) for answer in qa["answers"]))
                if answers and not qa.get("is_impossible", False):
                    questions.append(Asked(str(qa["question"]), answers, (own,), tuple(sorted(about - {own}))))
    return Library(tuple(numbers), tuple(questions))


def _hotpot(content: list[dict[str, object]]) -> Library:
    def said(title: str, parts: list[str]) -> str:
        return f"{title}\n{''.join(parts)}"

    texts = sorted({said(*document) for entry in content for document in entry["context"]})  # type: ignore[attr-defined]
    numbers = {text: i for i, text in enumerate(texts)}
    questions = [
        Asked(
            str(entry["question"]),
            (str(entry["answer"]),),
            tuple(numbers[said(*document)] for document in entry["context"]),  # type: ignore[attr-defined]
        )
        for entry in content
    ]
    return Library(tuple(texts), tuple(questions))


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

"""Small files in the formats of public data sets, made up: multiple choice and LongBench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.evals.synthetic import Haystack
from kvkeep.evals.tasks import choice as choice_task
from kvkeep.evals.tasks import longbench

_SCIENCE = {"choices": [{"text": "a red one", "label": "A"}, {"text": "a stone", "label": "B"}]}


_ANSWERS = {"passage_retrieval_en": ["Paragraph 7"], "passage_count": ["3"]}


def choice(name: str, i: int) -> dict[str, Any]:
    """The question with number ``i`` of a data set, in the format of its authors; right answers take turns."""
    label, said = i % 2, f"The fox saw {i} birds."
    return {
        "copa": {"premise": said, "choice1": "It ran.", "choice2": "It slept.", "question": "cause", "label": label},
        "openbookqa": {"question": {"stem": f"Fox {i} is", **_SCIENCE}, "answerKey": "AB"[label]},
        "arc_easy": {"question": {"stem": f"What is fox {i}?", **_SCIENCE}, "answerKey": "AB"[label]},
        "piqa": {"goal": f"Catch fox {i}", "sol1": "walk", "sol2": "jump", "label": label},
        "winogrande": {
            "sentence": f"Fox {i} saw _ there.",
            "option1": "a dog",
            "option2": "cats",
            "answer": "12"[label],
        },
        "mathqa": {"Problem": f"{i} + 1 ?", "options": f"a ) {i + 1} , b ) none of these", "correct": "ab"[label]},
        "rte": {"premise": said, "hypothesis": "It slept.", "label": label},
        "hellaswag": {
            "activity_label": f"Run {i}",
            "ctx_a": said,
            "ctx_b": "it",
            "endings": ["won.", "[title] sat."],
            "label": str(label),
        },
    }[name]


def article(name: str, i: int, sentences: int) -> dict[str, Any]:
    """The line with number ``i`` of a task of LongBench."""
    classified = longbench.described()[name]["metric"] == "classification"
    return {
        "context": " ".join(Haystack(None, i).first(sentences)),
        "input": f"What is told in part {i}?",
        "answers": ["Place"] if classified else _ANSWERS.get(name, [str(i), "a fox"]),
        "all_classes": ["Place", "Person"] if classified else None,
    }


def write(folder: Path, *, questions: int = 20, articles: int = 2, sentences: int = 300) -> Path:
    """Write all of them as JSON lines into a folder.

    Args:
        folder: the folder.
        questions: of each data set of multiple choice.
        articles: of each task of LongBench.
        sentences: of each article.
    """
    for name in choice_task.NAMES:
        lines(folder / f"{name}.jsonl", [choice(name, i) for i in range(questions)])
    for name in longbench.described():
        lines(folder / f"{name}.jsonl", [article(name, i, sentences) for i in range(articles)])
    return folder


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

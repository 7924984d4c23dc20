"""LongBench (Bai et al., 2024): the 16 English and code tasks, from the files of its authors.

Each task is a file such as ``hotpotqa.jsonl`` in the folder ``data``. As in LongBench itself, a prompt that is longer
than the model was trained for loses the middle of its text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, ClassVar, final

from kvkeep.errors import InputError
from kvkeep.evals import datasets, grading, task
from kvkeep.evals.datasets import Source
from kvkeep.evals.qa_task import Item, QATask, TaskCase, prompt_of, tokens_of
from kvkeep.evals.task import Options
from kvkeep.models.checkpoint import Checkpoint

_METRICS: Mapping[str, Callable[[str, str], float]] = {
    "f1": grading.f1,
    "rouge_l": grading.rouge_l_of_sentences,
    "count": grading.count,
    "retrieval": grading.retrieval,
    "code_similarity": grading.code_similarity,
}


@cache
def described() -> dict[str, dict[str, Any]]:
    """Return the tasks of LongBench: wording, reply length and metric of each."""
    text = (resources.files("kvkeep.evals.tasks") / "longbench.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def source(name: str) -> Source:
    """Return where a task's data are: a file of its authors, and no place on the hub, where copies have other
    fields.
    """
    return Source((f"{name}.jsonl",), "LongBench (THUDM/LongBench, data.zip): a JSON object per line", name, None)


@final
@dataclass(frozen=True)
class LongBench(QATask):
    """Each task's own metric, one case per task."""

    name: ClassVar[str] = "longbench"
    VERSION: ClassVar[int] = 2

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each chosen task, by default for each task whose file is there.

        Raises:
            InputError: a file is missing, or a line has another format or no answer.
        """
        known = tuple(described())
        there = [name for name in known if datasets.has(options.data, source(name))]
        # without any file all are tried, and the error says what is missing
        chosen = task.chosen(cls.name, options.parts, known, there or known)
        # of all files, so that results of other parts can be added to the same folder
        data = datasets.fingerprint(options.data, [source(name) for name in known])
        about |= {"items": options.limit or "all", "data": data}
        return {name: _case(checkpoint, options, name, notes) for name in chosen}


def _case(checkpoint: Checkpoint, options: Options, name: str, notes: list[str]) -> TaskCase:
    """Return one of LongBench's tasks as prompts with their grading.

    If texts have to be shortened for the model, ``notes`` gets a note on how many.
    """
    task, every = described()[name], read(name, options.data)
    n = min(options.limit or len(every), len(every))
    items = [every[(options.seed * n + i) % len(every)] for i in range(n)]  # the next seed goes on where this one ends
    room = None if checkpoint.trained_length is None else checkpoint.trained_length - int(task["new"])
    short = [item if room is None else _shortened(checkpoint, item, room, name) for item in items]
    if cut := sum(item is not shortened for item, shortened in zip(items, short, strict=True)):
        notes.append(f"longbench {name}: {cut} of {n} texts lose their middle, to fit into {room} tokens.")
    prompts = [prompt_of(checkpoint, item, options.ask, i) for i, item in enumerate(short)]
    return TaskCase(prompts, int(task["new"]), lambda item, reply: grade(task, item, reply))


def read(name: str, data: str | None) -> list[Item]:
    """Return all items of a task.

    Raises:
        InputError: the task's file is missing, or a line has another format or no answer that a reply can be graded by.
    """
    task, fields = described()[name], {"context": str, "input": str, "answers": list}
    if task["metric"] == "classification":
        fields["all_classes"] = list
    found = datasets.rows(data, source(name), f"longbench's {name}", fields)
    return found.read(lambda row: _item(task, row), f"item of longbench's {name}")


def _item(task: Mapping[str, Any], row: Mapping[str, Any]) -> Item:
    """Return a row of LongBench as an item, in the words of its task's prompt.

    Raises:
        ValueError: the row has no text, or no answer that a reply can be graded by.
    """
    before, after = str(task["prompt"]).split("{context}")
    classes = row["all_classes"] if task["metric"] == "classification" else []
    return Item(
        text=before + datasets.text(row, "context"),
        question=after.replace("{input}", row["input"]),  # not by `datasets.text`: summaries ask nothing
        answers=tuple(_answer(task["metric"], answer, classes) for answer in _some(row["answers"])),
        classes=tuple(datasets.text({"all_classes": class_name}, "all_classes") for class_name in classes),
        chat=not task.get("few_shot", False),  # as LongBench's authors do: solved examples need no template
    )


def _some(answers: list[Any]) -> list[Any]:
    """Return the answers unchanged, after a check that there is one.

    Raises:
        ValueError: there is none.
    """
    if not answers:
        raise ValueError("it has no answer, so that every reply would be wrong")
    return answers


def _answer(metric: str, answer: Any, classes: list[Any]) -> str:
    """Return an answer unchanged, after a check that a reply can be graded by it with this metric.

    Raises:
        ValueError: no reply can be graded by the answer.
    """
    said = datasets.text({"answers": answer}, "answers")
    if metric == "retrieval" and not re.search(r"Paragraph \d", said):
        raise ValueError(f"its answer {said!r:.30} names no paragraph, as in 'Paragraph 7'")
    if metric == "count" and not re.fullmatch(r"\s*\d+\s*", said):
        raise ValueError(f"its answer {said!r:.30} is no number")
    if metric == "classification" and said not in classes:
        raise ValueError(f"its answer {said!r:.30} is none of its classes")
    return said


def _shortened(checkpoint: Checkpoint, item: Item, room: int, name: str) -> Item:
    """Return an item of at most ``room`` tokens; the middle of a text that is too long is left out.

    Raises:
        InputError: the question alone fills the room.
    """
    if (size := len(tokens_of(checkpoint, item))) <= room:
        return item
    ids = checkpoint.tokenizer.encode(item.text, add_special_tokens=False)
    keep = len(ids) - (size - room)
    while keep > 0:
        half = keep // 2
        ends = (
            # the two ends, `keep` tokens together
            checkpoint.tokenizer.decode(part, skip_special_tokens=True)
            for part in (ids[:half], ids[half - keep :])
        )
        text = "".join(map(str, ends))
        made = replace(item, text=text)
        if len(tokens_of(checkpoint, made)) <= room:
            return made
        keep -= max(1, keep // 50)  # the halves that are joined may be other, and more, tokens than they were
    raise InputError(
        f"longbench's {name} has a question that fills the {room} tokens of {checkpoint.name}; choose other `parts`."
    )


def grade(task: Mapping[str, Any], item: Item, reply: str) -> float:
    """Return the best grade of a reply over the item's answers, by the metric of its task, in [0, 1].

    Some tasks grade the reply's first line alone.
    """
    if task.get("first_line"):
        reply = reply.lstrip("\n").split("\n")[0]
    if task["metric"] == "classification":
        return max((grading.classification(reply, answer, item.classes) for answer in item.answers), default=0.0)
    return grading.best(_METRICS[task["metric"]], reply, item.answers)

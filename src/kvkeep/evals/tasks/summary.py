"""Summaries of XSUM and CNN/DailyMail, graded by ROUGE, as in H2O's Figure 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from kvkeep.errors import InputError
from kvkeep.evals import datasets, grading, task
from kvkeep.evals.datasets import HubDataset, Source
from kvkeep.evals.qa_task import Item, QATask, TaskCase, prompt_of, tokens_of
from kvkeep.evals.task import Options
from kvkeep.models.checkpoint import Checkpoint

_NEW = {"xsum": 64, "cnn_dailymail": 128}
_FIELDS = (("document", "summary"), ("article", "highlights"), ("article", "summary_gt"))
"""Fields of an article and its summary: XSUM's, CNN/DailyMail's, and those of H2O's files."""
_ASK = {
    "xsum": "\n\nSummarize the above article in 1 sentence.\n",
    "cnn_dailymail": "\n\nSummarize the above article in 3 sentences.\n",
}
_PLACES = {
    # its main branch has a script in place of tables, and the hub keeps tables made of it in this one
    "xsum": HubDataset("EdinburghNLP/xsum", None, "test", revision="refs/convert/parquet"),
    "cnn_dailymail": HubDataset("abisee/cnn_dailymail", "3.0.0", "test"),
}
SOURCES = {
    name: Source(
        (f"{name}.jsonl", f"{name}_0shot.jsonl"),
        f"the test set of {name} as JSON lines with document and summary, or article and highlights",
        name,
        place,
    )
    for name, place in _PLACES.items()
}
_LEAST = 32
"""Fewest words to which an article is shortened."""


@final
@dataclass(frozen=True)
class Summary(QATask):
    """ROUGE-L, with ROUGE-1 and ROUGE-2 beside it, one case per data set."""

    name: ClassVar[str] = "summary"
    VERSION: ClassVar[int] = 1

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each chosen data set, by default for each whose file is there.

        Raises:
            InputError: rouge-score or a file is missing, or a line has another format.
        """
        grading.check()
        there = [name for name, source in SOURCES.items() if datasets.has(options.data, source)]
        # without any file all are tried, and the error says what is missing
        chosen = task.chosen(cls.name, options.parts, tuple(_NEW), there or tuple(_NEW))
        about["data"] = datasets.fingerprint(options.data, list(SOURCES.values()))
        return {name: _case(checkpoint, options, name, notes) for name in chosen}

    def grades(self, case: str, texts: Sequence[str]) -> list[float]:
        """Return ROUGE-L of each reply."""
        return self._rouge(case, texts)["rougeL"]

    def more(self, case: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return ROUGE-1 and ROUGE-2, and the mean length of a reply in words."""
        found = {kind: sum(f) / len(f) for kind, f in self._rouge(case, texts).items() if kind != "rougeL"}
        return {**found, "words": sum(len(text.split()) for text in texts) / len(texts)}

    def _rouge(self, case: str, texts: Sequence[str]) -> dict[str, list[float]]:
        """Return F1 of each summary, by kind of ROUGE."""
        answers = [prompt.item.answers[0] for prompt in self.made[case].prompts]
        # "###" begins the next article where a model goes on after its summary
        return grading.scores([text.split("###")[0] for text in texts], answers)


def _case(checkpoint: Checkpoint, options: Options, name: str, notes: list[str]) -> TaskCase:
    """Return articles of a data set as prompts. If some have to be shortened for the model, ``notes`` gets a note."""
    found = datasets.rows(options.data, SOURCES[name], f"summary's {name}")
    n = min(options.limit or Summary.items, len(found.rows))
    chosen = [(options.seed * n + i) % len(found.rows) for i in range(n)]
    items = [_item(name, found.rows[i], found.place(i)) for i in chosen]
    room = None if checkpoint.trained_length is None else checkpoint.trained_length - _NEW[name]
    short = [item if room is None else _shortened(checkpoint, item, room, name) for item in items]
    if cut := sum(item is not shortened for item, shortened in zip(items, short, strict=True)):
        notes.append(f"summary {name}: {cut} of {n} articles lose their end, to fit into {room} tokens.")
    prompts = [prompt_of(checkpoint, item, options.ask, i) for i, item in enumerate(short)]
    return TaskCase(prompts, _NEW[name], lambda item, reply: 0.0)  # see `grades`


def _item(name: str, row: Mapping[str, Any], place: str) -> Item:
    """Return the item of a row: its article, the request to summarise it, and its summary as the answer.

    H2O's files have whole prompts, from which the article is taken.

    Args:
        name: the data set, which chooses the words of the request.
        row: the row.
        place: where it comes from, for the message.

    Raises:
        InputError: the row has no article with its summary.
    """
    for article, summary in _FIELDS:
        text, answer = row.get(article), row.get(summary)
        if isinstance(text, str) and isinstance(answer, str) and text.strip() and answer.strip():
            # H2O's prompts have solved examples before the article, and the question after it
            text = text.rpartition("###\nArticle: ")[2].partition("\n\nSummarize the above")[0].strip()
            if text:
                return Item(text=f"Article: {text}", question=_ASK[name], answers=(answer,))
    wanted = " or ".join(f"{article!r} and {summary!r}" for article, summary in _FIELDS)
    raise InputError(f"{place} has no article with its summary: it needs {wanted}, as text.")


def _shortened(checkpoint: Checkpoint, item: Item, room: int, name: str) -> Item:
    """Return an item of at most ``room`` tokens; the end of an article that is too long is left out.

    Raises:
        InputError: too few words of the article would be left.
    """
    size = len(tokens_of(checkpoint, item))
    words = item.text.split(" ")
    while size > room:
        # in proportion, but at least one word less, so that this ends
        words = words[: min(len(words) - 1, len(words) * room // size)]
        if len(words) < _LEAST:
            raise InputError(f"summary's {name} does not fit into {checkpoint.name}: {room} tokens are left for it.")
        item = replace(item, text=" ".join(words))
        size = len(tokens_of(checkpoint, item))
    return item

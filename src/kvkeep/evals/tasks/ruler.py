"""RULER (Hsieh et al., 2024): 13 tasks of any length, made by rule, and graded by matching strings.

Eleven tasks need no file. ``qa_1`` and ``qa_2`` need SQuAD and HotpotQA as ``data``. Essays are the text of
``text``, or the package's own plain sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from kvkeep.errors import InputError
from kvkeep.evals import datasets, grading, synthetic, task
from kvkeep.evals.qa_task import Item, QATask, TaskCase, TooShortError, fitting, prompt_of
from kvkeep.evals.synthetic import Haystack
from kvkeep.evals.task import Options, describe
from kvkeep.models.checkpoint import Checkpoint

# RULER's own numbers of new tokens
_NEW = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
_NEW_OF_NEEDLES = 128
_LEAST = {"cwe": 1, "fwe": 30, "qa_1": 0, "qa_2": 0}
"""Fewest parts of a text that make a question, such as words or documents; 1 where none is named.

Of fewer than 27 coded words (fwe) the rarest of the three that are asked for would have none, see `synthetic.coded`.
"""

PARTS = (*synthetic.TASKS, "vt", "cwe", "fwe", "qa_1", "qa_2")


@final
@dataclass(frozen=True)
class Ruler(QATask):
    """Share of the asked strings in the replies, one case per task and context."""

    name: ClassVar[str] = "ruler"
    VERSION: ClassVar[int] = 2

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return the cases of every task and context. By default, tasks that do not fit are left out with a note.

        Raises:
            InputError: an unknown task, a missing file, or a context that is too short.
        """
        lacking = [name for name, source in synthetic.SOURCES.items() if not datasets.has(options.data, source)]
        there = [name for name in PARTS if name not in lacking]
        chosen = task.chosen(cls.name, options.parts, PARTS, there)
        data = datasets.fingerprint(options.data, list(synthetic.SOURCES.values()))
        about |= {"text": describe(options), "data": data}
        made: dict[str, TaskCase] = {}
        for length in dict.fromkeys(options.contexts):
            for name in chosen:
                try:
                    made[f"{name},length={length}"] = _case(checkpoint, options, name, length)
                except TooShortError as error:
                    if options.parts:  # the user has named it
                        raise
                    notes.append(f"{error} It is left out.")
        if not made:
            raise InputError(f"No task of ruler fits into {max(options.contexts)} tokens. Give longer `contexts`.")
        if not options.parts and lacking:
            names = " and ".join(synthetic.SOURCES[part].names[0] for part in lacking)
            notes.append(f"ruler: without {' and '.join(lacking)}, which need {names} in the folder `data`.")
        return made


_Maker = Callable[[int, int, int], Callable[[int], Item]]
"""Makes the maker of an item from its number, the context, and the room of its prompt."""


def _makers(name: str, options: Options) -> _Maker:
    """Return a function for one of RULER's tasks: of an item's number, the context and the prompt's room in tokens, it
    returns the function that makes the item of a number of parts.

    Raises:
        InputError: the file of a question's documents is missing, or of another format.
    """

    def seed(number: int) -> str:
        return f"{name} {options.seed} {number}"

    # texts and documents are read once, for all items
    if name in synthetic.TASKS:
        haystack = Haystack(options.text, options.seed)
        return lambda number, context, room: synthetic.needle_items(synthetic.TASKS[name], haystack, seed(number))
    if name in synthetic.SOURCES:
        found = synthetic.library(name, options.data)
        asked = found.questions
        return lambda number, context, room: synthetic.document_items(
            found, asked[(number + options.seed * task.ITEMS_APART) % len(asked)], seed(number)
        )
    if name == "vt":
        return lambda number, context, room: synthetic.chain(seed(number))
    if name == "cwe":
        return lambda number, context, room: synthetic.common(seed(number), context)
    return lambda number, context, room: synthetic.coded(seed(number), room)


def _case(checkpoint: Checkpoint, options: Options, name: str, length: int) -> TaskCase:
    """Return one of RULER's tasks as prompts with their grading; a prompt and its reply have at most ``length`` tokens.

    Raises:
        TooShortError: the task does not fit into the length.
    """
    maker = _makers(name, options)
    new = _NEW.get(name, _NEW_OF_NEEDLES)
    room = length - new
    prompts = []
    for number in range(options.limit or Ruler.items):
        about = f"ruler's {name} with a context of {length} and {new} new tokens"
        item = fitting(checkpoint, maker(number, length, room), room, _LEAST.get(name, 1), about)
        prompts.append(prompt_of(checkpoint, item, options.ask, number))
    # a question about documents has several spellings of one answer, the other tasks several strings
    grade = grading.contains_any if name.startswith("qa") else grading.contains_all
    return TaskCase(prompts, new, lambda item, reply: grade(reply, item.answers))

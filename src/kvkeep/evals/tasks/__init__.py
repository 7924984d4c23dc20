"""The tasks by name."""

from __future__ import annotations

import difflib

from kvkeep.errors import InputError
from kvkeep.evals.task import Task
from kvkeep.evals.tasks.agreement import Agreement
from kvkeep.evals.tasks.continuation import Continuation
from kvkeep.evals.tasks.mass import Mass
from kvkeep.evals.tasks.perplexity import Perplexity
from kvkeep.evals.tasks.recall import Recall

TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Perplexity, Continuation, Agreement, Mass)}


def find(names: str) -> list[type[Task]]:
    """The tasks of a comma-separated list.

    Raises:
        InputError: the list is empty, or names an unknown task.
    """
    wanted = list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    if not wanted:
        raise InputError(f"The list of tasks is empty. Known: {', '.join(TASKS)}.")
    for name in wanted:
        if name not in TASKS:
            close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputError(f"Unknown task {name!r}.{hint} Known: {', '.join(TASKS)}.")
    return [TASKS[name] for name in wanted]

"""The names of the tasks, which a command checks before it imports torch; `kvkeep.evals.tasks` has the tasks."""

from __future__ import annotations

from kvkeep.errors import InputError, closest

# in groups, since the formatter would give each name of a long tuple a line
TASK_NAMES = (
    *("recall", "perplexity", "continuation", "agreement", "mass", "ruler", "longbench", "needle", "passkey"),
    *("kv_retrieval", "choice", "summary", "diversity", "conversation", "long_generation"),
)

TEXT_TASKS = ("perplexity", "continuation", "agreement", "mass")
"""Tasks that read running text and ask nothing. Without right answers, no model is too weak for them."""


def split_tasks(names: str) -> list[str]:
    """Return the names of a comma-separated list, each once.

    Raises:
        InputError: the list is empty, or names an unknown task.
    """
    wanted = list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    if not wanted:
        raise InputError(f"The list of tasks is empty. Known: {', '.join(TASK_NAMES)}.")
    for name in wanted:
        if name not in TASK_NAMES:
            close = closest(name, TASK_NAMES)
            hint = f" Did you mean {close!r}?" if close else ""
            raise InputError(f"Unknown task {name!r}.{hint} Known: {', '.join(TASK_NAMES)}.")
    return wanted

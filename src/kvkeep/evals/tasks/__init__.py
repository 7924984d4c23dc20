"""The tasks by name."""

from __future__ import annotations

from kvkeep.evals.task import Task
from kvkeep.evals.task_names import split_tasks
from kvkeep.evals.tasks.agreement import Agreement
from kvkeep.evals.tasks.choice import MultipleChoice
from kvkeep.evals.tasks.continuation import Continuation
from kvkeep.evals.tasks.conversation import Conversation
from kvkeep.evals.tasks.diversity import Diversity
from kvkeep.evals.tasks.hidden import KeyValue, Needle, Passkey
from kvkeep.evals.tasks.long_generation import LongGeneration
from kvkeep.evals.tasks.longbench import LongBench
from kvkeep.evals.tasks.mass import RetainedMass
from kvkeep.evals.tasks.perplexity import Perplexity
from kvkeep.evals.tasks.recall import Recall
from kvkeep.evals.tasks.ruler import Ruler
from kvkeep.evals.tasks.summary import Summary

_ALL: tuple[type[Task], ...] = (
    *(Recall, Perplexity, Continuation, Agreement, RetainedMass),
    *(Ruler, LongBench, Needle, Passkey, KeyValue, MultipleChoice),
    *(Summary, Diversity, Conversation, LongGeneration),
)

TASKS: dict[str, type[Task]] = {task.name: task for task in _ALL}


def find(names: str) -> list[type[Task]]:
    """Return the tasks of a comma-separated list.

    Raises:
        InputError: the list is empty, or names an unknown task.
    """
    return [TASKS[name] for name in split_tasks(names)]

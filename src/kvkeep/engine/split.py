"""What an engine cannot do with a model that is split over processes.

Each process has an engine and gives it the same requests in the same order. Which request runs when depends on these
alone, so all engines take the same steps, and no process has to tell the others what to do; chosen tokens come from the
first one. Whatever would depend on a clock, a thread or a file of one process is refused.
"""

from __future__ import annotations

from typing import Any

from kvkeep.errors import UnsupportedOperationError
from kvkeep.parallel import Heads


def check_split(config: Any, **asked: object) -> None:
    """Refuse options that would let the engines of several processes take different steps.

    Args:
        config: the model's configuration.
        asked: options by name.

    Raises:
        UnsupportedOperationError: one is set, and the model is split.
    """
    heads = Heads.of(config)
    if heads.ranks > 1 and (name := next((name for name, value in asked.items() if value), None)):
        raise UnsupportedOperationError(
            f"The model is split over {heads.ranks} processes, whose engines take the same steps, and `{name}` depends "
            "on one process alone. Leave it out."
        )

"""Trials of models that commands repeat for the same model: in their tests each outcome is found once for a run.

A command tries out its model, without weights and then with the kernel. Tests run hundreds of commands with the
embedded model and a few others, and a third of what a short command takes are these trials. What a trial finds
depends on the model's classes and configuration alone. Tests of the trials themselves stand in other folders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

COMMANDS = {"batch", "bench", "cli", "docs", "evals", "first_contact", "openai", "scale", "server"}
"""Folders of tests that run commands."""


class Remembered:
    """A trial whose outcome is remembered for models that are alike, while a test of commands runs.

    Args:
        trial: function that tries a model, and returns what it finds.
    """

    on = False

    def __init__(self, trial: Callable[[Any], Any]) -> None:
        self._trial = trial
        self._found: dict[Hashable, Any] = {}

    def __call__(self, model: Any) -> Any:
        """Return what the trial finds, or has found. What is refused is tried again."""
        if not Remembered.on:
            return self._trial(model)
        key = _key(model)
        if key not in self._found:
            self._found[key] = self._trial(model)
        return self._found[key]


def _key(model: Any) -> Hashable:
    parts = tuple((name, type(part), type(part).forward) for name, part in model.named_modules())
    weights = tuple((name, weight.shape, weight.dtype, weight.device) for name, weight in model.named_parameters())
    return parts, weights, model.config.to_json_string(use_diff=False)


def begin_test(name: str) -> None:
    """Have trials remembered in a test of commands, and in no other one.

    Args:
        name: of the test, with its folders.
    """
    Remembered.on = not COMMANDS.isdisjoint(name.split("/"))
    if Remembered.on:
        _stand_in()


@functools.cache
def _stand_in() -> None:
    """Put `Remembered` in the place of the trials, for the rest of the run."""
    from kvkeep.models import fused_decoder, load  # only here: many tests need neither

    for module, name in ((load, "try_out"), (fused_decoder, "_agrees")):
        setattr(module, name, Remembered(getattr(module, name)))

"""lm-eval's own command line, in which ``--model kvkeep`` is known."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from kvkeep.errors import InputError, pip_install

MODEL = "kvkeep"
_CLASS = "kvkeep.evals.harness.model:KVKeepLM"


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval with these arguments.

    Raises:
        InputError: lm-eval is not installed, or the data of a task cannot be reached.
        KVKeepError: the model, the policy, the budget or the protocol cannot be used.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"lm-eval is not installed: {pip_install('lm-eval')}.")
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    register()
    before, sys.argv = sys.argv, ["lm-eval", *arguments]  # lm-eval reads the words of the process
    try:
        setup_logging()
        parser = HarnessCLI()
        parser.execute(parser.parse_args())
    except ConnectionError as error:  # of the package datasets
        said = str(error).partition("\n")[0]
        raise InputError(
            f"lm-eval reads the data of its tasks from the hub: {said:.160}. Run the task once with a network, or name "
            "tasks of your own with data in local files."
        ) from error
    finally:
        sys.argv = before


def register() -> None:
    """Make the model type known to lm-eval in this process, for ``lm_eval.simple_evaluate(model="kvkeep", …)``."""
    import lm_eval.models  # noqa: F401  registers lm-eval's own types
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=_CLASS)

"""lm-eval's own command line, in which ``--model kvkeep`` is known."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError, InputError, pip_install
from kvkeep.evals.forward import Setup
from kvkeep.evals.grid import RequestedBudget
from kvkeep.evals.lm_eval.scoring import BoundedModel
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.policies import DEFAULT
from kvkeep.policies.registry import parse

MODEL = "kvkeep"
_CLASS = "kvkeep.evals.lm_eval.model:KVKeepLM"  # as text, since its module needs lm-eval, which may be missing


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval's own command line with these arguments, in which ``--model kvkeep`` is known.

    While it runs, ``sys.argv`` holds them.

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


# The model arguments of ``--model kvkeep``: ``pretrained=…,policy=h2o,budget=20%,question=later``.

_IGNORED = ("batch_size", "max_batch_size", "trust_remote_code")
"""Arguments that lm-eval adds by itself."""


_NUMBERS = {"stride", "window_stride", "prefill_chunk", "max_length", "max_gen_toks", "rows"}
"""Arguments that have to be whole numbers of 1 or more; all others are texts."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments after ``--model_args``.

    Attributes:
        pretrained: hub name or folder; by default the embedded model.
        policy: the eviction policy. Its options follow a plus sign: ``h2o:recent=8+sinks=4``.
        budget: tokens kept per layer and head, or a share of the text such as ``20%``.
        question: ``inside`` or ``later``, see `kvkeep.evals.lm_eval.scoring.EvaluationProtocol`.
        examples: ``inside`` or ``later``.
        question_mark: text that begins the question.
        examples_mark: text that separates examples.
        stride: tokens of a continuation that are fed at once; 1 is decoding.
        window_stride: tokens that rolling log-likelihoods feed at once.
        prefill_chunk: tokens of a prompt that a layer takes at once.
        positions: ``true`` or ``slot``.
        max_length: most tokens of a text; by default the trained length.
        max_gen_toks: new tokens of tasks that do not say how many.
        rows: contexts that are read at once, and rows of the engine; lm-eval's ``--batch_size`` has the same meaning.
        dtype, device: see `kvkeep.load`.
    """

    pretrained: str | None = None
    policy: str = DEFAULT
    budget: str = "20%"
    question: str = "inside"
    examples: str = "inside"
    question_mark: str = "\nQuestion:"
    examples_mark: str = "\n\n"
    stride: int = 1
    window_stride: int = 16
    prefill_chunk: int | None = None
    positions: str | None = None
    max_length: int | None = None
    max_gen_toks: int = 256
    rows: int = 16
    dtype: str = "auto"
    device: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Arguments:
        """Return the arguments that lm-eval hands on, checked.

        Those that lm-eval adds by itself are left out, but ``batch_size`` stands for ``rows`` if the user gave it.

        Raises:
            InputError: an argument is unknown, or one that has to be a whole number of 1 or more is none.
        """
        given = {key: value for key, value in options.items() if key not in _IGNORED and value is not None}
        size = options.get("batch_size")  # 1 is lm-eval's own default, and no wish of the user
        if "rows" not in given and isinstance(size, int | str) and str(size).isdecimal() and int(size) > 1:
            given["rows"] = int(size)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise InputError(f"{unknown[0]!r} is no argument of this model type. Known: {', '.join(sorted(known))}.")
        for name in _NUMBERS & given.keys():
            if not isinstance(given[name], int) or isinstance(given[name], bool) or given[name] < 1:
                raise InputError(f"{name}={given[name]!r} is no whole number of 1 or more.")
        read: dict[str, Any] = {key: value if key in _NUMBERS else _text(key, value) for key, value in given.items()}
        return cls(**read)

    def protocol(self) -> dict[str, str]:
        """Return the arguments of the evaluation protocol."""
        return {name: getattr(self, name) for name in ("question", "examples", "question_mark", "examples_mark")}

    def described(self) -> dict[str, Any]:
        """Return the arguments as results record them."""
        return {f"kvkeep_{key}": value for key, value in asdict(self).items() if key != "pretrained"}

    def in_windows(self, bounded: BoundedModel) -> BoundedModel:
        """Return the same bounded model, set up for rolling log-likelihoods."""
        return replace(bounded, stride=self.window_stride)

    @staticmethod
    def check_room(room: int, new: int, most: int) -> None:
        """Refuse a continuation that leaves no room for its context.

        Raises:
            InputError: no room is left.
        """
        if room < 1:
            raise InputError(f"{new} new tokens leave no room for a prompt: max_length={most} is all that there is.")


def _text(key: str, value: object) -> str:
    r"""Return an argument that is a text, although lm-eval may have read it as a number or as true.

    In a mark, the two characters ``\n`` become a line break, which a command line can hardly hold.
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\\n", "\n") if key.endswith("_mark") else text


def bounded_of(asked: Arguments) -> BoundedModel:
    """Return model, policy, budget and options as a bounded model: check what can be checked, then read the weights.

    A budget in percent can be checked only when texts are known.

    Raises:
        KVKeepError: the model, the policy or the budget cannot be used.
    """
    # lm-eval would take a comma for the end of the argument
    policy, budget = parse(asked.policy.replace("+", ",")), budget_of(asked.budget)
    setup = Setup(positions=asked.positions, prefill_chunk=asked.prefill_chunk)
    with quiet():
        checkpoint = find(asked.pretrained or embedded())
        setup.differences(checkpoint, policy)  # raises if the model cannot have such positions
        if budget.tokens is not None and policy.evicts:
            setup.cache(checkpoint, policy, [budget.tokens])
        writer = Writer(checkpoint, read_weights(checkpoint, asked.dtype, asked.device))
    return BoundedModel(writer=writer, policy=policy, budget=budget, setup=setup, stride=asked.stride, rows=asked.rows)


def budget_of(text: str) -> RequestedBudget:
    """Return the budget that a text names, in tokens (``512``) or in percent of each text (``20%``).

    Raises:
        BudgetError: the number is out of range.
        InputError: the text is no number.
    """
    try:
        return (
            RequestedBudget(ratio=float(text[:-1]) / 100) if text.endswith("%") else RequestedBudget(tokens=int(text))
        )
    except ValueError as error:
        if isinstance(error, BudgetError):  # a number, out of range: its message says so already
            raise
        raise InputError(f"budget={text!r} is neither a number of tokens (512) nor a share (20%).") from None


def sampling_of(options: Mapping[str, Any], new_tokens: int, end: str) -> tuple[tuple[str, ...], SamplingParams]:
    """Return a task's ``generation_kwargs`` as the texts that end an answer, and how its tokens are sampled.

    Answers are greedy unless the options ask to sample, or name a temperature above 0. An option of ``None`` counts as
    missing.

    Args:
        options: the task's ``generation_kwargs``.
        new_tokens: most tokens of an answer if the options do not say.
        end: the text of the token that ends a text; it ends an answer, too.

    Raises:
        InputError: an option is out of range.
    """
    given = {key: value for key, value in options.items() if value is not None}
    until = given.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    # tasks name it in one of these ways
    most = given.get("max_gen_toks", given.get("max_new_tokens", given.get("max_tokens", new_tokens)))
    warm = given.get("do_sample", float(given.get("temperature", 0)) > 0)
    chosen = {key: given[key] for key in ("top_p", "top_k") if warm and key in given}
    temperature = float(given.get("temperature", 1.0)) if warm else 0.0
    sampling = SamplingParams(max_new_tokens=int(most), temperature=temperature, **chosen)
    return tuple(text for text in dict.fromkeys([*stops, end]) if text), sampling

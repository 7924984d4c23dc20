"""Options that several subcommands share, and how the text of an option becomes a number of tokens or bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.files import refuse_device
from kvkeep.cli.usage_errors import CommandLineError, exists, quoted
from kvkeep.errors import BudgetError, InputError
from kvkeep.models import threads
from kvkeep.policies import DEFAULT
from kvkeep.result_files import in_full, parse

MODEL, MEMORY, OUTPUT = "Model", "KV memory", "Output"
"""Panels of ``--help``."""

MAX_TOKENS = 2**31 - 1
"""The largest position."""

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_MAX_BYTES = 2**63 - 1
_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for prefix, power in (("k", 1), ("K", 1), ("M", 2), ("G", 3), ("T", 4))},
    **{f"{prefix}iB": 1024**power for prefix, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))},
}


def given(model: str | None) -> str | None:
    """The name of a model.

    An empty one is refused, since it comes from a variable that a script has not set, and so is a text.
    """
    if model is not None and not model.strip():
        raise typer.BadParameter("it is empty; leave it out for the embedded model")
    if model is None or not any(letter.isspace() for letter in model) or exists(model) or _is_path(model):
        return model
    raise CommandLineError(f"A text of several words is no model. Did you mean kvkeep generate -p {quoted(model)}?")


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or ("/" in name and not name.endswith((".", "?", "!")))


Model = Annotated[
    str | None,
    typer.Argument(
        help="A hub name or a local folder. The embedded model if not given.",
        show_default=False,
        metavar="MODEL",
        callback=given,
        autocompletion=shell_completion.models,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16, float16, or auto: the checkpoint's dtype.",
        autocompletion=shell_completion.words("auto", "float32", "bfloat16", "float16"),
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1, or auto: CUDA if there is one, else cpu.",
        autocompletion=shell_completion.words("auto", "cpu", "cuda"),
        rich_help_panel=MODEL,
    ),
]
LoadIn = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Quantise the weights while they are read: int8 or fp8 (torchao), 4bit or 8bit (bitsandbytes, on CUDA).",
        autocompletion=shell_completion.words("int8", "fp8", "4bit", "8bit"),
        rich_help_panel=MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Threads on a CPU. Default: KVKEEP_THREADS, OMP_NUM_THREADS, or a choice by the model's size and the "
        "machine's load.",
        rich_help_panel=MODEL,
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Accept weights that are not safetensors. Only for files that you trust.",
        rich_help_panel=MODEL,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="Eviction policy, with its options if need be: h2o:recent=32. See [b]kvkeep policies[/b].",
        autocompletion=shell_completion.policies,
        rich_help_panel=MEMORY,
    ),
]
PolicyOrNone = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Eviction policy, with its options if need be: h2o:recent=32. See [b]kvkeep policies[/b]. "
        f"Default: {DEFAULT}.",
        autocompletion=shell_completion.policies,
        rich_help_panel=MEMORY,
    ),
]
LayerBudget = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How the budget is spread over layers: uniform, ramp:0.2, pyramid:20, taper:0.5, or calibrated:FILE "
        "with the persistence.json of [b]kvkeep analyze[/b]. Default: the policy's own rule.",
        autocompletion=shell_completion.words("uniform", "ramp:0.2", "pyramid:20", "taper:0.5", "calibrated:"),
        rich_help_panel=MEMORY,
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="true: tokens keep their positions in the text. slot: tokens get their rank in the cache, for streams "
        "longer than the trained length. Default: the policy's own mode.",
        autocompletion=shell_completion.words("true", "slot"),
        rich_help_panel=MEMORY,
    ),
]
PrefillChunk = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Read prompts in chunks of this size, which bounds the memory of prefill; the policy evicts before it has "
        "read a question at the end. Default: whole prompts.",
        rich_help_panel=MEMORY,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)]


def parse_tokens(text: str, option: str) -> int:
    """Read a number of tokens: ``1024``, ``4K`` (4 × 1024), ``4k`` (4 × 1000), ``1M``, ``1.5k``.

    Raises:
        InputError: the text is not a whole number, or the number is larger than any position.
    """
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        number = int(digits) * unit if digits.lstrip("+-").isdecimal() else float(digits) * unit
        tokens = int(number)
    except (ValueError, OverflowError):  # no number, "nan", "inf"
        tokens, number = 0, 0.5
    if tokens != number:
        raise InputError(f"{option} {text!r} is not a whole number of tokens; write e.g. 1024, 4K (4096) or 4k (4000).")
    if tokens > MAX_TOKENS:
        raise InputError(f"{option} {text} is larger than {MAX_TOKENS}, the last position there is.")
    return tokens


def parse_number(text: str, option: str) -> float:
    """Read a number.

    Raises:
        InputError: the text is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a number.") from None


def parse_budget(text: str, option: str) -> float | int:
    """Read a budget: ``20%`` becomes the keep ratio 0.2, a number of tokens an int.

    Raises:
        InputError: the text is neither.
        BudgetError: the share is outside 0 … 100 %.
    """
    if not text.endswith("%"):
        return parse_tokens(text, option)
    percent = parse_number(text[:-1], option)
    if not 0 < percent <= 100:
        raise BudgetError(f"{option} {text} is outside 0 … 100%. It is the share of the text's tokens that stay.")
    return percent / 100


def parse_bytes(text: str, option: str, *, example: str = "24GiB (2^30 each) or 24GB (10^9 each)") -> int:
    """Read a size: ``24GiB``, ``24 GB``, ``512MiB``.

    Raises:
        InputError: the text is not a number with a unit, or the size is not above 0 or is larger than any machine.
    """
    found = re.fullmatch(r"\s*([+-]?[0-9]*\.?[0-9]+)\s*([kKMGT]?i?B)\s*", text)
    if found is None or found[2] not in _BYTES:
        raise InputError(f"{option} {text!r} is not a size with a unit; write e.g. {example}.")
    number = float(found[1]) * _BYTES[found[2]]
    if number > _MAX_BYTES:
        raise InputError(f"{option} {text} is more than any machine has, 2^63 bytes; write e.g. {example}.")
    size = round(number)
    if size < 1:
        raise InputError(f"{option} {text} is not above 0; write e.g. {example}.")
    return size


def parse_layer_budget(text: str | None) -> str | list[float] | None:
    """Read ``--layer-budget``: the rule itself, or one weight per layer from a file of persistence ratios.

    Raises:
        InputError: there is no such rule, or the file holds no persistence ratios.
        BudgetError: the rule's parameter is out of range.
    """
    if text is None:
        return None
    from kvkeep.budget import RULES, calibrated, per_layer  # imports torch

    name, _, file = text.partition(":")
    if name in RULES:
        per_layer(text, budget=1, layers=1)  # checks the parameter
        return text
    if name != "calibrated":
        raise InputError(
            f"--layer-budget {text!r} is no rule; use uniform, ramp:0.2, pyramid:20, taper:0.5 or calibrated:FILE."
        )
    refuse_device(file, "file of ratios")
    try:
        content = parse(in_full(file).read_bytes())
        numbers = [float(ratio) for ratio in _persistence(content)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--layer-budget {text}: {file or 'no file'} is no JSON list of persistence ratios by layer ({error})."
        ) from error
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise InputError(f"--layer-budget {text}: a persistence ratio is a share from 0 to 1.")
    return calibrated(numbers)


def _persistence(content: Any) -> list[Any]:
    """Ratios by layer: from a list, an object with one, or the ``persistence.json`` of ``kvkeep analyze``."""
    if not isinstance(content, dict):
        return list(content)
    if content.get("name") != "persistence":
        return list(content["persistence"])
    found = content["result"]
    ratios = found["by_prefix"][str(found["read"])]["ratio"]
    return [1.0 if ratio is None else ratio for ratio in ratios]  # where nothing mattered late, nothing was missed


def parse_positions(text: str | None) -> Literal["true", "slot"] | None:
    """Read ``--positions``.

    Raises:
        InputError: there is no such mode.
    """
    if text not in (None, "true", "slot"):
        raise InputError(f"--positions {text!r} is not a mode; use true or slot.")
    return cast(Literal["true", "slot"] | None, text)


def parse_threads(number: int | None) -> int | None:
    """Check ``--threads``, or the variable KVKEEP_THREADS where it is not given.

    Raises:
        InputError: the number is below 1 or above the number of cores.
    """
    return threads.check(number)


def parse_prefill_chunk(text: str | None) -> int | None:
    """Read ``--prefill-chunk``; ``None`` if it is not given. See `parse_chunk`."""
    return None if text is None else parse_chunk(text)


def parse_chunk(text: str) -> int:
    """Read the number of tokens of a chunk.

    Raises:
        InputError: the text is not a whole number of 1 or more.
    """
    tokens = parse_tokens(text, "--prefill-chunk")
    if tokens < 1:
        raise InputError(f"--prefill-chunk {text} takes no token; give 1 or more, or leave the option out.")
    return tokens


# The option for the bits of keys and values in the slots.

KvBits = Annotated[
    str | None,
    typer.Option(
        metavar="BITS",
        help="Bits of keys and values in the slots: 8, 4, k8v4 (keys in 8, values in 4), or 16 for the model's dtype. "
        "Default: 16.",
        autocompletion=shell_completion.words("8", "4", "k8v4", "16"),
        rich_help_panel=MEMORY,
    ),
]


def parse_kv_bits(text: str | None) -> str | None:
    """Read ``--kv-bits``; ``"16"`` stays what it is, for options that a file decides otherwise.

    Raises:
        InputError: slots cannot have so many bits.
    """
    if text is None:
        return None
    from kvkeep.kv.slot_codec import check_bits  # imports torch

    return check_bits(text) or "16"


# The option that divides the budget among KV heads.

HeadBudget = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How the budget is divided among KV heads: uniform, ada:0.2 within each layer, global:0.2 over all "
        "layers, or profile:FILE with the file of [b]kvkeep calibrate[/b]. Default: the policy's own rule.",
        autocompletion=shell_completion.words("uniform", "ada:0.2", "global:0.2", "profile:"),
        rich_help_panel=MEMORY,
    ),
]


def parse_head_budget(text: str | None) -> str | None:
    """Read ``--head-budget``.

    Raises:
        BudgetError: there is no such rule, or its number is out of range.
        InputError: the profile cannot be read.
    """
    if text is None:
        return None
    from kvkeep.head_profile import Profile
    from kvkeep.policies._head_budgets import PROFILE, parsed  # imports torch

    if parsed(text)[0] == PROFILE:
        Profile.load(text.partition(":")[2])
    return text


# Options of sampling that ``kvkeep generate`` and ``kvkeep chat`` share.

SAMPLING = "Sampling"
"""The panel of ``--help``."""

MaxNewTokens = Annotated[
    str,
    typer.Option(
        "--max-new-tokens", "-n", metavar="TOKENS", help="Stop after so many new tokens.", rich_help_panel=SAMPLING
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        metavar="NUMBER",
        help="0 takes the likeliest token. Above 0, tokens are drawn.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Draw among the likeliest tokens whose probabilities sum up to this.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None, typer.Option(metavar="N", help="Draw among the N likeliest tokens.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Draw among tokens that are at least this share as likely as the likeliest.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(metavar="NUMBER", help="Above 1: tokens that were used become less likely.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="The same seed draws the same text. Each line of a batch job and each answer draws its own.",
        rich_help_panel=SAMPLING,
    ),
]


# The options by which every command that loads a model says which one, and how.


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The options of a command that loads a model, as values.

    Attributes:
        model: a folder or a name on the hub; ``None`` for the embedded model.
        dtype, device: as they were typed.
        load_in: the value of ``--load-in``.
        threads: of torch; ``None`` to leave their number as it is.
        allow_pickle: whether weights may be read from pickles.
    """

    model: str | None
    dtype: str
    device: str
    load_in: str | None
    threads: int | None
    allow_pickle: bool


# ``--ray-workers`` and ``--ray-address``: how many workers of Ray share the work of a command, and where they run.

MOST_WORKERS = 1024


def address(panel: str) -> Any:
    """The option, under a heading of the help."""
    return typer.Option(
        metavar="HOST:PORT",
        help="The cluster, or auto for the one of this machine. Default: RAY_ADDRESS, or processes of this machine "
        "alone.",
        rich_help_panel=panel,
    )


def check_address(text: str | None, what: str, *, asked: bool) -> None:
    """Refuse an address that is empty, or that nothing runs at.

    Args:
        text: the value of ``--ray-address``, if it was given.
        what: what runs there, such as ``workers``; ``--ray-`` before it is the option that says how many.
        asked: whether that option was given.

    Raises:
        InputError: the address is refused.
    """
    if text is None:
        return
    if not asked:
        raise InputError(f"--ray-address is where the {what} of --ray-{what} run; give --ray-{what} N, too.")
    if not text.strip():
        raise InputError(
            f"--ray-address is empty. Give host:port, or leave it out: the {what} then run on this machine."
        )


def check_workers(number: int | None, address: str | None) -> None:
    """Refuse a number of workers that cannot be, and an address that nothing runs at.

    Args:
        number: the value of ``--ray-workers``, if it was given.
        address: that of ``--ray-address``.

    Raises:
        InputError: one of them is refused.
    """
    check_address(address, "workers", asked=number is not None)
    if number is not None and not 1 <= number <= MOST_WORKERS:
        raise InputError(f"--ray-workers {number} is out of range; give 1 to {MOST_WORKERS}.")

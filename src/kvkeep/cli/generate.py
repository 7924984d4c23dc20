"""``kvkeep generate``: the options, and the prompt. The work is in `kvkeep.cli.completion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvkeep.cli.console import Debug, Json, one_line_errors, parse_tokens
from kvkeep.cli.files import not_empty, read_text
from kvkeep.cli.memory_options import (
    LayerBudget,
    Positions,
    PrefillChunk,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
)
from kvkeep.cli.model_options import AllowPickle, Device, Dtype, Model
from kvkeep.errors import InputError

DEFAULT_BUDGET = 1024

_PROMPT, _MEMORY, _SAMPLING = "Prompt", "KV memory", "Sampling"
_PURPOSE = "Give the model some text to continue."


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; numbers of tokens are numbers, the prompt is text, nothing else is checked yet."""

    model: str | None
    prompt: str
    raw: bool
    policy: str
    budget: int | None
    keep_ratio: float | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    positions: Literal["true", "slot"] | None
    compare: bool
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    dtype: str
    device: str
    allow_pickle: bool
    json: bool


@one_line_errors
def generate(
    model: Model = None,
    source: Annotated[
        str | None,
        typer.Argument(help="- reads the prompt from standard input.", show_default=False, metavar="-"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.", rich_help_panel=_PROMPT)
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="FILE",
            help="Read the prompt from a UTF-8 file; - is standard input. A final line break is dropped.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.", rich_help_panel=_PROMPT)
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="What decides which tokens stay, e.g. h2o:recent=32; see [b]kvkeep policies[/b].",
            rich_help_panel=_MEMORY,
        ),
    ] = "h2o",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096) or 4k (4000). "
            f"Default: {DEFAULT_BUDGET}, or prompt and new tokens if these are fewer or the policy is full.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    keep_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Instead of a budget: the fraction of the prompt's tokens to keep, in (0, 1].",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    positions: Positions = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run the full cache too and show both side by side.", rich_help_panel=_MEMORY),
    ] = False,
    max_new_tokens: Annotated[
        str,
        typer.Option("--max-new-tokens", "-n", metavar="TOKENS", help="Stop after so many.", rich_help_panel=_SAMPLING),
    ] = "256",
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", metavar="NUMBER", help="0 is greedy, above 0 draws.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Draw among the likeliest with this much probability.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="N", help="Draw among the N likeliest.", rich_help_panel=_SAMPLING)
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="The same seed draws the same text.", rich_help_panel=_SAMPLING)
    ] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt with a bounded KV cache.

    The text goes to standard output as it is written, a short summary to standard error.
    """
    model, prompt_file = _standard_input(model, source, prompt_file)
    request = Request(
        model=model,
        prompt=read_prompt(prompt, prompt_file),
        raw=raw,
        policy=policy,
        budget=None if budget is None else parse_tokens(budget, "--budget"),
        keep_ratio=keep_ratio,
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        positions=parse_positions(positions),
        compare=compare,
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        dtype=dtype,
        device=device,
        allow_pickle=allow_pickle,
        json=json,
    )
    if budget is not None and keep_ratio is not None:
        raise InputError("--budget and --keep-ratio were both given; one of them says how much to keep.")
    from kvkeep.cli.completion import serve  # torch and transformers: only now

    serve(request)


def _standard_input(model: str | None, source: str | None, file: str | None) -> tuple[str | None, str | None]:
    """Turn a ``-`` among the arguments, alone or after the model, into the prompt file ``-``."""
    if source is None and model == "-":
        model, source = None, "-"
    if source is None:
        return model, file
    if source != "-":
        raise InputError(f"Unexpected argument {source!r}. After the model only - may follow; give text with --prompt.")
    if file is not None:
        raise InputError("- and --prompt-file were both given; one prompt is enough.")
    return model, "-"


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from wherever the user put it.

    Raises:
        InputError: there is none, there are two, or the file cannot be read.
    """
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file were both given; one prompt is enough.")
    if prompt is not None:
        return not_empty(prompt, "The prompt", _PURPOSE)
    if file is None:
        raise InputError("There is no prompt. Give --prompt TEXT, --prompt-file FILE, or - for standard input.")
    return read_text(file, kind="prompt file", purpose=_PURPOSE)

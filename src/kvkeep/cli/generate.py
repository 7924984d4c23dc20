"""``kvkeep generate``: its options, and where the prompt comes from.

The work is done by `completion` for one prompt, and by `job` for a file of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvkeep.cli import distributed, options, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import STANDARD_INPUT, STANDARD_OUTPUT, not_empty, place, read_text
from kvkeep.cli.options import (
    MEMORY,
    SAMPLING,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    HeadBudget,
    Json,
    KvBits,
    LayerBudget,
    LoadIn,
    MaxNewTokens,
    MinP,
    Model,
    ModelRequest,
    PolicyOrNone,
    Positions,
    PrefillChunk,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    parse_bytes,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.usage_errors import exists, quoted, quotes_missing, shown
from kvkeep.errors import InputError, ModelFileError
from kvkeep.policies import DEFAULT
from kvkeep.scale.remote_files import is_address

# A request to ``kvkeep generate``: read by the command, done by `completion` and `job`.


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelRequest):
    """The options of ``kvkeep generate``. Numbers of tokens and the prompt are read; the rest is not checked.

    Attributes:
        memory: the file of a memory that prompts follow.
        json_schema: the schema that the answer follows.
        names_policy: whether the user has named the policy.
    """

    prompt: str
    system: str | None = None
    raw: bool
    policy: str
    budget: int | None
    keep_ratio: float | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    head_budget: str | None
    kv_bits: str | None
    positions: Literal["true", "slot"] | None
    pin_system: bool = False
    guard: float | None = None
    compare: bool
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    seed: int
    json: bool
    memory: str | None = None
    json_schema: str | None = None
    names_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of a batch job, beside a `Request` without a prompt.

    Attributes:
        input: file or folder of prompts, or its address.
        output: JSONL or Parquet file of completions, or its address; ``-`` is standard output.
        skip_bad: whether lines that cannot be run are set aside; otherwise they stop the job.
        max_rows: sequences that run at once.
        kv_memory: bytes that all sequences may take together.
        compile: whether norms and feed-forward layers are compiled.
        workers: number of workers on Ray; ``None`` for an engine in this process.
        address: of a cluster of Ray; ``None`` for one of this machine alone.
    """

    input: str
    output: str
    skip_bad: bool
    max_rows: int | None
    kv_memory: int | None
    compile: bool
    workers: int | None = None
    address: str | None = None


# The words of ``kvkeep generate`` as values: its memory, its budget, and the options of a batch job.

JOB = "Batch job"
"""The heading of its options in the help."""
RayWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run the lines on N engines, each in a process of a cluster of Ray. --max-rows and --kv-memory are then "
        "those of each. Needs the extra kvkeep\\[ray].",
        rich_help_panel=JOB,
    ),
]
RayAddress = Annotated[str | None, options.address(JOB)]


def parse_memory(text: str | None) -> str | None:
    """Read ``--memory``, the name of a file.

    Raises:
        InputError: it is empty, or a size.
    """
    if text is None or exists(text):
        return text
    if not text.strip():
        raise InputError("--memory is empty. Give a file that kvkeep remember has written.")
    if text.endswith("B") and text[:1].isdigit():
        raise InputError(
            f"--memory {text} is a size, and --memory takes a file that kvkeep remember has written. For the size of "
            f"all KV memory: --kv-memory {text}"
        )
    return text


def parse_budget(text: str) -> int:
    """Read ``--budget`` as a number of tokens; a share of an unknown length is refused."""
    if text.endswith("%"):
        raise InputError(
            f"--budget {text} is a share of no known length; give a number of tokens, e.g. 512. For a share of a "
            "single prompt there is --keep-ratio, e.g. 0.2."
        )
    return parse_tokens(text, "--budget")


def parse_batch(
    source: str | None,
    output: str | None,
    *,
    skip_bad: bool,
    max_rows: int | None,
    kv_memory: str | None,
    layers: bool,
    workers: int | None,
    address: str | None,
) -> BatchOptions | None:
    """The options of a batch job; ``None`` if there is no ``--input``."""
    if source is None:
        if skip_bad or layers or any(one is not None for one in (output, max_rows, kv_memory, workers, address)):
            raise InputError(
                "--output, --skip-bad, --max-rows, --kv-memory, --compile, --ray-workers and --ray-address belong to a "
                "batch job: give --input FILE."
            )
        return None
    if output is None:
        raise InputError("A batch job needs --output FILE, where its completions go; - is standard output.")
    if output != STANDARD_OUTPUT and not is_address(output):
        output = str(place(output, "--output"))
    if max_rows is not None and max_rows < 1:
        raise InputError(f"--max-rows {max_rows} runs nothing; give 1 or more.")
    options.check_workers(workers, address)
    size = None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory")
    return BatchOptions(
        input=source,
        output=output,
        skip_bad=skip_bad,
        max_rows=max_rows,
        kv_memory=size,
        compile=layers,
        workers=workers,
        address=address,
    )


# Where the prompt of ``kvkeep generate`` comes from, and words that were meant to be a prompt.

_PURPOSE = "Give the model some text to continue."


def standard_input(
    model: str | None, source: str | None, prompt: str | None, file: str | None
) -> tuple[str | None, str | None]:
    """The model and the prompt file; an argument ``-``, alone or after the model, is the prompt file ``-``.

    Raises:
        InputError: another word follows the model, or there is another prompt.
    """
    if source is None and model == STANDARD_INPUT:
        model, source = None, STANDARD_INPUT
    if source is None:
        return model, file
    if source != STANDARD_INPUT:
        if prompt is not None:
            parts = (prompt, source) if model is None or exists(model) else (prompt, model, source)
            raise InputError(f"Unexpected argument {shown(source)}. {quotes_missing(' '.join(parts))}")
        raise InputError(
            f"Unexpected argument {shown(source)}: after the model only - may follow. For a prompt: -p {quoted(source)}"
        )
    if file is not None:
        raise InputError("- and --prompt-file were both given; one prompt is enough.")
    return model, STANDARD_INPUT


def read_prompt(prompt: str | None, file: str | None, *, model: str | None = None) -> str:
    """The prompt, from ``--prompt`` or a file.

    Args:
        prompt: the text; ``-`` is standard input.
        file: path; ``-`` is standard input.
        model: the model, which may be a prompt or a file that somebody forgot to announce.

    Raises:
        InputError: there is no prompt, there are two, or the file cannot be read.
    """
    if prompt == STANDARD_INPUT and file is None:
        prompt, file = None, STANDARD_INPUT
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file were both given; one prompt is enough.")
    if prompt is not None:
        _check_no_file(prompt)
        return not_empty(prompt, "The prompt", _PURPOSE)
    if file is None:
        raise InputError(f"There is no prompt. {_advice(model)}")
    if file == STANDARD_INPUT:
        distributed.refuse_standard_input()
    return read_text(file, kind="prompt file", purpose=_PURPOSE)


def read_schema(file: str | None) -> str | None:
    """The JSON schema of a file; ``None`` without a file.

    Raises:
        InputError: the file cannot be read.
    """
    if file is None:
        return None
    return read_text(file, kind="JSON schema", purpose='Give a schema such as {"type": "object"}.')


def word_of_prompt(model: str | None, prompt: str | None) -> str | None:
    """The remedy where a model that cannot be found may be the second word of a prompt without quotes."""
    if not model or not prompt or "/" in model or " " in prompt or exists(model):
        return None
    return quotes_missing(f"{prompt} {model}")


def _advice(model: str | None) -> str:
    """How to give a prompt; a word in the model's place may have been meant as one."""
    if model is not None and exists(model, folder=False):
        return f"{model} is a file, not a model; to continue its text: --prompt-file {quoted(model)}"
    if model is not None and "/" not in model and not model.startswith("-") and not exists(model):
        return f"If {quoted(model)} is the prompt: -p {quoted(model)}"
    return "Give --prompt TEXT, --prompt-file FILE, or - for standard input."


def _check_no_file(prompt: str) -> None:
    """Refuse the name of a file in place of its text."""
    if not any(letter.isspace() for letter in prompt) and exists(prompt, folder=False):
        raise InputError(f"The prompt is the name of a file. To read the file: --prompt-file {quoted(prompt)}")


_PROMPT = "Prompt"


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
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A system message before the prompt, for models with a chat template.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.", rich_help_panel=_PROMPT)
    ] = False,
    input: Annotated[  # noqa: A002  the option's name
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help='Run a batch job: a JSONL file whose lines have a "prompt" or "messages", and perhaps "options" of '
            "their own. Other fields are copied to the output. Lines of OpenAI's batch files are answered as such.",
            rich_help_panel=JOB,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="JSONL or Parquet file for the completions, or an address such as s3://bucket/answers.jsonl; the same "
            "command again resumes a job that was stopped. - is standard output.",
            rich_help_panel=JOB,
        ),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Write lines that cannot be run to OUTPUT.bad, or to standard error for -, and run the others.",
            rich_help_panel=JOB,
        ),
    ] = False,
    max_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences that run at once. Default: 16, or what fits.", rich_help_panel=JOB),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV memory of all sequences, e.g. 2GiB or 500MB.", rich_help_panel=JOB),
    ] = None,
    compile: Annotated[  # noqa: A002  the option's name
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile norms and feed-forward layers with torch.compile; worth it on a GPU.",
            rich_help_panel=JOB,
        ),
    ] = False,
    ray_workers: RayWorkers = None,
    ray_address: RayAddress = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="FILE",
            help="A text that kvkeep remember has read: prompts are questions about it. Policy, budget and the other "
            "settings of the memory are then the file's.",
            autocompletion=shell_completion.snapshots,
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A kvkeep.toml, as [b]kvkeep tune[/b] writes it. Its settings hold where no option is given.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    policy: PolicyOrNone = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096) or 4k (4000). "
            "Default: 1024, or the number of prompt and new tokens if it is smaller or the policy is full.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    keep_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Instead of --budget: the share of the prompt's tokens that is kept, in (0, 1].",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    pin_system: Annotated[
        bool,
        typer.Option(
            "--pin-system",
            help="Never evict the system message: that of --system, or those of a file's messages.",
            rich_help_panel=MEMORY,
        ),
    ] = False,
    guard: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Take a quarter or half of the budget where the prompt then loses at most this share of attention, in "
            "[0, 1].",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run a full cache too, and show both side by side.", rich_help_panel=MEMORY),
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE",
            help="The answer is JSON that follows this schema. Needs the extra 'structured'.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = "256",
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or a file of prompts (--input), with a bounded KV cache.

    The text goes to standard output while it is generated, and a short summary to standard error.
    """
    model, prompt_file = standard_input(model, source, prompt, prompt_file)
    batch = parse_batch(
        input,
        output,
        skip_bad=skip_bad,
        max_rows=max_rows,
        kv_memory=kv_memory,
        layers=compile,
        workers=ray_workers,
        address=ray_address,
    )
    if batch and (compare or any(one is not None for one in (prompt, prompt_file, system, keep_ratio, json_schema))):
        raise InputError(
            "--input runs a file of prompts; --prompt, --system, --json-schema, --compare and --keep-ratio are for a "
            "single one."
        )
    if system is not None and raw:
        raise InputError("--system and --raw were both given; --raw leaves out the chat template, its only place.")
    if memory is not None and (compare or system is not None or keep_ratio is not None or pin_system):
        raise InputError(
            "--memory brings the text, its system message and its budget; --system, --pin-system, --keep-ratio and "
            "--compare are for prompts without one."
        )
    if pin_system and not batch and system is None:
        raise InputError("--pin-system keeps a system message, and there is none; give --system TEXT.")
    request = GenerateOptions(
        model=model,
        prompt="" if batch else read_prompt(prompt, prompt_file, model=model),
        system=None if system is None else not_empty(system, "--system", "Leave it out, or give some text."),
        raw=raw,
        policy=policy or DEFAULT,
        names_policy=policy is not None,
        memory=parse_memory(memory),
        budget=None if budget is None else parse_budget(budget),
        keep_ratio=keep_ratio,
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        head_budget=parse_head_budget(head_budget),
        kv_bits=parse_kv_bits(kv_bits),
        positions=parse_positions(positions),
        pin_system=pin_system,
        guard=guard,
        compare=compare,
        json_schema=read_schema(json_schema),
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        json=json,
    )
    if config is not None:
        from kvkeep.cli.generate_batch import with_file_settings  # imports torch

        request = with_file_settings(request, config)
    if budget is not None and keep_ratio is not None:
        raise InputError("--budget and --keep-ratio were both given; one of them says how much to keep.")
    if batch:
        from kvkeep.cli import generate_batch  # imports torch and transformers

        generate_batch.serve(request, batch)
    else:
        from kvkeep.cli import generate_run

        try:
            generate_run.serve(request)
        except ModelFileError as error:
            if remedy := word_of_prompt(model, prompt):
                raise ModelFileError(f"{remedy}. If {model} is the model: {error}") from error
            raise

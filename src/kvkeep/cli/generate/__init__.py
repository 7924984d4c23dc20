"""``kvkeep generate``: its options, and where the prompt comes from.

The work is done by `completion` for one prompt, and by `job` for a file of prompts.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.bits import KvBits, parse_kv_bits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import not_empty
from kvkeep.cli.generate.parse import JOB as _JOB
from kvkeep.cli.generate.parse import RayAddress, RayWorkers, parse_batch, parse_budget, parse_memory
from kvkeep.cli.generate.prompt import read_prompt, read_schema, standard_input, word_of_prompt
from kvkeep.cli.generate.request import Request
from kvkeep.cli.heads import HeadBudget, parse_head_budget
from kvkeep.cli.options import (
    MEMORY,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LayerBudget,
    LoadIn,
    Model,
    PolicyOrNone,
    Positions,
    PrefillChunk,
    Threads,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.sampling import SAMPLING, MaxNewTokens, MinP, RepetitionPenalty, Seed, Temperature, TopK, TopP
from kvkeep.errors import InputError, ModelFileError
from kvkeep.policies import DEFAULT

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
            rich_help_panel=_JOB,
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
            rich_help_panel=_JOB,
        ),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Write lines that cannot be run to OUTPUT.bad, or to standard error for -, and run the others.",
            rich_help_panel=_JOB,
        ),
    ] = False,
    max_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences that run at once. Default: 16, or what fits.", rich_help_panel=_JOB),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV memory of all sequences, e.g. 2GiB or 500MB.", rich_help_panel=_JOB),
    ] = None,
    compile: Annotated[  # noqa: A002  the option's name
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile norms and feed-forward layers with torch.compile; worth it on a GPU.",
            rich_help_panel=_JOB,
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
            autocompletion=complete.snapshots,
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
    request = Request(
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
        from kvkeep.cli.generate.settings import settled  # imports torch

        request = settled(request, config)
    if budget is not None and keep_ratio is not None:
        raise InputError("--budget and --keep-ratio were both given; one of them says how much to keep.")
    if batch:
        from kvkeep.cli.generate import job  # imports torch and transformers

        job.serve(request, batch)
    else:
        from kvkeep.cli.generate import completion

        try:
            completion.serve(request)
        except ModelFileError as error:
            if remedy := word_of_prompt(model, prompt):
                raise ModelFileError(f"{remedy}. If {model} is the model: {error}") from error
            raise

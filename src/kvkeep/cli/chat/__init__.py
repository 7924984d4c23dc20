"""``kvkeep chat``: its options. The work is done by `conversation`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.chat_sessions import ChatFolder, complete_names
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import not_empty
from kvkeep.cli.generate import GenerateOptions, parse_budget, parse_memory
from kvkeep.cli.options import (
    MEMORY,
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    HeadBudget,
    KvBits,
    LayerBudget,
    LoadIn,
    MaxNewTokens,
    MinP,
    Model,
    Positions,
    PrefillChunk,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.policies import LATER

_CHAT = "Conversation"


@one_line_errors
def chat(
    model: Model = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            "-s",
            metavar="NAME",
            help="Continue the conversation of this name, or begin it. Default: a new one, named by date and time.",
            autocompletion=complete_names,
            rich_help_panel=_CHAT,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Begin with a text that kvkeep remember has read.",
            autocompletion=shell_completion.snapshots,
            rich_help_panel=_CHAT,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A system message at the beginning.", rich_help_panel=_CHAT),
    ] = None,
    sessions: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of saved conversations. Default: KVKEEP_SESSIONS, or kvkeep/sessions in your data folder.",
            rich_help_panel=_CHAT,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the saved conversations and stop.", rich_help_panel=_CHAT)
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help=f"Eviction policy, with its options if need be. See [b]kvkeep policies[/b]. Default: {LATER}.",
            autocompletion=shell_completion.policies,
            rich_help_panel=MEMORY,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096) or 4k (4000). Default: 1024; under full 8192.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    max_new_tokens: MaxNewTokens = "1024",
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
    json: Annotated[
        bool, typer.Option("--json", help="With --list: print one JSON object.", rich_help_panel=OUTPUT)
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk with a model in the terminal, in a fixed amount of memory.

    The conversation is saved after each answer and continued by its name. /help lists what can be typed besides
    messages; Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, each line of standard input is a message.
    """
    folder = ChatFolder.of(sessions)
    if list_:
        from kvkeep.cli import chat_sessions

        chat_sessions.show(folder, as_json=json)
        return
    if json:
        raise InputError("--json prints the list of conversations: give --list, too.")
    if memory is not None and system is not None:
        raise InputError("--memory brings its own beginning; give --system to kvkeep remember.")
    from kvkeep.cli import chat_run  # imports torch and transformers

    request = GenerateOptions(
        model=model,
        prompt="",
        system=None if system is None else not_empty(system, "--system", "Leave it out, or give some text."),
        raw=False,
        policy=policy or LATER,
        names_policy=policy is not None,
        memory=parse_memory(memory),
        budget=None if budget is None else parse_budget(budget),
        keep_ratio=None,
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        head_budget=parse_head_budget(head_budget),
        kv_bits=parse_kv_bits(kv_bits),
        positions=parse_positions(positions),
        compare=False,
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
        json=False,
    )
    chat_run.serve(request, folder, session)

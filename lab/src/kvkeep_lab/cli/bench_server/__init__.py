"""``kvkeep bench-server``: its options. The work is in `report` beside it, and in `kvkeep_lab.loadtest`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from kvkeep.cli.console import one_line_errors
from kvkeep.cli.options import OUTPUT, Debug, Json
from kvkeep.cli.plugins import MEASURE, Plugin
from kvkeep.errors import InputError, pip_install

_ARRIVALS, _TEXTS, _SERVER = "Arrivals", "Prompts and answers", "Server"


@one_line_errors
def bench_server(
    url: Annotated[
        str, typer.Argument(help="Address of a server of OpenAI's API: http://127.0.0.1:8000.", metavar="URL")
    ],
    requests: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of requests, or of conversations with --turns.", rich_help_panel=_ARRIVALS
        ),
    ] = 100,
    rate: Annotated[
        float,
        typer.Option(
            metavar="RATE",
            help="Mean number of them per second, at random times; inf sends all at once.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = 4.0,
    turns: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Messages in each conversation. Each is sent after the answer to the one before.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = 1,
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Run conversations as sessions of kvkeep, which send only the new message.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = False,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Requests sent beforehand that are not counted.", rich_help_panel=_ARRIVALS)
    ] = 2,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the arrival times, lengths and texts.", rich_help_panel=_ARRIVALS)
    ] = 0,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            help="Length of a prompt in short words: 128; 64-512 (all equally likely); ~200 (exponential with this "
            "mean).",
            rich_help_panel=_TEXTS,
        ),
    ] = "128",
    max_new_tokens: Annotated[
        str,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="LENGTH",
            help="Length of an answer in tokens, written like that of a prompt.",
            rich_help_panel=_TEXTS,
        ),
    ] = "64",
    input: Annotated[  # noqa: A002  the flag of all commands
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help='JSONL with prompts or lengths: {"prompt": "Hi", "max_tokens": 64} or {"prompt_tokens": 512}.',
            rich_help_panel=_TEXTS,
        ),
    ] = None,
    prefixes: Annotated[
        int, typer.Option(metavar="N", help="Number of beginnings that prompts share.", rich_help_panel=_TEXTS)
    ] = 1,
    prefix_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Length of each shared beginning, added to the prompt's length.",
            rich_help_panel=_TEXTS,
        ),
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model to ask. Default: the first one of /v1/models.", rich_help_panel=_SERVER
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="API key. A variable keeps it out of the list of processes.",
            envvar=["KVKEEP_API_KEY", "OPENAI_API_KEY"],
            show_envvar=True,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--completions", help="Use /v1/chat/completions or /v1/completions.", rich_help_panel=_SERVER
        ),
    ] = True,
    ignore_end: Annotated[
        bool,
        typer.Option(
            "--ignore-end",
            help="Let every answer have its full length (the field ignore_eos of kvkeep and vLLM).",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest wait for the next piece of an answer.", rich_help_panel=_SERVER),
    ] = 600.0,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for a line of JSON about each request.", rich_help_panel=OUTPUT
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a server of OpenAI's API with requests that arrive at random times, and show its times.

    The loop is open: a request is sent when it is due, however many others still wait, as independent clients would
    do. Times count from that moment.
    """
    if find_spec("httpx") is None:
        raise InputError(f"This command needs httpx, which is not installed: {pip_install('server')}.")
    if sessions and not chat:
        raise InputError("--sessions and --completions were both given; a session goes on with messages.")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InputError("`api_key` has letters that no header can have; give the key as the server knows it.")
    if not 0 < timeout < 10**9:
        raise InputError(f"`timeout={timeout:g}` is no time; give seconds above 0.")
    if not 0 <= warmup <= 10**4:
        raise InputError(f"`warmup={warmup}` is outside 0 … 10000.")
    from kvkeep_lab.cli.bench_server import report  # imports httpx
    from kvkeep_lab.loadtest.client import Target, base_url
    from kvkeep_lab.loadtest.lengths import Lengths
    from kvkeep_lab.loadtest.plan import Load, read_lines

    load = Load(
        requests=requests,
        rate=rate,
        prompt_tokens=Lengths.read(prompt_tokens, "prompt_tokens"),
        new_tokens=Lengths.read(max_new_tokens, "max_new_tokens"),
        prefixes=prefixes,
        prefix_tokens=prefix_tokens,
        turns=turns,
        seed=seed,
        lines=() if input is None else read_lines(input),
    )
    extra = {"ignore_eos": True} if ignore_end else {}
    target = Target(
        url=base_url(url), model=model or "", key=api_key or None, chat=chat, timeout_s=timeout, extra=extra
    )
    report.run(target, load, sessions=sessions, warmup=warmup, output=output, json=json)


PLUGIN = Plugin(
    command=bench_server,
    panel=MEASURE,
    examples={
        "kvkeep bench-server http://127.0.0.1:8000": "100 requests, 4 per second",
        "kvkeep bench-server URL --prompt-tokens 64-512 -n ~100": "Lengths that differ",
        "kvkeep bench-server URL --turns 4 --sessions": "Conversations that kvkeep remembers",
    },
)

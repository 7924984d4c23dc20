"""``kvkeep serve``: its options. The work is done by `serving`."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import typer

from kvkeep.cli import options, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import refuse_device
from kvkeep.cli.options import (
    MEMORY,
    MODEL,
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    HeadBudget,
    KvBits,
    LayerBudget,
    LoadIn,
    ModelRequest,
    Policy,
    Positions,
    PrefillChunk,
    Threads,
    given,
    parse_bytes,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.usage_errors import CommandLineError
from kvkeep.errors import InputError, pip_install
from kvkeep.policies import DEFAULT
from kvkeep.result_files import in_full

# Options of ``kvkeep serve`` that no other command has.

ADDRESS, CLIENTS, LIMITS, REPLICAS = "Address", "Clients", "Limits", "Replicas"
"""Panels of ``--help``."""
ENVIRONMENT = "KVKEEP"
"""What the names of environment variables begin with."""


MOST_REPLICAS = 1024


def parse_replicas(text: str | None, address: str | None) -> tuple[int, int] | None:
    """Read ``--ray-replicas``: the least and the most replicas, or ``None``.

    Raises:
        InputError: it is neither a number nor two, or is out of range; or there is an address without it.
    """
    options.check_address(address, "replicas", asked=text is not None)
    if text is None:
        return None
    first, dash, last = text.strip().partition("-")
    numbers = [first, last] if dash else [first, first]
    if not all(one.isascii() and one.isdecimal() for one in numbers):
        raise InputError(f"--ray-replicas {text!r:.40} is not a number; give 2, or the least and the most: 1-4.")
    least, most = (int(one[:9]) for one in numbers)
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise InputError(
            f"--ray-replicas {text:.40} is out of range; give 1 to {MOST_REPLICAS}, the smaller one first."
        )
    return least, most


def _config(ctx: Any, file: str | None) -> str | None:
    """Take the options of a TOML file as defaults; words of the command line and variables go first."""
    if file is None or ctx.resilient_parsing:
        return file
    refuse_device(file, "file of settings")
    try:
        found = tomllib.loads(in_full(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"--config {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandLineError(f"--config {file} is no TOML: {error}.") from error
    names = {param.name for param in ctx.command.params} - {"config", "check", "debug"}
    found.pop("tuned", None)  # how `kvkeep tune` found the other settings
    ctx.default_map = {_known(name, file, names): _plain(name, value, file) for name, value in found.items()}
    return file


def _known(name: str, file: str, names: set[Any]) -> str:
    """The parameter of a name in a file of settings."""
    found = name.replace("-", "_")
    if found not in names:
        alike = difflib.get_close_matches(found, names, 1)
        remedy = f"Did you mean {alike[0].replace('_', '-')}?" if alike else "See kvkeep serve --help for all names."
        raise CommandLineError(f"--config {file} has the unknown name {name}. {remedy}")
    return found


def _plain(name: str, value: object, file: str) -> object:
    """A value as it would be typed."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    if not isinstance(value, bool | int | float | str):
        raise CommandLineError(f"--config {file}: {name} is no text, number or true/false.")
    return value


Model = Annotated[
    str | None,
    typer.Argument(
        help="A hub name or a local folder. The embedded model if not given.",
        show_default=False,
        metavar="MODEL",
        envvar=f"{ENVIRONMENT}_MODEL",
        show_envvar=False,
        callback=given,
        autocompletion=shell_completion.models,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="TOML file with these options, by the same names. Flags, and variables such as KVKEEP_PORT, override it.",
        is_eager=True,
        callback=_config,
        rich_help_panel=OUTPUT,
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Check all settings and stop.", rich_help_panel=OUTPUT)]
AccessLog = Annotated[bool, typer.Option(help="Log a line for each request, without its text.", rich_help_panel=OUTPUT)]
LivePage = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve a page with a chat at /.", rich_help_panel=OUTPUT)
]
ServedName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The model's name in the API. Default: MODEL.", rich_help_panel=MODEL),
]
ToolForm = Annotated[
    str,
    typer.Option(
        metavar="FORM",
        help="How the model calls tools: hermes, llama3, mistral, or auto, which reads it off the chat template.",
        rich_help_panel=MODEL,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="TOKENS",
        help="Tokens kept per layer and head, e.g. 2048 or 4K; the most that a request may ask for.",
        rich_help_panel=MEMORY,
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(metavar="N", help="Sequences that run at once. Default: 16, or what fits.", rich_help_panel=MEMORY),
]
KvMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="KV memory of all sequences, e.g. 8GiB.", rich_help_panel=MEMORY),
]
Guard = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Give a request a quarter or half of its budget if its prompt then loses at most this share of attention.",
        rich_help_panel=MEMORY,
    ),
]
HostRows = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Sequences that may run beside those in the rows. They wait in main memory and take turns.",
        rich_help_panel=MEMORY,
    ),
]
PrefixMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Main memory for common beginnings of prompts. Needs --prefill-chunk.",
        rich_help_panel=MEMORY,
    ),
]
SessionMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Main memory for idle sessions. The rest is moved to --session-dir.",
        rich_help_panel=MEMORY,
    ),
]
SessionDir = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder of saved sessions.", rich_help_panel=MEMORY)
]
Host = Annotated[
    str, typer.Option(metavar="NAME", help="Address to listen on; 0.0.0.0 is all.", rich_help_panel=ADDRESS)
]
Port = Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 is any free one.", rich_help_panel=ADDRESS)]
UnixSocket = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Listen on a unix socket, which only you may use.", rich_help_panel=ADDRESS),
]
TlsCert = Annotated[
    str | None, typer.Option(metavar="FILE", help="Certificate for HTTPS (PEM).", rich_help_panel=ADDRESS)
]
TlsKey = Annotated[
    str | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).", rich_help_panel=ADDRESS)
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL", help="A web page's origin that may call the API (CORS). Default: none.", rich_help_panel=ADDRESS
    ),
]
RayReplicas = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Serve with N engines, each in a process of a cluster of Ray; with 1-4, as many as rows are needed. "
        "--max-rows, --kv-memory and the limits below are then those of each; limits of keys hold over "
        "all. Needs the extra kvkeep\\[ray].",
        rich_help_panel=REPLICAS,
    ),
]
RayAddress = Annotated[str | None, options.address(REPLICAS)]
KeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="API keys, one per line: KEY, or NAME KEY. One key may also stand in KVKEEP_API_KEY.",
        rich_help_panel=CLIENTS,
    ),
]
KeyRequests = Annotated[
    int | None, typer.Option(metavar="N", help="Requests that one key may run at once.", rich_help_panel=CLIENTS)
]
KeyTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens that one key may use per minute.", rich_help_panel=CLIENTS)
]
MaxNewTokens = Annotated[
    str,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="TOKENS",
        help="New tokens of a chat request that names no number.",
        rich_help_panel=LIMITS,
    ),
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of a prompt and its answer together. Default: the trained length; with slot positions no limit.",
        rich_help_panel=LIMITS,
    ),
]
MaxQueue = Annotated[int, typer.Option(metavar="N", help="Requests that may wait for a row.", rich_help_panel=LIMITS)]
QueueTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long a request may wait for a row.", rich_help_panel=LIMITS)
]
RequestTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long a request may run.", rich_help_panel=LIMITS)
]
ReadTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long a client may take to send a request, or stop reading its answer.",
        rich_help_panel=LIMITS,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Time for running requests to end after SIGTERM or Ctrl-C.", rich_help_panel=LIMITS
    ),
]
MaxBody = Annotated[str, typer.Option(metavar="SIZE", help="The largest body of a request.", rich_help_panel=LIMITS)]


# A request to ``kvkeep serve``.


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelRequest):
    """The options of ``kvkeep serve``. Sizes and numbers of tokens are read; the rest is not checked."""

    served_name: str | None
    tool_form: str
    policy: str
    budget: int
    max_rows: int | None
    kv_memory: int | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    head_budget: str | None
    kv_bits: str | None
    positions: Literal["true", "slot"] | None
    guard: float | None
    host_rows: int
    prefix_memory: int
    session_memory: int | None
    session_dir: str | None
    replicas: tuple[int, int] | None
    ray_address: str | None
    host: str
    port: int
    unix_socket: str | None
    tls_cert: str | None
    tls_key: str | None
    allow_origin: tuple[str, ...]
    key_file: str | None
    key_requests: int | None
    key_tokens: int | None
    max_new_tokens: int
    max_model_len: int | None
    max_queue: int
    queue_timeout: float
    request_timeout: float
    read_timeout: float
    grace: float
    max_body: int
    access_log: bool
    page: bool
    check: bool


_WAITING = "passive"
"""How torch's threads wait for work. Active ones spin on the cores that the web's thread and clients need."""
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@one_line_errors
def serve(
    model: Model = None,
    served_name: ServedName = None,
    tool_form: ToolForm = "auto",
    policy: Policy = DEFAULT,
    budget: Budget = "1024",
    max_rows: MaxRows = None,
    kv_memory: KvMemory = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    guard: Guard = None,
    host_rows: HostRows = 0,
    prefix_memory: PrefixMemory = None,
    session_memory: SessionMemory = None,
    session_dir: SessionDir = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    ray_replicas: RayReplicas = None,
    ray_address: RayAddress = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    unix_socket: UnixSocket = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    allow_origin: AllowOrigin = None,
    key_file: KeyFile = None,
    key_requests: KeyRequests = None,
    key_tokens: KeyTokens = None,
    max_new_tokens: MaxNewTokens = "1024",
    max_model_len: MaxModelLen = None,
    max_queue: MaxQueue = 256,
    queue_timeout: QueueTimeout = 60.0,
    request_timeout: RequestTimeout = 600.0,
    read_timeout: ReadTimeout = 30.0,
    grace: Grace = 30.0,
    max_body: MaxBody = "16MiB",
    access_log: AccessLog = True,
    page: LivePage = True,
    config: Config = None,
    check: Check = False,
    debug: Debug = False,
) -> None:
    """Serve a model through OpenAI's API, each conversation in a fixed amount of memory.

    Clients use http://HOST:PORT/v1 as their base URL. Every option can also stand in a variable, such as
    KVKEEP_BUDGET, or in the file of --config.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise InputError(f"The server needs {missing[0]}, which is not installed: {pip_install('server')}.")
    os.environ.setdefault("OMP_WAIT_POLICY", _WAITING)
    request = ServeOptions(
        model=model,
        served_name=served_name,
        tool_form=tool_form,
        policy=policy,
        budget=parse_tokens(budget, "--budget"),
        max_rows=max_rows,
        kv_memory=_size(kv_memory, "--kv-memory"),
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        head_budget=parse_head_budget(head_budget),
        kv_bits=parse_kv_bits(kv_bits),
        positions=parse_positions(positions),
        guard=guard,
        host_rows=host_rows,
        prefix_memory=_size(prefix_memory, "--prefix-memory") or 0,
        session_memory=_size(session_memory, "--session-memory"),
        session_dir=session_dir,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        replicas=parse_replicas(ray_replicas, ray_address),
        ray_address=ray_address,
        host=host,
        port=port,
        unix_socket=unix_socket,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_origin=tuple(allow_origin or ()),
        key_file=key_file,
        key_requests=key_requests,
        key_tokens=key_tokens,
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        max_model_len=None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        max_queue=max_queue,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        read_timeout=read_timeout,
        grace=grace,
        max_body=parse_bytes(max_body, "--max-body", example="16MiB"),
        access_log=access_log,
        page=page,
        check=check,
    )
    from kvkeep.cli import serve_run  # imports torch, transformers and fastapi

    serve_run.run(request)


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option, example="8GiB")

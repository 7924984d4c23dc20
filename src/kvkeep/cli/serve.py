"""``kvkeep serve``: its options. The work is in `kvkeep.cli.serve_run`."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from kvkeep import parameters
from kvkeep.cli import options
from kvkeep.cli.files import refuse_device
from kvkeep.cli.options import (
    ADAPTER,
    BUDGET,
    HEAD_BUDGET,
    KEEP_PROMPT,
    KV_BITS,
    LAYER_BUDGET,
    MAX_ROWS,
    MODEL_WORD,
    NO_DEFAULT,
    OUTPUT,
    PIN_SYSTEM,
    POLICY,
    POSITIONS,
    PREFILL_CHUNK,
    RAY_ADDRESS,
    ModelOptions,
    argument,
    check_policy,
    described,
    option,
    parse_bytes,
    parse_tokens,
)
from kvkeep.cli.usage_errors import CommandLineError
from kvkeep.errors import InputError, pip_install
from kvkeep.parameters import CHAT_MAX_NEW_TOKENS, MEMORY, MODEL, SERVER
from kvkeep.policies import CONVERSATION, DEFAULT
from kvkeep.result_files import in_full

# Options of ``kvkeep serve`` that no other command has.

REPLICAS = "Replicas"
"""A group of options on the page of help."""
ENVIRONMENT = "KVKEEP"
"""What the names of environment variables begin with."""


MOST_REPLICAS = 1024  # each is a process with the whole model; more are a mistake


def parse_replicas(text: str | None, address: str | None) -> tuple[int, int] | None:
    """Return the least and the most replicas of ``--ray-replicas``; ``None`` if it was not given.

    Raises:
        InputError: the text is neither one number nor two, or out of range; or an address was given without it.
    """
    options.check_address(address, "replicas", asked=text is not None)
    if text is None:
        return None
    first, dash, last = text.strip().partition("-")
    numbers = [first, last] if dash else [first, first]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise InputError(f"--ray-replicas {text!r:.40} is not a number; give 2, or the least and the most: 1-4.")
    least, most = (int(number[:9]) for number in numbers)  # Python reads no number of thousands of digits
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise InputError(
            f"--ray-replicas {text:.40} is out of range; give 1 to {MOST_REPLICAS}, the smaller one first."
        )
    return least, most


def _config(ctx: Any, file: str | None) -> str | None:
    """Use the settings of a TOML file as defaults of the command's options, and return the file's name.

    The command line and variables take precedence.

    Raises:
        CommandLineError: the file cannot be used.
    """
    if file is None or ctx.resilient_parsing:
        return file
    refuse_device(file, "file of settings")
    try:
        found = tomllib.loads(in_full(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CommandLineError(f"--config {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandLineError(f"--config {file} is no TOML: {error}.") from error
    # what a file cannot set: its own name, and whether it is only checked
    names = {param.name for param in ctx.command.params} - {"config", "check"}
    found.pop("tuned", None)  # how `kvkeep tune` found the other settings
    ctx.default_map = {_known(name, file, names): _plain(name, value, file) for name, value in found.items()}
    return file


def _known(name: str, file: str, names: set[Any]) -> str:
    """Return the parameter that a name in a file of settings stands for.

    Raises:
        CommandLineError: there is no such parameter.
    """
    found = name.replace("-", "_")
    if found not in names:
        alike = difflib.get_close_matches(found, names, 1)
        remedy = (
            f"Did you mean {alike[0].replace('_', '-')}?" if alike else "See kvkeep serve --help-all for all names."
        )
        raise CommandLineError(f"--config {file} has the unknown name {name}. {remedy}")
    return found


def _plain(name: str, value: object, file: str) -> object:
    """Return a value of a file of settings as it is, after a check that it is a text, number, switch or list of texts.

    Raises:
        CommandLineError: the value has another type.
    """
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if not isinstance(value, bool | int | float | str):
        raise CommandLineError(f"--config {file}: {name} is no text, number or true/false.")
    return value


def _size(text: str, option: str) -> int:
    """Return the number of bytes that a text of an option means: ``8GiB``."""
    return parse_bytes(text, option, example="8GiB")


def _size_or_nothing(text: str | None, option: str) -> int:
    """Return the number of bytes that a text of an option means; 0 if the option was not given."""
    return 0 if text is None else _size(text, option)


def _body(text: str, option: str) -> int:
    """Return the bytes of an option, the most that a request's body may have: ``16MiB``."""
    return parse_bytes(text, option, example="16MiB")


def _origins(given: list[str] | None, option: str) -> tuple[str, ...]:
    """Return the web origins of an option as a tuple, unchecked; ``()`` if it is not given."""
    return tuple(given or ())


def _hosts(given: list[str] | None, option: str) -> tuple[str, ...]:
    """Return host names in small letters, without a port and a dot at the end; ``*`` stays, ``()`` for ``None``.

    Raises:
        InputError: one is a URL or no name.
    """
    for name in given or ():
        if not re.fullmatch(r"\*|[A-Za-z0-9._-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?", name, re.ASCII):
            raise InputError(f"{option}={name!r:.80} is no host; give a name alone, such as kvkeep.example.")
    # a full name may end with a dot
    return tuple(re.sub(r":\d+$", "", name).lower().rstrip(".") for name in given or ())


_WAITING = "passive"
"""How torch's threads wait for work. Active ones spin on the cores that the web's thread and clients need."""
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """Serve a model through OpenAI's API, each conversation in a fixed amount of memory.

    Clients use http://HOST:PORT/v1 as their base URL. Every option can also stand in a variable, such as
    KVKEEP_BUDGET, or in the file of --config.
    """

    model: str | None = argument(  # typer makes variables of options alone, so this one is named
        MODEL_WORD, more={**MODEL_WORD.more, "envvar": f"{ENVIRONMENT}_MODEL", "show_envvar": False}
    )
    served_name: str | None = option(
        "The model's name in the API. Default: MODEL.", default=None, metavar="NAME", group=MODEL
    )
    adapter: Mapping[str, str] = option(ADAPTER)
    tool_form: str = option(
        "How the model calls tools: hermes, llama3, mistral, or auto, which reads it off the chat template.",
        default="auto",
        metavar="FORM",
        group=MODEL,
        rare=True,
    )
    policy: str = option(
        POLICY,
        help=f"{POLICY.help} Default: {CONVERSATION}; on a GPU {DEFAULT}.",
        default="",
        more=NO_DEFAULT,
    )
    budget: int = option(
        BUDGET,
        help="Tokens kept per layer and head, e.g. 2048 or 4K; the most that a request may ask for.",
        default="1024",
    )
    max_rows: int | None = option(MAX_ROWS)
    kv_memory: int | None = option(
        "KV memory of all sequences, e.g. 8GiB.", read=_size, default=None, metavar="SIZE", group=MEMORY
    )
    prefill_chunk: int | None = option(PREFILL_CHUNK)
    layer_budget: str | list[float] | None = option(LAYER_BUDGET)
    head_budget: str | None = option(HEAD_BUDGET)
    kv_bits: str | None = option(KV_BITS)
    keep_prompt: bool | float | None = option(KEEP_PROMPT, rare=True)
    positions: Literal["true", "slot"] | None = option(POSITIONS)
    pin_system: bool = option(PIN_SYSTEM)
    guard: float | None = option(
        described(parameters.GUARD),
        help="Give a request a quarter or half of its budget if its prompt then loses at most this share of attention.",
    )
    host_rows: int = option(
        "Sequences that may run beside those in the rows. They wait in main memory and take turns.",
        default=0,
        metavar="N",
        group=MEMORY,
        rare=True,
    )
    prefix_memory: int = option(
        "Main memory for common beginnings of prompts. Needs --prefill-chunk.",
        read=_size_or_nothing,
        reads_none=True,
        default=None,
        metavar="SIZE",
        group=MEMORY,
        rare=True,
    )
    conversations: Literal["auto", "continue", "fresh"] = option(described(parameters.CONVERSATIONS))
    conversation_ttl: float = option(described(parameters.CONVERSATION_TTL))
    session_memory: int | None = option(
        "Main memory for idle sessions and conversations. The rest is moved to --session-dir; without it "
        "conversations are forgotten. Default: 4GiB, or a quarter of the free memory if that is less.",
        read=_size,
        default=None,
        metavar="SIZE",
        group=MEMORY,
        rare=True,
    )
    session_dir: str | None = option("Folder of saved sessions.", default=None, metavar="DIR", group=MEMORY)
    ray_replicas: str | None = option(
        "Serve with N engines, each in a process of a cluster of Ray; with 1-4, as many as rows are needed. "
        "--max-rows, --kv-memory and the limits below are then those of each; limits of keys hold over all. Needs the "
        "extra kvkeep\\[ray].",
        default=None,
        metavar="N",
        group=REPLICAS,
        rare=True,
    )
    ray_address: str | None = option(RAY_ADDRESS, group=REPLICAS)
    replicas: tuple[int, int] | None = None  # set by `checked`
    host: str = option(described(parameters.HOST))
    port: int = option(described(parameters.PORT))
    unix_socket: str | None = option(
        "Listen on a unix socket, which only you may use.", default=None, metavar="PATH", group=SERVER, rare=True
    )
    tls_cert: str | None = option("Certificate for HTTPS (PEM).", default=None, metavar="FILE", group=SERVER, rare=True)
    tls_key: str | None = option(
        "Private key of the certificate (PEM).", default=None, metavar="FILE", group=SERVER, rare=True
    )
    allow_origin: tuple[str, ...] = option(
        "A web page's origin that may call the API (CORS). Default: none.",
        read=_origins,
        reads_none=True,
        type=list[str] | None,
        default=None,
        metavar="URL",
        group=SERVER,
        rare=True,
    )
    allowed_host: tuple[str, ...] = option(
        "A name by which clients reach this server, beside localhost; * is any. Needed where --host is no loopback "
        "address and there is no key.",
        read=_hosts,
        reads_none=True,
        type=list[str] | None,
        default=None,
        metavar="NAME",
        group=SERVER,
        rare=True,
    )
    page: bool = option(described(parameters.PAGE), "--page/--no-page")
    key_file: str | None = option(
        "API keys, one per line: KEY, or NAME KEY. One key may also stand in KVKEEP_API_KEY.",
        default=None,
        metavar="FILE",
        group=SERVER,
    )
    key_requests: int | None = option(described(parameters.KEY_REQUESTS))
    key_tokens: int | None = option(described(parameters.KEY_TOKENS))
    max_new_tokens: int = option(
        described(CHAT_MAX_NEW_TOKENS), "-n", default=str(CHAT_MAX_NEW_TOKENS.default), read=parse_tokens
    )
    max_model_len: int | None = option(described(parameters.MAX_MODEL_LEN), read=parse_tokens)
    max_queue: int = option(described(parameters.MAX_QUEUE))
    queue_timeout: float = option(described(parameters.QUEUE_TIMEOUT))
    request_timeout: float = option(described(parameters.REQUEST_TIMEOUT))
    read_timeout: float = option(described(parameters.READ_TIMEOUT))
    grace: float = option(described(parameters.GRACE))
    max_body: int = option(
        described(parameters.MAX_BODY), read=_body, default=f"{parameters.MAX_BODY.default // 2**20}MiB"
    )
    access_log: bool = option("Log a line for each request, without its text.", default=True, group=OUTPUT, rare=True)
    config: str | None = option(
        "TOML file with these options by name. Flags and variables override it.",
        default=None,
        metavar="FILE",
        group=OUTPUT,
        more={"is_eager": True, "callback": _config},
    )
    check: bool = option("Check all settings and stop.", default=False, group=OUTPUT)

    @classmethod
    def prepare(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check that the server's packages are installed, set how torch's threads wait, and return the options
        unchanged.

        Raises:
            InputError: a package is missing.
        """
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            raise InputError(f"The server needs {missing[0]}, which is not installed: {pip_install('server')}.")
        # here, since the library that reads it is loaded with torch
        os.environ.setdefault("OMP_WAIT_POLICY", _WAITING)
        return given

    def check_values(self) -> None:
        """Refuse numbers out of range, a model or a policy that does not exist, and a dtype or a device that cannot be
        used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        self._check_numbers()
        super().check_values()
        if self.policy:
            check_policy(self.policy)

    def _check_numbers(self) -> None:
        """Refuse numbers that are out of range.

        Raises:
            InputError: a number is out of range.
        """
        for parameter in (*parameters.SERVER_TIMES, parameters.CONVERSATION_TTL):
            if not parameter.allows(seconds := getattr(self, parameter.name)):
                raise InputError(f"{parameter.name}={seconds:g} is no time; give seconds above 0.")
        for parameter in parameters.SERVER_COUNTS:
            number = getattr(self, parameter.name)
            if number is not None and not parameter.allows(number):
                raise InputError(f"{parameter.name}={number} is less than {parameter.least}.")
        if not (port := parameters.PORT).allows(self.port):
            raise InputError(f"port={self.port} is outside {port.least} … {port.most}; 0 takes any free one.")

    def checked(self) -> ServeOptions:
        """Return a copy of the options with ``--ray-replicas`` read as two numbers.

        Raises:
            InputError: they are out of range, or an address was given without them.
        """
        return replace(self, replicas=parse_replicas(self.ray_replicas, self.ray_address))

"""The options of ``kvkeep bench-server``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvkeep.cli.options import JSON, OUTPUT, CommandOptions, argument, option
from kvkeep.errors import InputError

_ARRIVALS, _TEXTS, _SERVER = "Arrivals", "Prompts and answers", "Server"


@dataclass(frozen=True, kw_only=True)
class BenchServerOptions(CommandOptions):
    """Load a server of OpenAI's API with requests that arrive at random times, and show its times.

    The loop is open: a request is sent when it is due, however many others still wait, as independent clients would
    do. Times count from that moment.
    """

    url: str = argument("Address of a server of OpenAI's API: http://127.0.0.1:8000.", metavar="URL")
    requests: int = option(
        "Number of requests, or of conversations with --turns.", default=100, metavar="N", group=_ARRIVALS
    )
    rate: float = option(
        "Mean number of them per second, at random times; inf sends all at once.",
        default=4.0,
        metavar="RATE",
        group=_ARRIVALS,
    )
    turns: int = option(
        "Messages in each conversation. Each is sent after the answer to the one before.",
        default=1,
        metavar="N",
        group=_ARRIVALS,
    )
    sessions: bool = option(
        "Run conversations as sessions of kvkeep, which send only the new message.", default=False, group=_ARRIVALS
    )
    warmup: int = option(
        "Requests sent beforehand that are not counted.", default=2, metavar="N", group=_ARRIVALS, rare=True
    )
    seed: int = option(
        "Seed of the arrival times, lengths and texts.", default=0, metavar="N", group=_ARRIVALS, rare=True
    )
    prompt_tokens: str = option(
        "Length of a prompt in short words: 128; 64-512 (all equally likely); ~200 (exponential with this mean).",
        default="128",
        metavar="LENGTH",
        group=_TEXTS,
    )
    max_new_tokens: str = option(
        "Length of an answer in tokens, written like that of a prompt.",
        "-n",
        default="64",
        metavar="LENGTH",
        group=_TEXTS,
    )
    input: str | None = option(
        'JSONL with prompts or lengths: {"prompt": "Hi", "max_tokens": 64} or {"prompt_tokens": 512}.',
        "-i",
        default=None,
        metavar="FILE",
        group=_TEXTS,
    )
    prefixes: int = option("Number of beginnings that prompts share.", default=1, metavar="N", group=_TEXTS, rare=True)
    prefix_tokens: int = option(
        "Length of each shared beginning, added to the prompt's length.",
        default=0,
        metavar="TOKENS",
        group=_TEXTS,
        rare=True,
    )
    model: str | None = option(
        "The model to ask. Default: the first one of /v1/models.", default=None, metavar="NAME", group=_SERVER
    )
    api_key: str | None = option(
        "API key. A variable keeps it out of the list of processes.",
        default=None,
        metavar="KEY",
        group=_SERVER,
        more={"envvar": ["KVKEEP_API_KEY", "OPENAI_API_KEY"], "show_envvar": True},
    )
    chat: bool = option(
        "Use /v1/completions in place of /v1/chat/completions.",
        "--completions",
        name="completions",
        type=bool,
        default=False,
        read=lambda completions, flag: not completions,
        group=_SERVER,
    )
    ignore_end: bool = option(
        "Let every answer have its full length (the field ignore_eos of kvkeep and vLLM).",
        default=False,
        group=_SERVER,
        rare=True,
    )
    timeout: float = option(
        "Longest wait for the next piece of an answer.", default=600.0, metavar="SECONDS", group=_SERVER, rare=True
    )
    output: str | None = option(
        "File for a line of JSON about each request.", "-o", default=None, metavar="FILE", group=OUTPUT
    )
    json: bool = option(JSON)

    @classmethod
    def prepare(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check that the client's package is here, since kvkeep-lab may be installed without its dependencies."""
        if find_spec("httpx") is None:
            raise InputError("This command needs httpx, which is not installed: pip install 'httpx>=0.27'.")
        return given

    def checked(self) -> BenchServerOptions:
        """Return the options, after all checks of numbers and of what excludes each other."""
        if self.sessions and not self.chat:
            raise InputError("--sessions and --completions were both given; a session goes on with messages.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("`api_key` has letters that no header can have; give the key as the server knows it.")
        if not 0 < self.timeout < 10**9:
            raise InputError(f"`timeout={self.timeout:g}` is no time; give seconds above 0.")
        if not 0 <= self.warmup <= 10**4:
            raise InputError(f"`warmup={self.warmup}` is outside 0 … 10000.")
        return self

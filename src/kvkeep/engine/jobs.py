"""Batch jobs: one request per line in, one completion per line out, in any order, and nothing twice.

A line in: ``{"prompt": "…"}`` or ``{"messages": […]}``, with ``"options": {…}`` if it wants its own; all other fields
are carried through. A line out: these fields, and the completion with the number of the line it belongs to. What is
in the output file is done, so a job that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvkeep.engine.request import Request
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models.text import Sampling

COMPLETION = "completion"
"""Field of an output line that holds what was generated."""

_SAMPLING = {field.name for field in dataclasses.fields(Sampling)}
_REQUEST = {"policy", "budget", "stop", "ignore_end", "logprobs"}
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "budget", "logprobs"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    "policy": (str,),
    "stop": (str, list),
    "ignore_end": (bool,),
}


@dataclass(frozen=True)
class Line:
    """A line of a job that can be run.

    Attributes:
        number: its number in the file, from 1.
        text: the line itself.
        digest: a fingerprint of its text, to see whether an output belongs to it.
        fields: what is carried through.
        request: what is asked of the engine.
        options: what the line itself says of it; noted in its completion.
    """

    number: int
    text: str
    digest: str
    fields: Mapping[str, Any]
    request: Request
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why."""

    number: int
    text: str
    reason: str


def read(
    path: Path, encode: Callable[[str | Sequence[Mapping[str, str]]], Sequence[int]], defaults: Sampling
) -> Iterator[Line | BadLine]:
    """Read a job line by line; empty lines count, but ask for nothing.

    Args:
        path: the JSONL file.
        encode: turns a prompt or a list of messages into token ids.
        defaults: the sampling of lines that do not say otherwise.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _parse(number, raw, encode, defaults)
    except OSError as error:
        raise InputError(f"The input {path} cannot be read: {error.strerror}.") from error


def _parse(
    number: int, raw: bytes, encode: Callable[[str | Sequence[Mapping[str, str]]], Sequence[int]], defaults: Sampling
) -> Line | BadLine:
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
        if not isinstance(fields, dict):
            raise InputError('it is no JSON object like {"prompt": "…"}')
        prompt, options = _prompt(fields), fields.pop("options", None)
        if COMPLETION in fields:
            raise InputError(f'its field "{COMPLETION}" has the name of the result; rename it')
        options = {} if options is None else options
        request = _request(encode(prompt), options, defaults)
        return Line(number, text, _digest(raw), fields, request, options)
    except json.JSONDecodeError as error:
        return BadLine(number, text, f"it is no JSON ({error})")
    except RecursionError:
        return BadLine(number, text, "its lists or objects are nested too deeply")
    except UnicodeEncodeError:  # JSON may name half of a pair of UTF-16, as "\\ud83d"
        return BadLine(number, text, "its text has half of a character")
    except (ValueError, KVKeepError) as error:  # also bytes that are no UTF-8
        return BadLine(number, text, str(error).rstrip("."))


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw.strip()).hexdigest()[:16]


def _prompt(fields: dict[str, Any]) -> str | list[dict[str, str]]:
    """Take the prompt or the messages out of a line's fields."""
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InputError('it must have either "prompt" or "messages"')
    if messages is None:
        if not isinstance(prompt, str):
            raise InputError('its "prompt" is no text')
        prompt.encode()
        return prompt
    is_chat = isinstance(messages, list) and messages
    if not is_chat or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise InputError('its "messages" are no list of {"role": "…", "content": "…"}')
    for message in messages:
        message["content"].encode()
    return cast(list[dict[str, str]], messages)


def _request(prompt: Sequence[int], options: object, defaults: Sampling) -> Request:
    if not isinstance(options, dict):
        raise InputError('its "options" are no JSON object')
    for name, value in options.items():
        if name not in _TYPES:
            raise InputError(f'there is no option "{name}"; there are {", ".join(sorted(_TYPES))}')
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] != (bool,)):
            raise InputError(f"its option {name}={json.dumps(value)} is no {_TYPES[name][-1].__name__}")
    rest = {name: value for name, value in options.items() if name in _REQUEST}
    if "stop" in rest:
        rest["stop"] = (rest["stop"],) if isinstance(rest["stop"], str) else tuple(rest["stop"])
        if not all(isinstance(text, str) for text in rest["stop"]):
            raise InputError('its option "stop" is no text or list of texts')
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    try:
        chosen |= {name: float(value) for name, value in chosen.items() if float in _TYPES[name]}
    except OverflowError:
        raise InputError("one of its options is too large a number") from None
    sampling = dataclasses.replace(defaults, **chosen)
    return Request(prompt=prompt, sampling=sampling, **rest)

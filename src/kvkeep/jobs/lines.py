"""The input lines of a batch job, each of which is one request.

An input line is ``{"prompt": "…"}`` or ``{"messages": […]}``, with ``"options": {…}`` of its own if need be. All other
fields are copied to the output line, beside the completion. Output lines come in any order, and each names the number
of its input line. A line with a completion in the output is not run again, so a job that was stopped can be resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import InputError, KVKeepError

Encode: TypeAlias = Callable[[str | Sequence[Mapping[str, str]]], Sequence[int]]
"""Turns a prompt or a list of messages into token ids."""

COMPLETION = "completion"
"""The field of an output line that holds the completion."""

MAX_DEPTH = 200
"""Levels of nested lists and objects in a line; Python's own parser can always handle this many."""

_MAX_REASON = 300
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
        digest: a fingerprint of its text, by which its completion is recognised.
        fields: the fields that are copied to the output.
        request: the request for the engine.
        options: the line's own options, which are written beside its completion.
    """

    number: int
    digest: str
    fields: Mapping[str, Any]
    request: Request
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why."""

    number: int
    reason: str


def read(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a job with their numbers from 1. Empty lines are counted, but left out.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise InputError(f"The input {path} cannot be read: {error.strerror}.") from error


def parse(number: int, raw: bytes, encode: Encode, defaults: Sampling) -> Line | BadLine:
    """The request of a line, or why the line cannot be run.

    Args:
        number: its number in the file.
        raw: the line.
        encode: turns a prompt or a list of messages into token ids.
        defaults: sampling options, where the line has none of its own.
    """
    try:
        fields = _DECODER.decode(raw.decode("utf-8-sig"))
        if not isinstance(fields, dict):
            raise InputError('it is no JSON object like {"prompt": "…"}')
        if _depth(fields) > MAX_DEPTH:
            raise RecursionError
        prompt, options = _prompt(fields), fields.pop("options", None)
        if COMPLETION in fields:
            raise InputError(f'its field "{COMPLETION}" has the name of the result; rename it')
        options = {} if options is None else options
        return Line(number, digest(raw), fields, _request(number, encode(prompt), options, defaults), options)
    except json.JSONDecodeError as error:
        return BadLine(number, f"it is no JSON ({error})")
    except RecursionError:
        return BadLine(number, f"its lists or objects are nested too deeply, more than {MAX_DEPTH} levels")
    except UnicodeEncodeError:  # JSON can hold half of a UTF-16 pair, such as "\\ud83d"
        return BadLine(number, "its text has half of a character")
    except (ValueError, KVKeepError) as error:  # also for bytes that are not UTF-8
        return BadLine(number, reason_of(error))


def digest(raw: bytes) -> str:
    """A fingerprint of a line without the white space around it."""
    return hashlib.sha256(raw.strip()).hexdigest()[:32]


def reason_of(error: Exception) -> str:
    """An error's message as part of a sentence, cut to a readable length."""
    text = str(error).rstrip(".")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


def _no_constant(name: str) -> float:
    raise InputError(f"it holds {name}, which JSON does not have")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InputError(f"its number {text[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_float)


def _depth(value: object) -> int:
    """The number of nested levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while found := [part for part in level if isinstance(part, dict | list)]:
        level = [part for one in found for part in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


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


def _request(number: int, prompt: Sequence[int], options: object, defaults: Sampling) -> Request:
    """The request of a line. It is drawn with the job's seed and the line's number, or with the line's own seed."""
    if not isinstance(options, dict):
        raise InputError('its "options" are no JSON object')
    for name, value in options.items():
        if name not in _TYPES:
            raise InputError(f'there is no option "{name}"; there are {", ".join(sorted(_TYPES))}')
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] != (bool,)):
            raise InputError(f"its option {name}={json.dumps(value)} is no {_TYPES[name][-1].__name__}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InputError(f"its option {name} is too large a number")
    rest = {name: value for name, value in options.items() if name in _REQUEST}
    if "stop" in rest:
        rest["stop"] = (rest["stop"],) if isinstance(rest["stop"], str) else tuple(rest["stop"])
        if not all(isinstance(text, str) for text in rest["stop"]):
            raise InputError('its option "stop" is no text or list of texts')
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    chosen |= {name: float(value) for name, value in chosen.items() if float in _TYPES[name]}
    sampling = dataclasses.replace(defaults, **chosen)
    return Request(prompt=prompt, sampling=sampling, sequence=0 if "seed" in options else number - 1, **rest)

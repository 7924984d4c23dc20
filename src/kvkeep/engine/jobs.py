"""Batch jobs: one request per line in, one completion per line out, in any order, and nothing twice.

A line in: ``{"prompt": "…"}`` or ``{"messages": […]}``, with ``"options": {…}`` if it wants its own; all other fields
are carried through. A line out: these fields, and the completion with the number of the line it belongs to. What is
in the output file is done, so a job that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from kvkeep.engine.request import Request, Result
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
        return prompt
    is_chat = isinstance(messages, list) and messages
    if not is_chat or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise InputError('its "messages" are no list of {"role": "…", "content": "…"}')
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
    chosen |= {name: float(value) for name, value in chosen.items() if float in _TYPES[name]}
    sampling = dataclasses.replace(defaults, **chosen)
    return Request(prompt=prompt, sampling=sampling, **rest)


class Output:
    """Where a job writes its completions: each line complete before the next begins.

    Args:
        file: open for writing.
        name: what messages call it.
        made_by: the settings that all completions of a file have in common, e.g. the model; written with each.
        done: lines that an earlier run has done, with their fingerprints.
    """

    def __init__(self, file: IO[bytes], name: str, made_by: Mapping[str, Any], done: dict[int, str] | None = None):
        self._file, self.name, self._made_by = file, name, dict(made_by)
        self.done = {} if done is None else done

    @classmethod
    def open(cls, path: Path, made_by: Mapping[str, Any]) -> Output:
        """Open a file; what it holds is done. A pipe or a device has nothing to go on from.

        Raises:
            InputError: the file cannot be read or written, or holds something else.
        """
        to_file = path.is_file() or not path.exists()
        try:
            file = path.open("ab+" if to_file else "wb")
        except OSError as error:
            raise InputError(f"The output {path} cannot be written: {error.strerror}.") from error
        try:
            done = _take_up(file, path, made_by) if to_file else {}
        except InputError:
            file.close()
            raise
        return cls(file, str(path), made_by, done)

    def has(self, line: Line) -> bool:
        """Whether a line has been done.

        Raises:
            InputError: the line was another one when it was done.
        """
        if line.number not in self.done:
            return False
        if self.done[line.number] != line.digest:
            raise InputError(
                f"Line {line.number} of the input is not the one that {self.name} was written for. Give another "
                "output file."
            )
        return True

    def write(self, line: Line, result: Result) -> None:
        """Write one completion.

        Raises:
            InputError: the disk is full or fails; what was complete before stays.
        """
        own = {"options": line.options} if line.options else {}
        origin = {"line": line.number, "digest": line.digest, "made_by": self._made_by, **own}
        completion = {**origin, **_completion(result)}
        text = json.dumps({**line.fields, COMPLETION: completion}, ensure_ascii=False)
        try:
            self._file.write(text.encode() + b"\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be written: {error.strerror}. {len(self.done)} lines are complete; when that is "
                "mended, the same command goes on after them."
            ) from error
        self.done[line.number] = line.digest

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be written has been reported
            self._file.close()


def _take_up(file: IO[bytes], path: Path, made_by: Mapping[str, Any]) -> dict[int, str]:
    """What an earlier run has done; a line in whose middle it was killed is cut off, and generated again."""
    done: dict[int, str] = {}
    file.seek(0)
    end = 0
    for raw in file:
        if raw.endswith(b"\n"):
            end += len(raw)
            number, digest = _was_done(raw, path, made_by)
            done[number] = digest
    file.truncate(end)
    return done


def _was_done(raw: bytes, path: Path, made_by: Mapping[str, Any]) -> tuple[int, str]:
    """The number and the fingerprint of a line that an earlier run has done."""
    try:
        completion = json.loads(raw)[COMPLETION]
        found = int(completion["line"]), str(completion["digest"])
        other = dict(completion["made_by"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} holds a line that is no completion, so this job cannot go on there. Give another output file."
        ) from error
    if other != made_by:
        raise InputError(
            f"{path} was written with {_differences(other, made_by)}, and this job has "
            f"{_differences(made_by, other)}. Give another output file, or the same settings."
        )
    return found


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The settings in which one differs from the other, as ``name=value``; what is missing has its default."""
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return ", ".join(f"{name}={json.dumps(one[name])}" if name in one else f"the default {name}" for name in names)


def _completion(result: Result) -> dict[str, Any]:
    found = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
    }
    if result.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return found

"""The input lines of a batch job, each of which is one request.

An input line is ``{"prompt": "…"}`` or ``{"messages": […]}``, with ``"options": {…}`` of its own if need be. All other
fields are copied to the output line, beside the completion. Or it is a line of OpenAI's batch files, see
`kvkeep.jobs.batch`, and is answered as one. Output lines come in any order, and each names the number of its
input line. A line with a completion in the output is not run again, so a job that was stopped can be resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from kvkeep.engine.request import Request
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError, KVKeepError
from kvkeep.jobs import batch
from kvkeep.jobs.batch import custom_id_of, is_batch_line
from kvkeep.jobs.options import OPTIONS, check_place, request_of
from kvkeep.openai.messages import MAX_DEPTH, ParameterError, decoded
from kvkeep.openai.requests import COMPLETIONS, Asked, Prompt, in_words_of
from kvkeep.pins import Spans
from kvkeep.snapshot import Snapshot


@runtime_checkable
class Encode(Protocol):
    """Turns a prompt, a list of messages or token ids into token ids that the model has."""

    def __call__(self, prompt: Prompt, *, raw: bool = False) -> Sequence[int]:
        """Encode; with ``raw`` a text is taken without the chat template.

        Raises:
            KVKeepError: the text cannot be encoded, or the model has no such token.
        """


Pinned: TypeAlias = Callable[[Prompt], Spans]
"""Returns the spans of a prompt's tokens that are never evicted."""

COMPLETION = "completion"
"""The field of an output line that holds the completion."""

_EXAMPLE = '{"prompt": "…"}'
_MAX_REASON = 300
_APART = 2**40  # more than a file has lines: what the choices of a line are drawn by is no other line's number


@dataclass(frozen=True)
class Line:
    """A line of a job that can be run.

    Attributes:
        number: its number in the file, from 1.
        digest: a fingerprint of its text, by which its completion is recognised.
        fields: the fields that are copied to the output.
        request: the request for the engine.
        options: the line's own options, which are written beside its completion.
        others: more requests of the line, for more choices in its answer.
        asked: the body of a line in OpenAI's format.
    """

    number: int
    digest: str
    fields: Mapping[str, Any]
    request: Request
    options: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Request, ...] = ()
    asked: Asked | None = None

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests of the line."""
        return (self.request, *self.others)

    @property
    def custom_id(self) -> str | None:
        """The name that the user has given a line in OpenAI's format."""
        return None if self.asked is None else custom_id_of(self.fields)


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why.

    Attributes:
        number: its number in the file, from 1.
        reason: part of a sentence.
        custom_id: the name that the user has given a line in OpenAI's format.
        param: the parameter that is wrong in a line in OpenAI's format.
    """

    number: int
    reason: str
    custom_id: str | None = None
    param: str | None = None


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


def parse(
    number: int, raw: bytes, encode: Encode, defaults: Sampling, *, pinned: Pinned = lambda prompt: ()
) -> Line | BadLine:
    """The request of a line, or why the line cannot be run.

    Args:
        number: its number in the file.
        raw: the line.
        encode: turns a prompt or a list of messages into token ids.
        defaults: sampling options, where the line has none of its own.
        pinned: returns spans of a prompt's tokens that are never evicted, beside the line's own.
    """
    custom_id: str | None = None
    try:
        fields = decoded(raw)
        if is_batch_line(fields):
            custom_id = custom_id_of(fields)
            return _batch_line(number, digest(raw), fields, encode, defaults, pinned=pinned)
        return _own_line(number, digest(raw), fields, encode, defaults, pinned=pinned)
    except json.JSONDecodeError as error:
        reason, param = f"it is no JSON ({error}); a line is one whole object, such as {_EXAMPLE}", None
    except RecursionError:
        reason, param = f"its lists or objects are nested too deeply, more than {MAX_DEPTH} levels", None
    except UnicodeEncodeError:  # JSON can hold half of a UTF-16 pair, such as "\\ud83d"
        reason, param = "its text has half of a character", None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        reason, param = f"it is not UTF-8 text: byte {error.start} is 0x{byte:02x}; convert the file", None
    except (ValueError, KVKeepError) as error:
        reason, param = reason_of(error), getattr(error, "param", None)
    return BadLine(number, reason, custom_id, param)


def after(line: Line | BadLine, memory: Snapshot, policy: str) -> Line | BadLine:
    """A line whose requests follow a memory that was made under a policy."""
    if isinstance(line, BadLine):
        return line
    first, *others = (
        dataclasses.replace(one, memory=memory, policy=one.policy or policy) for one in (line.request, *line.others)
    )
    return dataclasses.replace(line, request=first, others=tuple(others))


def _own_line(
    number: int, found: str, fields: dict[str, Any], encode: Encode, defaults: Sampling, *, pinned: Pinned
) -> Line:
    """A line in kvkeep's format."""
    prompt, options = _prompt(fields), fields.pop(OPTIONS, None)
    if COMPLETION in fields:
        raise InputError(f'its field "{COMPLETION}" has the name of the result; rename it')
    check_place(fields)
    options = {} if options is None else options
    request = request_of(number, encode(prompt), options, defaults, pinned(prompt))
    return Line(number, found, fields, request, options)


def _batch_line(
    number: int, found: str, fields: dict[str, Any], encode: Encode, defaults: Sampling, *, pinned: Pinned
) -> Line:
    """A line in OpenAI's format. Only its name is kept of its fields.

    The first choice is drawn as the completion of a line in kvkeep's format is, and each other one in its own way.
    """
    asked = batch.read(fields)
    if asked.n > 1 and "temperature" not in asked.options and not defaults.temperature:
        raise ParameterError("n", f"is {asked.n}, and all texts are equal without a temperature; give temperature: 1")
    off: dict[str, Any] = dict.fromkeys(asked.unset)
    defaults = dataclasses.replace(defaults, **off)
    made = []
    for prompt in asked.prompts:
        ids = encode(prompt, raw=True) if asked.url == COMPLETIONS else encode(prompt)
        try:
            first = request_of(number, ids, asked.options, defaults, pinned(prompt))
        except KVKeepError as error:
            raise in_words_of(asked, error) from error
        made += [first] * asked.n
    made = [dataclasses.replace(one, sequence=one.sequence + _APART * place) for place, one in enumerate(made)]
    return Line(number, found, {"custom_id": fields["custom_id"]}, made[0], others=tuple(made[1:]), asked=asked)


def digest(raw: bytes) -> str:
    """A fingerprint of a line without the white space around it."""
    return hashlib.sha256(raw.strip()).hexdigest()[:32]


def reason_of(error: Exception) -> str:
    """An error's message as part of a sentence, cut to a readable length."""
    text = str(error).rstrip(".")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


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

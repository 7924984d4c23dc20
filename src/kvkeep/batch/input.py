"""The input lines of a batch job, each of which is one request.

An input line is ``{"prompt": "…"}`` or ``{"messages": […]}``, with ``"options": {…}`` of its own if need be. All other
fields are copied to the output line, beside the completion. Or it is a line of OpenAI's batch files, see
`is_batch_line`, and is answered as one. Output lines come in any order, and each names the number of its
input line. A line with a completion in the output is not run again, so a job that was stopped can be resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from kvkeep.engine.request import Request, Structure, conversation
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError, closest
from kvkeep.openai import requests, responses
from kvkeep.openai.messages import MAX_DEPTH, ParameterError, decoded
from kvkeep.openai.requests import CHAT, COMPLETIONS, ParsedBody, Prompt, in_words_of
from kvkeep.parameters import ENDING_PARAMETERS, REQUEST_CACHE_PARAMETERS, SAMPLING_PARAMETERS
from kvkeep.pins import Spans, spans
from kvkeep.snapshot.snapshot import Snapshot

# Lines of OpenAI's batch files: ``custom_id``, ``method``, ``url`` and ``body`` in the input, answers in the output.
#
# The number and the fingerprint of an input line are part of its answer's ``id``, by which a later run knows the
# answer.

BEGINNING = '{"id": "batch_req_%d_%s", '
"""The first characters of an answer to the line of this number and fingerprint."""

_ID = re.compile(r"batch_req_([0-9]{1,18})_([0-9a-f]{32})", re.ASCII)
_FIELDS = ("custom_id", "method", "url", "body")


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Return whether an input line is meant as a request in OpenAI's format, which may still be faulty; otherwise it is
    one in kvkeep's own.

    With a ``prompt`` or ``messages`` beside it is one only if it has ``custom_id``, ``url`` and ``body``. Without them
    a ``body`` that is an object is enough, or ``custom_id`` with ``url`` or ``method``.
    """
    # a line with a prompt is kvkeep's own, whose other fields may have any name, unless it has all of OpenAI's
    if "prompt" in fields or "messages" in fields:
        return {"custom_id", "url", "body"} <= fields.keys()
    return isinstance(fields.get("body"), dict) or ("custom_id" in fields and ("url" in fields or "method" in fields))


def custom_id_of(fields: Mapping[str, Any]) -> str | None:
    """Return the ``custom_id`` that the user gave a request; ``None`` if it is missing or no string."""
    found = fields.get("custom_id")
    return found if isinstance(found, str) else None


def read_openai_line(fields: Mapping[str, Any]) -> ParsedBody:
    """Check the four fields of a line in OpenAI's format, and return its ``body`` as `kvkeep.openai.requests.read`
    reads it.

    Raises:
        InputError: a field is missing, unknown or wrong, also one of the body.
    """
    if missing := [name for name in _FIELDS if fields.get(name) is None]:
        raise InputError(f"it is in OpenAI's format and has no {missing[0]}; there must be {', '.join(_FIELDS)}")
    if not isinstance(fields["custom_id"], str) or not fields["custom_id"]:
        raise InputError("its custom_id is no text")
    if fields["method"] != "POST":
        raise InputError(f'its method is {json.dumps(fields["method"]):.40}; give "POST"')
    if fields["url"] not in (CHAT, COMPLETIONS):
        raise InputError(f"its url is {json.dumps(fields['url']):.80}; there are {CHAT} and {COMPLETIONS}")
    if others := sorted(fields.keys() - set(_FIELDS)):
        known = ", ".join(_FIELDS)
        raise InputError(f'its field {json.dumps(others[0]):.80} is none of {known}; parameters belong into "body"')
    return requests.read(fields["url"], fields["body"])


def line(
    number: int, digest: str, custom_id: str | None, body: Mapping[str, Any], *, status: int = 200
) -> dict[str, Any]:
    """Build a line of a job's output in OpenAI's format, for an answer or an error: ``body`` and ``status`` under
    ``response``, and ``error`` always ``None``. The number and the fingerprint are in its ``id``.

    Args:
        number: the number of the input's line.
        digest: the fingerprint of the input's line.
        custom_id: the name that the user has given the request.
        body: the answer, or an error.
        status: HTTP status.
    """
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{number}_{digest}", "custom_id": custom_id, "response": response, "error": None}


def error_line(
    number: int, digest: str, custom_id: str | None, reason: str, *, failed: bool, param: str | None
) -> dict[str, Any]:
    """Build a line of the batch's error file in OpenAI's format.

    Args:
        number: the number of the input's line.
        digest: the fingerprint of the input's line.
        custom_id: the name that the user has given the request.
        reason: why there is no answer.
        failed: whether the request was run and failed (status 500); otherwise it could not be run (400).
        param: the parameter that is wrong.
    """
    status = 500 if failed else 400
    body = responses.error(reason, status=status, param=param)
    return line(number, digest, custom_id, body, status=status)


def is_error_line(fields: Mapping[str, Any]) -> bool:
    """Return whether the fields are those of a line in a batch's error file, as `error_line` makes it: the four keys,
    an ``id`` of an input line, and a status of 400 or 500.
    """
    if fields.keys() != {"id", "custom_id", "response", "error"} or origin(fields) is None:
        return False
    return isinstance(fields["response"], dict) and fields["response"].get("status_code") in (400, 500)


def origin(fields: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the number and the fingerprint of the input line that an output line in OpenAI's format answers; ``None``
    if its id names none.
    """
    found = _ID.fullmatch(str(fields.get("id")))
    return (int(found[1]), found[2]) if found else None


# The options of one line of a batch job, and the request that they make.

OPTIONS = "options"
"""The field of a line that holds its options."""

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_REQUEST = {
    *("policy", "budget", "stop", "ignore_end", "structured_outputs", "logprobs", "pins", "guard", "keep_prompt"),
    *(parameter.name for parameter in ENDING_PARAMETERS),
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{name: parameter.json_types for name, parameter in SAMPLING_PARAMETERS.items()},
    **{parameter.name: parameter.json_types for parameter in REQUEST_CACHE_PARAMETERS},
    **{parameter.name: parameter.json_types for parameter in ENDING_PARAMETERS},
    "logprobs": (int,),
    "structured_outputs": (Structure, dict),
    "stop": (str, list),
    "ignore_end": (bool,),
}
_ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""Names that other tools have for options."""
_SHOWN = 60
"""Most characters of a value in a message."""


def request_of(
    number: int,
    prompt: Sequence[int],
    options: object,
    defaults: SamplingParams,
    pinned: Spans = (),
    *,
    chat: bool = False,
) -> Request:
    """Build the request of an input line for the engine, after a check of its options.

    Random tokens are drawn by the line's own seed, else by the job's seed and the line's number.

    Args:
        number: the line's number in the file, from 1.
        prompt: token ids.
        options: the line's own options.
        defaults: sampling options, where the line has none of its own; their seed is the job's.
        pinned: spans of the prompt that are never evicted, beside the line's own.
        chat: whether the prompt is in the form of the chat template.

    Raises:
        InputError: an option is unknown, has another type, or is out of range.
    """
    if not isinstance(options, dict):
        raise InputError('its "options" are no JSON object')
    for name, value in options.items():
        _check(name, value)
    rest = {name: value for name, value in options.items() if name in _REQUEST}
    if "stop" in rest:
        rest["stop"] = (rest["stop"],) if isinstance(rest["stop"], str) else tuple(rest["stop"])
        if not all(isinstance(text, str) for text in rest["stop"]):
            raise InputError('its option "stop" is no text or list of texts')
    if "guard" in rest:
        rest["guard"] = float(rest["guard"])
    rest["pins"] = spans((*spans(rest.get("pins", ())), *pinned))
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    # a whole number of JSON is an int, also where a share or a temperature is meant
    chosen |= {name: float(value) for name, value in chosen.items() if float in _TYPES[name]}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = {_token(name): value for name, value in chosen["logit_bias"].items()}
    sampling = dataclasses.replace(defaults, **chosen)
    # lines draw in their own ways; a line with a seed of its own draws as it would alone
    return Request(prompt=prompt, chat=chat, sampling=sampling, sequence=0 if "seed" in options else number - 1, **rest)


def _token(name: object) -> int:
    """Return the token id that a key of ``logit_bias`` names. Keys of JSON are strings. A number of more than 20 digits
    is cut, and is out of any range all the same.

    Raises:
        InputError: the key has other characters than digits.
    """
    if not str(name).isdecimal() or not str(name).isascii():
        raise InputError(f'its option "logit_bias" has {str(name)[:_SHOWN]!r} in place of a token id')
    return int(str(name)[:20])  # enough to be out of range, which is refused later; long texts take long to parse


def check_place(fields: Mapping[str, object]) -> None:
    """Refuse a line in kvkeep's own format that has an option, such as ``temperature``, as a field and not inside
    ``options``, where alone it has an effect.

    Args:
        fields: the fields of the line without its prompt and its options.

    Raises:
        InputError: a field has the name of an option, or another tool's name for one, such as ``max_tokens``.
    """
    found = {name: value for name, value in fields.items() if name in _TYPES or name in _ALIASES}
    if not found:
        return
    # "a, b and c"
    names = " and ".join([", ".join([*found][:-1]), [*found][-1]] if len(found) > 1 else found)
    belongs, them = ("belongs", "it is") if len(found) == 1 else ("belong", "they are")
    options = {_ALIASES.get(name, name): _short(value) for name, value in found.items()}
    raise InputError(
        f'{names} {belongs} into "{OPTIONS}": {json.dumps({OPTIONS: options}, ensure_ascii=False)}. If {them} data of '
        'your own, rename or nest: {"metadata": {…}}'
    )


def _short(value: object) -> object:
    """Return a value unchanged if its JSON has at most 60 characters; else "…", to be shown in an error message."""
    return value if len(json.dumps(value)) <= _SHOWN else "…"


def _check(name: str, value: object) -> None:
    """Check that an option of a line is known and has the right type, and that a whole number is below 2**63. Other
    ranges are not checked here.

    Raises:
        InputError: a check fails.
    """
    if name not in _TYPES:
        raise InputError(f'there is no option "{name}"; there are {", ".join(sorted(_TYPES))}')
    if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
        raise InputError(f"its option {name}={json.dumps(value)} is no {_TYPES[name][-1].__name__}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"its option {name} is too large a number")


@runtime_checkable
class Encode(Protocol):
    """Turns a prompt, a list of messages or token ids into token ids that the model has."""

    def __call__(self, prompt: Prompt, *, raw: bool = False, **template: Any) -> Sequence[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: a text, which goes through the chat template; messages; or token ids, which are only checked.
            raw: take a text without the chat template.
            template: further arguments of `kvkeep.models.tokenization.encode_chat` or, for a text, `encode`.

        Raises:
            KVKeepError: the text cannot be encoded, or the model has no such token.
        """


Pinned: TypeAlias = Callable[[Prompt], Spans]
"""Returns the spans of a prompt's tokens that are never evicted."""

COMPLETION = "completion"
"""The field of an output line that holds the completion."""

_EXAMPLE = '{"prompt": "…"}'
_MAX_REASON = 300  # characters: a reason may quote the line
_APART = 2**40  # more than a file has lines: what the choices of a line are drawn by is no other line's number


@dataclass(frozen=True)
class InputLine:
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
    asked: ParsedBody | None = None

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return all requests of the line, in order: one for each choice in its answer."""
        return (self.request, *self.others)

    @property
    def custom_id(self) -> str | None:
        """Return the ``custom_id`` of a line in OpenAI's format; ``None`` for other lines."""
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


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes, with the line break, of each line of a job's input file. Lines of white
    space alone are counted, but left out.

    Raises:
        InputError: the file cannot be opened or read, raised at the first line or between two.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise InputError(f"The input {path} cannot be read: {error.strerror}.") from error


def parse(
    number: int,
    raw: bytes,
    encode: Encode,
    defaults: SamplingParams,
    *,
    pinned: Pinned = lambda prompt: (),
    raws: bool = False,
    reads: Callable[[str], bool] = lambda variable: True,
    max_model_len: int | None = None,
) -> InputLine | BadLine:
    """Parse a line of a job's input, in either format, into its requests, with prompts as token ids; or return a
    `BadLine` with the reason why it cannot be run.

    Never raise for a bad line.

    Args:
        number: the line's number in the file, from 1.
        raw: the line, as UTF-8.
        encode: turns a prompt or a list of messages into token ids.
        defaults: sampling options, where the line has none of its own.
        pinned: returns spans of a prompt's tokens that are never evicted, beside the line's own.
        raws: whether ``encode`` takes texts of lines in kvkeep's own format without the chat template.
        reads: tells whether the chat template reads a variable; others are named in the answer.
        max_model_len: the most tokens of a prompt and its answer, for ``"truncate_prompt_tokens": -1``; ``None``: no
            limit.
    """
    custom_id: str | None = None
    try:
        fields = decoded(raw)
        if is_batch_line(fields):
            custom_id = custom_id_of(fields)
            return _batch_line(
                *(number, digest(raw), fields, encode, defaults),
                pinned=pinned,
                reads=reads,
                max_model_len=max_model_len,
            )
        return _own_line(number, digest(raw), fields, encode, defaults, pinned=pinned, raws=raws)
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


def after(line: InputLine | BadLine, memory: Snapshot, policy: str) -> InputLine | BadLine:
    """Return a copy of a line whose requests all continue a snapshot; a `BadLine` is returned itself.

    Requests that name no policy of their own get ``policy``, not the snapshot's.
    """
    if isinstance(line, BadLine):
        return line
    first, *others = (
        dataclasses.replace(request, snapshot=memory, policy=request.policy or policy)
        for request in (line.request, *line.others)
    )
    return dataclasses.replace(line, request=first, others=tuple(others))


def with_adapter(line: InputLine | BadLine, base: str, adapters: Sequence[str]) -> InputLine | BadLine:
    """Return a copy of a line whose requests run with the adapter that its model names; the line itself if it is a
    `BadLine`, gets no adapter, or the job has none.

    The line's model is ``base:NAME``; what stands before the last colon is not compared. A line that names ``base``
    gets no adapter. A line that names no model, or one without a colon, gets the adapter if the job has just one, and
    otherwise none. A line whose model ends with a colon and an unknown adapter becomes a `BadLine`.

    Args:
        line: the line; its model is the field ``model``, in OpenAI's format that of its body.
        base: the name of the job's model, which asks for no adapter.
        adapters: the names of its adapters.
    """
    if isinstance(line, BadLine) or not adapters:
        return line
    model = line.fields.get("model") if line.asked is None else line.asked.model
    # the job's model may have a colon of its own
    _, colon, name = model.rpartition(":") if isinstance(model, str) and model != base else ("", "", "")
    if colon and name not in adapters:
        known = ", ".join(f"{base}:{adapter}" for adapter in adapters)
        reason = f"its model is {json.dumps(model)[:_SHOWN]}, whose adapter is unknown; there are {base}, {known}"
        return BadLine(line.number, reason, line.custom_id, "model")
    if not colon:
        only = len(adapters) == 1 and model != base
        if not only:
            return line
        name = adapters[0]
    first, *others = (dataclasses.replace(request, adapter=name) for request in (line.request, *line.others))
    return dataclasses.replace(line, request=first, others=tuple(others))


def _own_line(
    number: int,
    fingerprint: str,
    fields: dict[str, Any],
    encode: Encode,
    defaults: SamplingParams,
    *,
    pinned: Pinned,
    raws: bool,
) -> InputLine:
    """Return a line in kvkeep's own format with its request. Its prompt and options are removed from ``fields``; the
    rest is what the output line copies.

    Raises:
        KVKeepError: a field or an option is wrong, or the prompt cannot be encoded.
        UnicodeEncodeError: a text has half of a character.
    """
    prompt, options = _prompt(fields), fields.pop(OPTIONS, None)
    if COMPLETION in fields:
        raise InputError(f'its field "{COMPLETION}" has the name of the result; rename it')
    check_place(fields)
    options = {} if options is None else options
    chat = not (isinstance(prompt, str) and raws)
    request = request_of(number, encode(prompt), options, defaults, pinned(prompt), chat=chat)
    return InputLine(number, fingerprint, fields, request, options)


def _batch_line(
    number: int,
    fingerprint: str,
    fields: dict[str, Any],
    encode: Encode,
    defaults: SamplingParams,
    *,
    pinned: Pinned,
    reads: Callable[[str], bool],
    max_model_len: int | None,
) -> InputLine:
    """Return a line in OpenAI's format with its requests: ``n`` for each prompt. Of its fields, only ``custom_id`` is
    kept.

    The first request draws random tokens as that of a line in kvkeep's format does, and each other one in its own way.

    Raises:
        KVKeepError: a field or a parameter is wrong, or a prompt cannot be encoded.
    """
    asked = read_openai_line(fields)
    asked = dataclasses.replace(asked, ignored=(*asked.ignored, *asked.unread(reads)))
    # a temperature of 0 in the body is the user's own wish
    if asked.n > 1 and "temperature" not in asked.options and not defaults.temperature:
        raise ParameterError("n", f"is {asked.n}, and all texts are equal without a temperature; give temperature: 1")
    # what the body turns off is off even if the job's own defaults turn it on
    off: dict[str, Any] = dict.fromkeys(asked.unset)
    defaults = dataclasses.replace(defaults, **off)
    made = []
    for prompt in asked.prompts:
        ids = (
            encode(prompt, raw=True, **asked.template) if asked.url == COMPLETIONS else encode(prompt, **asked.template)
        )
        ids, pins = asked.truncated(list(ids), max_model_len), pinned(prompt)
        if pins and (moves := [*asked.template, *(["truncate_prompt_tokens"] if asked.truncate else [])]):
            raise ParameterError(
                moves[0], "moves the tokens of the system message, which are to be pinned; leave it out"
            )
        fitting = defaults
        if asked.truncate is not None and max_model_len is not None:  # the answer gets what the prompt leaves
            room = max(1, max_model_len - len(ids))
            fitting = dataclasses.replace(defaults, max_new_tokens=min(defaults.max_new_tokens, room))
        try:
            first = request_of(number, ids, asked.options, fitting, pins, chat=asked.url == CHAT)
        except KVKeepError as error:
            raise in_words_of(asked, error) from error
        made += [first] * asked.n
    # each choice is a sequence of its own, and so draws other tokens
    made = [
        dataclasses.replace(request, sequence=request.sequence + _APART * place) for place, request in enumerate(made)
    ]
    return InputLine(
        number, fingerprint, {"custom_id": fields["custom_id"]}, made[0], others=tuple(made[1:]), asked=asked
    )


def digest(raw: bytes) -> str:
    """Return a fingerprint of an input line: 32 hexadecimal digits of a hash of its bytes without the white space
    around them, such as its line break.
    """
    return hashlib.sha256(raw.strip()).hexdigest()[:32]


def reason_of(error: Exception) -> str:
    """Return an error's message without its final period, cut to 300 characters, to stand within a sentence."""
    text = str(error).rstrip(".")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


def _prompt(fields: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Remove ``prompt`` and ``messages`` from a line's fields, and return the one that it has.

    Raises:
        InputError: the line has both or neither (``null`` counts as neither), or the one has another form.
        UnicodeEncodeError: a text has half of a character.
    """
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None):
        misspelt = next((name for name in fields if closest(name, ("prompt", "messages"))), None)
        # with both fields nothing is misspelt
        instead = "" if misspelt is None or prompt is not None else f', and has "{misspelt}"'
        raise InputError(f'it must have either "prompt" or "messages"{instead}')
    if messages is None:
        if not isinstance(prompt, str):
            raise InputError('its "prompt" is no text')
        prompt.encode()  # half of a UTF-16 pair raises here, before a tokenizer meets it; see `parse`
        return prompt
    try:
        found = list(conversation(messages))
    except InputError as error:
        raise InputError('its "messages" are no list of {"role": "…", "content": "…"}') from error
    for message in found:
        message["content"].encode()  # see above
    return found

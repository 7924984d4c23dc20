"""The bodies of requests. Fields that nobody knows are ignored, as clients of OpenAI's API expect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from kvkeep import parameters
from kvkeep.errors import InputError, PolicyError, show_bytes
from kvkeep.openai.messages import MAX_DEPTH, decoded
from kvkeep.openai.requests import OWN, ignored
from kvkeep.parameters import Parameter
from kvkeep.policies.base import own_options
from kvkeep.policies.registry import available, parse
from kvkeep.server.errors import RefusalError, parameter, refusal_of
from kvkeep.server.settings import ServerSettings

# Parts of bodies that the OpenAPI document describes, and that are checked where they are read.

_TYPES = ("bool", "int", "float", "str")
"""Members of unions, which pydantic names in the place of a mistake."""
_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_FUNCTION = {
    "type": "object",
    "properties": {"name": {**_TEXT, "pattern": "^[A-Za-z0-9_-]{1,64}$"}, "arguments": _TEXT},
    "required": ["name", "arguments"],
}
_CALL = {"type": "object", "properties": {"id": _TEXT, "type": {"const": "function"}, "function": _FUNCTION}}
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": _TEXT}, "required": ["type", "text"]}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_LIST: dict[str, Any] = {"type": "array"}


def _message(roles: list[str], required: list[str], **more: object) -> dict[str, Any]:
    """Return the JSON schema, for the OpenAPI document, of a message with one of these roles.

    Args:
        roles: the roles.
        required: fields that it must have, beside ``role``.
        more: field → schema, of fields beside ``role``, ``content`` and ``name``.
    """
    fields = {"role": {"enum": roles}, "content": _CONTENT, "name": _TEXT, **more}
    return {"type": "object", "properties": fields, "required": ["role", *required]}


_ANSWER = {**dict.fromkeys(("reasoning_content", "reasoning", "refusal"), _TEXT), "annotations": _LIST}
_KINDS = [
    _message(["system", "developer", "user"], ["content"]),
    _message(["assistant"], [], **_ANSWER, tool_calls={**_LIST, "items": {**_CALL, "required": ["function"]}}),
    _message(["tool"], ["content"], tool_call_id=_TEXT),
]
Messages = Annotated[list[Any] | None, WithJsonSchema({"type": "array", "items": {"anyOf": _KINDS}, "minItems": 1})]
"""The messages of a chat."""

Tool = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {**_TEXT, "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                        "description": _TEXT,
                        "parameters": {**_OBJECT, "description": "A JSON schema."},
                        "strict": {"type": "boolean"},
                    },
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        }
    ),
]
"""A function that the model may call."""

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_TEXT, _IDS, *({"type": "array", "items": kind, "minItems": 1} for kind in (_TEXT, _IDS))]}
    ),
]
"""A text, token ids, or a list of either."""

Form = Annotated[str | bool | list[Any] | dict[str, Any] | None, Field()]
"""The form that an answer must have; see `kvkeep.openai.requests.form_of`."""


Span = Annotated[list[int], Field(min_length=2, max_length=2)]
"""The first position of some tokens, and the one behind their last."""


def _within(least: int | float, most: int | float | None = None, description: str | None = None) -> Any:
    """Return a field of a pydantic model for an optional number, ``None`` by default. The OpenAPI document shows its
    range, but pydantic does not check it: the code that uses the number does, and names the remedy.
    """
    limits = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return Field(None, description=description, json_schema_extra=cast("dict[str, Any]", limits))


def _described(parameter: Parameter, description: str | None = None) -> Any:
    """Return a field as `_within` does, with the range of a parameter, from 0 if it names no least value."""
    return _within(parameter.least or 0, parameter.most, description)


class Body(BaseModel):
    """A body of a request.

    Attributes:
        own: its fields that are kvkeep's own: an unknown field with nearly such a name is refused as a mistake.
        generates: whether it asks for new tokens: fields that would change them on another route are refused then.
    """

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
    own: ClassVar[tuple[str, ...]] = OWN
    generates: ClassVar[bool] = False


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the numbers of tokens.")
    continuous_usage_stats: bool | None = Field(
        None, description="vLLM's: with include_usage, each chunk has the numbers so far."
    )
    include_obfuscation: bool | None = Field(None, description="Has no effect.")


_OWN_FIELDS = {
    *("keep_ratio", "pins", "guard", "keep_prompt", "session_id", "cache_salt", "pin_system", "pin_messages"),
    *("drop_message", "reposition", "return_memory"),
}
"""Fields of kvkeep that the parameters of OpenAI's API go without."""


class Generating(Body):
    """The fields that all bodies have that ask for new tokens."""

    generates: ClassVar[bool] = True
    model: str | None = None
    max_tokens: int | None = _within(-1, description="The most new tokens; -1: as many as the server allows.")
    min_tokens: int | None = _within(0, description=parameters.MIN_NEW_TOKENS.help)
    temperature: float | None = _described(parameters.TEMPERATURE, "0: the likeliest token. By default 1.")
    top_p: float | None = _described(parameters.TOP_P)
    top_k: int | None = _within(-1)
    min_p: float | None = _described(parameters.MIN_P)
    repetition_penalty: float | None = _described(parameters.REPETITION_PENALTY)
    presence_penalty: float | None = _described(parameters.PRESENCE_PENALTY)
    frequency_penalty: float | None = _described(parameters.FREQUENCY_PENALTY)
    logit_bias: dict[str, float] | None = Field(None, description=parameters.LOGIT_BIAS.help)
    repetition_detection: bool | dict[str, int] | None = Field(
        None,
        description="vLLM's: end a text that repeats a pattern, with the finish reason repetition; true: by a rule.",
    )
    n: int | None = _within(1, 128)
    seed: int | None = _within(  # numbers of 2**63 or more in size are refused, negative ones as well
        1 - 2**63, parameters.SEED.most, "The same seed draws the same tokens. -1 or none: another one each time."
    )
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = Field(None, description="Who asks. Users of one key do not share conversations.")
    cache_salt: str | None = Field(None, description="vLLM's: only requests with the same salt share memories.")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, json_object, regex, choice and grammar."
    )
    guided_json: Form = Field(None, description="A JSON schema.")
    guided_json_object: Form = Field(None, description="Whether the answer is a JSON object.")
    guided_regex: Form = Field(None, description="A regular expression.")
    guided_choice: Form = Field(None, description="A list of texts.")
    guided_grammar: Form = Field(None, description="A grammar in GBNF or Lark.")
    json_schema: Form = Field(None, description="As guided_json.")
    regex: Form = Field(None, description="As guided_regex.")
    grammar: Form = Field(None, description="As guided_grammar.")
    ebnf: Form = Field(None, description="As guided_grammar.")
    stop_token_ids: list[int] | None = Field(None, description=parameters.STOP_TOKEN_IDS.help)
    include_stop_str_in_output: bool | None = Field(None, description=parameters.INCLUDE_STOP_STR_IN_OUTPUT.help)
    skip_special_tokens: bool | None = Field(None, description=parameters.SKIP_SPECIAL_TOKENS.help)
    truncate_prompt_tokens: int | None = _described(parameters.TRUNCATE_PROMPT_TOKENS)
    add_special_tokens: bool | None = Field(None, description=parameters.ADD_SPECIAL_TOKENS.help)
    budget: int | None = _described(parameters.BUDGET, "Tokens kept per layer and KV head.")
    keep_ratio: float | None = _described(parameters.KEEP_RATIO, "The budget as a share of the prompt, in (0, 1].")
    policy: str | None = Field(None, description="The eviction policy, such as h2o:recent=32.")
    pins: list[Span] | None = Field(None, description=parameters.PINS.help)
    guard: float | None = _described(parameters.GUARD, "The largest share of attention that the prompt's cut may lose.")
    keep_prompt: bool | float | None = Field(None, description=parameters.KEEP_PROMPT.help)

    def openai_fields(self) -> dict[str, Any]:
        """Return the fields of the body that are not ``None`` for `kvkeep.openai.requests.read`, without those of
        kvkeep that this does not read.
        """
        return self.model_dump(exclude_none=True, exclude=_OWN_FIELDS)


class Templated(Body):
    """The fields that say how a chat template is filled in."""

    messages: Messages = None
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=parameters.CHAT_TEMPLATE_KWARGS.help)
    add_generation_prompt: bool | None = Field(None, description=parameters.ADD_GENERATION_PROMPT.help)
    continue_final_message: bool | None = Field(None, description=parameters.CONTINUE_FINAL_MESSAGE.help)
    reasoning_effort: str | None = Field(None, description=parameters.REASONING_EFFORT.help)


class ChatBody(Templated, Generating):
    """The body of a chat."""

    # in the OpenAPI document alone: a body without messages is refused in the words of `kvkeep.openai.messages`
    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})
    max_completion_tokens: int | None = _within(-1)
    logprobs: bool | None = None
    top_logprobs: int | None = _within(0, 20)
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, or a function.")
    parallel_tool_calls: bool | None = None
    pin_system: bool | None = Field(None, description="Never evict the system messages. By default if they are short.")
    pin_messages: list[int] | None = Field(
        None, description="Indexes of messages that are never evicted; -1: the last."
    )
    drop_message: dict[str, list[int]] | list[int] | None = Field(
        None,
        description="AKV's: messages that leave the memory, by the index of the message after which they do; a list: "
        "after the last one.",
    )
    reposition: bool | list[int] | None = Field(
        None, description="AKV's: whether what follows dropped messages moves up, as it does under slot positions."
    )
    session_id: str | None = Field(None, description="Continue the conversation of this session with new messages.")
    return_memory: bool | None = Field(None, description="Say which tokens the memory holds at the end.")


class CompletionBody(Generating):
    """The body of a completion."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    prompt: Prompts = Field(None, description="A text, token ids, or a list of either.")
    logprobs: int | None = _within(0, 20)
    echo: bool | None = None
    best_of: int | None = None


class TokenizeBody(Templated):
    """A text or a conversation whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Tokens whose text is asked for."""

    own: ClassVar[tuple[str, ...]] = ()
    model: str | None = None
    tokens: list[int]


class SessionBody(Body):
    """A new session."""

    own: ClassVar[tuple[str, ...]] = ("id", "policy", "budget", "pins", "keep_prompt")
    model: str | None = Field(None, description="The model, perhaps with an adapter, that answers all of its turns.")
    id: str | None = Field(None, description="Its name: up to 64 letters, digits, - and _. By default a new one.")
    policy: str | None = None
    budget: int | None = None
    pins: list[Span] | None = Field(None, description="Spans of the first turn's positions that are never evicted.")
    keep_prompt: bool | float | None = Field(None, description=parameters.KEEP_PROMPT.help)


class ForkBody(Body):
    """A copy of a session."""

    own: ClassVar[tuple[str, ...]] = ("id",)
    id: str | None = Field(None, description="The name of the copy.")


class RewindBody(Body):
    """How far a session goes back."""

    own: ClassVar[tuple[str, ...]] = ("turns",)
    turns: int = Field(1, ge=1, description="Turns that are taken back.")


class DropBody(Body):
    """The body of a request that drops tokens of a session."""

    own: ClassVar[tuple[str, ...]] = ("messages", "spans", "reposition")
    messages: list[int] | None = Field(None, description="Indexes of messages that leave the memory; -1: the last.")
    spans: list[Span] | None = Field(None, description="Spans of positions that leave the memory.")
    reposition: bool | None = Field(
        None, description="Whether what follows moves up, as it does under slot positions; otherwise it is refused."
    )


class PinBody(Body):
    """The body of a request that pins tokens of a session."""

    # required in the OpenAPI document alone: the route refuses a body without pins, with an example
    model_config = ConfigDict(json_schema_extra={"required": ["pins"]})
    own: ClassVar[tuple[str, ...]] = ("pins",)
    pins: list[Span] | None = Field(None, description="Spans of positions that no head may drop from now on.")


class ResponseBody(Body):
    """The body of a response."""

    own: ClassVar[tuple[str, ...]] = ("budget", "policy", "guard", "pins", "keep_prompt")
    generates: ClassVar[bool] = True
    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = Field(None, description="Of tools of OpenAI's own, which no answer calls here.")
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    cache_salt: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = Field(None, description="message.output_text.logprobs: log-probabilities of tokens.")
    top_logprobs: int | None = _within(0, 20, "Likeliest tokens beside each token.")
    seed: int | None = None
    reasoning: dict[str, Any] | None = Field(None, description="effort: for a chat template that reads it.")
    policy: str | None = None
    budget: int | None = None
    pins: list[Span] | None = None
    guard: float | None = None
    keep_prompt: bool | float | None = None


# Bodies of requests: bounded in size and time, strict JSON, and checked by their schema.

_B = TypeVar("_B", bound=Body)
LARGE = 2**18
"""Bytes of a body that is parsed in a thread of its own, so that other clients do not wait."""


async def body_of(request: Request, kind: type[_B], settings: ServerSettings, *, empty: bool = False) -> _B:
    """Read the body of a request within the limits of size and time, and return it as an object of its schema. Fields
    that nobody knows are left out, and noted for a header of the answer.

    Args:
        request: the request.
        kind: the schema of the body.
        settings: the largest size, and the time.
        empty: whether an empty body counts as ``{}``; otherwise it is refused.

    Raises:
        RefusalError: the body is too large, comes too slowly, is no JSON object, or does not follow the schema.
        ParameterError: it has a field that would change the answer and is not built here, or a misspelt one.
    """
    raw = await received(request, settings)
    if empty and not raw.strip():
        raw = b"{}"
    # a large body is parsed in a thread, since other clients' streams stand still meanwhile
    fields = _fields(raw) if len(raw) < LARGE else await asyncio.to_thread(_fields, raw)
    note_ignored(request, ignored(fields, kind.model_fields, kind.own, generates=kind.generates))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first(error) from error


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """Add names of a body's fields that have no effect to those that a header of the request's answer will tell of."""
    if names:
        request.state.ignored = (*getattr(request.state, "ignored", ()), *names)


async def received(request: Request, settings: ServerSettings) -> bytes:
    """Read the body of a request as bytes, within the limits of size and time.

    Raises:
        RefusalError: the body is too large, or comes too slowly.
    """
    most, parts, size = settings.max_body_bytes, [], 0
    declared = request.headers.get("content-length", "0")
    too_large = RefusalError(
        413,
        f"The body is larger than {show_bytes(most)}, the most that this server reads. Send less.",
        code="too_large",
    )
    if declared.isdecimal() and int(declared[:20]) > most:  # Python refuses to read a number of thousands of digits
        raise too_large
    try:
        async with asyncio.timeout(settings.read_timeout_s):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_large
    except TimeoutError as error:
        seconds = settings.read_timeout_s
        raise RefusalError(408, f"The body did not come within {seconds:g} s. Send the request again.") from error
    return b"".join(parts)


def _fields(raw: bytes) -> dict[str, Any]:
    """Parse the bytes of a body as a strict JSON object, see `decoded`.

    Raises:
        RefusalError: it is none; the refusal, with status 400, says why.
    """
    try:
        return decoded(raw)
    except json.JSONDecodeError as error:
        reason = f"is no JSON: {error}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
    except RecursionError:
        reason = f"is nested too deeply, more than {MAX_DEPTH} levels"
    except InputError as error:
        reason = f"cannot be read: {error}"
    raise RefusalError(400, f"The body {reason}. Send one JSON object.")


def _first(error: ValidationError) -> RefusalError:
    """Return the refusal, with status 400, for the first field of a body that pydantic has found wrong, with up to four
    of its reasons: a field that may have several types has one for each of them.
    """
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    name = _named(mistakes[0]["loc"])
    reasons = [
        mistake["msg"][:1].lower() + mistake["msg"][1:] for mistake in mistakes if _named(mistake["loc"]) == name
    ]
    reason = ", or ".join(dict.fromkeys(reasons[:4]))
    if not name:
        return refusal_of(InputError(f"the body cannot be used: {reason}"))
    return parameter(name, f"is refused: {reason}")


def _named(place: tuple[int | str, ...]) -> str:
    """Return the name of a place in a body, such as ``messages[0].content`` for ``("messages", 0, "content")``, cut to
    80 characters; empty for the body itself.
    """
    # pydantic also puts names of union members into the path, which mean nothing to clients
    parts = [part for part in place if isinstance(part, int) or (part.isidentifier() and part not in _TYPES)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")[:80]


def check_policy(name: str) -> None:
    """Refuse a policy in a request, such as ``h2o:recent=32``, that is not registered or cannot be parsed, or whose
    options name a file: a client must not name Python modules of the server's machine, nor find out which files it has.

    Raises:
        PolicyError: there is no such policy, an option is unknown, has a wrong value, or names a file.
    """
    if name.partition(":")[0] not in available():
        parse(name.partition(":")[0])  # raises, with the names that are alike
        # white space around a name, which `parse` passes over
        raise PolicyError(f"There is no policy {name[:60]!r}.")
    policy = parse(name)
    for field in own_options(type(policy)):
        if field.metadata.get("file") and getattr(policy, field.name) != field.default:
            raise PolicyError(
                f"{field.name} names a file, which a request must not do. Leave `policy` out to run under the "
                "server's, which may have one."
            )

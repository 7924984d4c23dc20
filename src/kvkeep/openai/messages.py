"""The messages of a chat's body, and the error for a parameter that cannot be read or honoured."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InputError

# JSON objects that are strict: no NaN, no numbers beyond a float, no deeper than any program can read.

MAX_DEPTH = 200
"""Levels of nested lists and objects; Python's own parser can always handle this many."""

_EXAMPLE = '{"prompt": "…"}'
_MAX_DIGITS = 4300
"""Digits of a whole number that Python reads from a text, by default (`sys.get_int_max_str_digits`)."""


def decoded(raw: bytes) -> dict[str, Any]:
    """Return a JSON object as a dictionary, parsed from UTF-8 that may begin with a byte order mark.

    Raises:
        ValueError: the bytes are no UTF-8 (`UnicodeDecodeError`) or no JSON (`json.JSONDecodeError`).
        RecursionError: lists and objects are nested in more than `MAX_DEPTH` levels.
        InputError: the JSON is no object, or holds ``NaN``, an infinity, or a number that is too large or too long.
    """
    # a byte order mark, which some editors write, is passed over
    fields = _DECODER.decode(raw.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise InputError(f"it is no JSON object like {_EXAMPLE}")
    if _depth(fields) > MAX_DEPTH:
        raise RecursionError
    return fields


def _no_constant(name: str) -> float:
    """Refuse ``NaN`` and ``Infinity``, which Python's parser would take.

    Raises:
        InputError: always.
    """
    raise InputError(f"it holds {name}, which JSON does not have")


def _float(text: str) -> float:
    """Return a JSON number as a float, and refuse one that would become infinite.

    Raises:
        InputError: it is too large.
    """
    value = float(text)
    if math.isinf(value):
        raise InputError(f"its number {text[:40]} is too large")
    return value


def _int(text: str) -> int:
    """Return a JSON number as an int, and refuse one of more than 4300 digits: the time to parse it grows with their
    square.

    Raises:
        InputError: it has too many.
    """
    if (digits := len(text.lstrip("-"))) > _MAX_DIGITS:
        raise InputError(f"its number {text[:40]}… has {digits} digits; there may be {_MAX_DIGITS}")
    return int(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_float, parse_int=_int)


def _depth(value: object) -> int:
    """Return how many levels of lists and objects a value has: 1 for a flat one, 0 for what is neither list nor object.

    It is counted without recursion, as a value that is nested deeply enough would exhaust Python's.
    """
    depth, level = 0, [value]
    while found := [part for part in level if isinstance(part, dict | list)]:
        level = [part for item in found for part in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    return depth


# Forms of calls: how models of a family are told about tools, call them, and are told the results.
#
# Each family was trained on one form. A chat template that takes ``tools`` tells the model by itself; for other
# templates the form has words of its own.

NAME = r"[A-Za-z0-9_-]{1,64}"
"""Names of tools, in OpenAI's words."""


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How the models of a family call tools: a mark, then calls of a name and a JSON object.

    Attributes:
        name: the form's name.
        mark: begins the calls of an answer, as a text or as a special token.
        needs_mark: whether calls always begin with the mark.
        opens: texts between the mark and the name of the first call; the first one is written, all are read.
        middle: between a call's name and its arguments.
        close: after the arguments.
        next: between two calls; ``None``: an answer has one call.
        last: after the last call.
        short_ids: whether ids of calls have nine letters and digits.
        words: tell the model, where its template does not; ``{tools}`` are definitions as lines of JSON.
        result: a call's result as a message of the user; ``{content}`` is its text.
    """

    name: str
    mark: str
    needs_mark: bool = True
    opens: tuple[str, ...]
    middle: str
    close: str
    next: str | None = None
    last: str = ""
    short_ids: bool = False
    words: str
    result: str

    def text(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text that a model of this form writes to make one or more calls.

        Args:
            calls: the name and the arguments of each; arguments are the text of a JSON object.
        """
        shown = [f"{name}{self.middle}{given}{self.close}" for name, given in calls]
        begin = f"{self.mark if self.needs_mark else ''}{self.opens[0]}"
        if self.next is None:  # an answer has one call: each is written whole
            return "\n".join(begin + call for call in shown)
        return begin + self.next.join(shown) + self.last


HERMES = ToolForm(
    name="hermes",
    mark="<tool_call>",
    opens=('\n{"name": "',),
    middle='", "arguments": ',
    close="}\n</tool_call>",
    next='\n<tool_call>\n{"name": "',
    words="""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>""",
    result="<tool_response>\n{content}\n</tool_response>",
)
"""Of Hermes and Qwen."""

LLAMA3 = ToolForm(
    name="llama3",
    mark="<|python_tag|>",
    needs_mark=False,
    opens=('{"name": "',),
    middle='", "parameters": ',
    close="}",
    words="""You can call these functions, each of which is described in a line of JSON:

{tools}

To call one, answer with a JSON object of its name and a dictionary of its arguments, and with nothing else:
{{"name": <function-name>, "parameters": <args-json-object>}}""",
    result="Result of the function: {content}",
)
"""Of Llama 3.1 to 3.3: one call in an answer."""

MISTRAL = ToolForm(
    name="mistral",
    mark="[TOOL_CALLS]",
    opens=(' [{"name": "', '[{"name": "'),
    middle='", "arguments": ',
    close="}",
    next=', {"name": "',
    last="]",
    short_ids=True,
    words="""[AVAILABLE_TOOLS]
{tools}
[/AVAILABLE_TOOLS]
To call functions, answer: [TOOL_CALLS] [{{"name": <function-name>, "arguments": <args-json-object>}}]""",
    result="[TOOL_RESULTS] {content} [/TOOL_RESULTS]",
)
"""Of Mistral 7B v0.3, Mixtral and Mistral Nemo."""

TOOL_FORMS: Mapping[str, ToolForm] = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


@dataclass(frozen=True)
class ToolUse:
    """How one model uses tools.

    Attributes:
        form: the form of its calls.
        by_template: whether its chat template takes tools, calls and results.
        token: the mark's token id, if it is a special token: texts of answers then do not show it.
    """

    form: ToolForm = HERMES
    by_template: bool = False
    token: int | None = None


BY_WORDS = ToolUse()
"""Hermes' form, for a chat template that knows no tools."""


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIELDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("name", "refusal", "reasoning_content", "reasoning", "tool_call_id"), (str, "text")),
    **dict.fromkeys(("tool_calls", "annotations"), (list, "list")),
    "function_call": (dict, "object"),
}
"""Fields of a message beside its role and content, with their types; `tool_calls` and others only in some roles."""
_UNREAD = {
    "audio": "is an answer in sound, and only texts are read; leave it out",
    **dict.fromkeys(("images", "videos", "files"), "cannot be told to the model: only texts are read; leave it out"),
    **dict.fromkeys(
        ("prefix", "partial"), "is not built; give continue_final_message: true beside messages in place of it"
    ),
}
"""Fields that would change an answer and are not built."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are a text → the field that holds it."""


class ParameterError(InputError):
    """A parameter of a body cannot be read or honoured.

    Attributes:
        param: the parameter's name.
    """

    def __init__(self, param: str, reason: str):
        super().__init__(f"the parameter {param} {reason}")
        self.param = param


def short(value: object) -> str:
    """Return a value as JSON text for an error message, cut to 60 characters, with "…" behind what was cut."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def messages_of(given: Mapping[str, Any], use: ToolUse) -> list[dict[str, Any]]:
    """Return the messages of a chat's body, checked, as the chat template takes them.

    If the template takes no tools, calls become a part of the assistant's text, and results messages of the user.

    Args:
        given: the body.
        use: how the model uses tools.

    Raises:
        ParameterError: there is no message, or a message cannot be read.
    """
    if not given.get("messages"):
        raise ParameterError("messages", "has no message")
    found = [_message(f"messages[{place}]", message) for place, message in enumerate(given["messages"])]
    if use.by_template:
        return [part for message in found for part in _parts(message, use.form)]
    return _joined([_as_text(message, use.form) for message in found])


def unknown_fields(messages: object) -> tuple[str, ...]:
    """Return the fields that nobody knows of all messages, each once, such as ``messages[].id``; none if the messages
    are no list. Nothing is refused.
    """
    known = {"role", "content", *_FIELDS, *_UNREAD}
    given = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return tuple(dict.fromkeys(f"messages[].{name}" for message in given for name in message if name not in known))


def _message(name: str, message: object) -> dict[str, Any]:
    """Check a message, and return a new one with ``role`` and a text as ``content``, and with ``name``,
    ``tool_call_id``, ``reasoning_content`` and ``tool_calls`` (see `_calls`) where it has them.

    The role ``developer`` becomes ``system``, and the older ``function`` and ``function_call`` become a tool's result
    and a call of one. A refusal is the text of an answer that has none. Annotations are left out.

    Raises:
        ParameterError: the message has another form, an unknown role, or a field of which the model cannot be told.
    """
    # null is the same as no value
    found = {} if not isinstance(message, dict) else {k: v for k, v in message.items() if v is not None}
    role, calls = found.get("role"), found.get("tool_calls", [])
    if not isinstance(role, str) or (role != "assistant" and "content" not in found):
        raise ParameterError(name, 'is not like {"role": "user", "content": "a text"}')
    if role not in _ROLES:
        raise ParameterError(f"{name}.role", f"is {short(role)}; there are system, user, assistant and tool")
    for field, value in found.items():  # of several wrong ones, the first in the message is named
        if field in _FIELDS or field in _UNREAD:
            _check_field(f"{name}.{field}", field, value)
    calls = _older_call(found) if calls == [] else calls  # an empty list is no call at all
    if calls != [] and role != "assistant":
        raise ParameterError(f"{name}.tool_calls", f"belongs to an assistant's message, and this is of {role}")
    made: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    content = found.get("content", "")
    # an answer that was a refusal has its text in this field
    refusal = found.get("refusal", "") if role == "assistant" else ""
    made["content"] = _content(f"{name}.content", refusal or "" if content in ("", []) else content)
    if found.get("name"):
        made["name"] = found["name"]
    if made["role"] == "tool":
        made["tool_call_id"] = _id(f"{name}.tool_call_id", found.get("tool_call_id") or "")
    if role == "assistant" and (thoughts := found.get("reasoning_content") or found.get("reasoning")):
        made["reasoning_content"] = thoughts
    return {**made, "tool_calls": _calls(f"{name}.tool_calls", calls)} if calls != [] else made


def _check_field(place: str, name: str, value: object) -> None:
    """Check a field of a message other than its role and content: its type, or, of a field that kvkeep does not read,
    that it is empty.

    Args:
        place: the field in errors, such as ``messages[0].name``.
        name: its name.
        value: its value.

    Raises:
        ParameterError: a check fails, or a text has half of a character.
    """
    if name in _UNREAD:
        if value not in (False, "", [], {}):
            raise ParameterError(place, _UNREAD[name])
        return
    if value == []:
        return  # some clients write it for nothing, whatever the type
    kind, words = _FIELDS[name]
    if name != "tool_calls" and not isinstance(value, kind):  # `_calls` says what a call looks like
        raise ParameterError(place, f"is {short(value)} and no {words}")
    if isinstance(value, str):
        whole_text(place, value)


def _older_call(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the call of an older ``function_call`` as a list of one tool call without an id; empty without a call."""
    call = message.get("function_call")
    return [{"id": "", "type": "function", "function": call}] if call else []


def _calls(name: str, calls: object) -> list[dict[str, str]]:
    """Check the tool calls of a message, and return each with its ``name``, its ``arguments`` as text (``{}`` for an
    empty one; not parsed), and its ``id``, which is empty if there is none.

    Raises:
        ParameterError: a call has another form.
    """
    found = []
    # what is no list is refused as one wrong call
    for place, call in enumerate(calls if isinstance(calls, list) else [None]):
        inner = call.get("function") if isinstance(call, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        called, given = inner.get("name"), inner.get("arguments")
        if not isinstance(called, str) or not re.fullmatch(NAME, called, re.ASCII) or not isinstance(given, str):
            raise ParameterError(
                f"{name}[{place}]", 'is not like {"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            )
        text = whole_text(f"{name}[{place}]", given or "{}")  # an empty text, which is no JSON, is no arguments
        found.append({"name": called, "arguments": text, "id": _id(f"{name}[{place}].id", call.get("id") or "")})
    return found


def _id(name: str, given: object) -> str:
    """Return an id unchanged, after a check that it is a text without half of a character; it may be empty.

    Raises:
        ParameterError: it is no text, or has half of a character.
    """
    if not isinstance(given, str):
        raise ParameterError(name, f"is {short(given)} and not a text")
    return whole_text(name, given)


def _as_text(message: dict[str, Any], form: ToolForm) -> dict[str, Any]:
    """Return a message with its tool calls written behind its text, or, of the role ``tool``, with its result in the
    words of the form; any other one as an equal copy.
    """
    text = message["content"]
    if message["role"] == "tool":
        return {"role": "tool", "content": form.result.format(content=text)}  # `_joined` makes it the user's
    if "tool_calls" in message:
        shown = form.text((call["name"], call["arguments"]) for call in message["tool_calls"])
        text = f"{text}\n{shown}" if text else shown
    return {**{name: part for name, part in message.items() if name != "tool_calls"}, "content": text}


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool results that follow each other joined, by line breaks, into one message of the
    user.
    """
    found: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and joins:
            found[-1]["content"] += f"\n{message['content']}"
        else:
            # a template that knows no tools takes no role of theirs
            found.append({"role": "user", "content": message["content"]} if is_result else message)
        joins = is_result  # what the user writes stays a message apart from results
    return found


def _parts(message: dict[str, Any], form: ToolForm) -> list[dict[str, Any]]:
    """Return a message as the list of messages that a chat template with tools takes: one for each call if the form has
    one call in an answer, otherwise a single one. Arguments of calls become objects.
    """
    if message["role"] == "tool":
        return [{**message, "tool_call_id": _short(message["tool_call_id"], form)}]
    if "tool_calls" not in message:
        return [message]
    calls = [
        {
            "id": _short(call["id"], form),
            "type": "function",
            "function": {"name": call["name"], "arguments": _object(call["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    if form.next is not None:
        return [{**message, "tool_calls": calls}]
    # the text stands before the first call only
    first = [message["content"], *[""] * (len(calls) - 1)]
    return [{**message, "content": text, "tool_calls": [call]} for text, call in zip(first, calls, strict=True)]


def _short(name: str, form: ToolForm) -> str:
    """Return a tool call's id as the form takes it: where it needs short ids, the first 9 characters of a hash in place
    of an id that has not 9 letters and digits. Equal ids stay equal.
    """
    if not form.short_ids or re.fullmatch("[A-Za-z0-9]{9}", name, re.ASCII):
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _object(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a tool call. Return a text unchanged that is no strict JSON object, or that holds half of
    a character.
    """
    try:
        found = decoded(text.encode())
        # a text with half of a character could not be sent on
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError, InputError):
        return text
    return found


def _content(name: str, content: object) -> str:
    """Return the text of a message's content, which is a text, or a list of parts whose texts are joined without
    spaces.

    Args:
        name: the field in errors, such as ``messages[0].content``.
        content: its value.

    Raises:
        ParameterError: the content is neither, has a part that is no text, or half of a character.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ParameterError(name, "is no text and no list of parts")
    return whole_text(name, "".join(_text_of(name, part) for part in parts))


def _text_of(name: str, part: object) -> str:
    """Return the text of one part of a message's content, such as ``{"type": "text", "text": "…"}``, or of a refusal.

    Raises:
        ParameterError: the part is no text, such as an image, or its type is unknown.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, dict) and field else None
    if not isinstance(text, str):
        raise ParameterError(name, "has a part that is no text; only texts are read")
    return text


def whole_text(name: str, text: str) -> str:
    """Return a text unchanged, after a check that it has no unpaired surrogate (half a character) such as ``"\ud83d"``.

    Raises:
        ParameterError: the text has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(name, "has half of a character") from error
    return text

"""The messages of a chat's body, and the error for a parameter that cannot be read or honoured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import InputError
from kvkeep.openai.tool_text import NAME, calls_text, result_text

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MORE: Mapping[str, set[str]] = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}
"""Fields of a message beside its role and content."""


class ParameterError(InputError):
    """A parameter of a body cannot be read or honoured.

    Attributes:
        param: its name.
    """

    def __init__(self, param: str, reason: str):
        super().__init__(f"the parameter {param} {reason}")
        self.param = param


def short(value: object) -> str:
    """A value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def messages_of(given: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a chat's body. Calls of tools and their results become texts, as Qwen's chat template has them.

    Raises:
        ParameterError: there is none, or one cannot be read.
    """
    if not given.get("messages"):
        raise ParameterError("messages", "has no message")
    found: list[dict[str, str]] = []
    joins = False
    for place, one in enumerate(given["messages"]):
        message = _message(f"messages[{place}]", one)
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": result_text(message["content"])}
        if is_result and joins:
            found[-1]["content"] += f"\n{message['content']}"
        else:
            found.append(message)
        joins = is_result
    return found


def _message(name: str, message: object) -> dict[str, str]:
    """A message with its role and its text. The role of a developer is the system's by another name."""
    found = {} if not isinstance(message, dict) else {k: v for k, v in message.items() if v is not None}
    role, calls = found.get("role"), found.get("tool_calls")
    if not isinstance(role, str) or ("content" not in found and not calls):
        raise ParameterError(name, 'is not like {"role": "user", "content": "a text"}')
    if role not in _ROLES:
        raise ParameterError(f"{name}.role", f"is {short(role)}; there are system, user, assistant and tool")
    for other in found.keys() - {"role", "content"} - _MORE.get(role, set()):
        if found[other] != []:
            raise ParameterError(f"{name}.{other[:80]}", "cannot be told to the model; leave it out")
    text = _content(f"{name}.content", found.get("content", ""))
    if calls:
        shown = _calls(f"{name}.tool_calls", calls)
        text = f"{text}\n{shown}" if text else shown
    return {"role": "system" if role == "developer" else role, "content": text}


def _calls(name: str, calls: object) -> str:
    """Calls of tools as the model writes them."""
    found = []
    for place, one in enumerate(calls if isinstance(calls, list) else [None]):
        inner = one.get("function") if isinstance(one, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        called, given = inner.get("name"), inner.get("arguments")
        if not isinstance(called, str) or not re.fullmatch(NAME, called, re.ASCII) or not isinstance(given, str):
            raise ParameterError(
                f"{name}[{place}]", 'is not like {"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            )
        found.append((called, whole_text(f"{name}[{place}]", given or "{}")))
    return calls_text(found)


def _content(name: str, content: object) -> str:
    """The text of a message, which may come in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ParameterError(name, "is no text and no list of parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ParameterError(name, "has a part that is no text; only texts are read")
    return whole_text(name, "".join(part["text"] for part in parts))


def whole_text(name: str, text: str) -> str:
    """A text, after a check that it has no half of a character, such as ``"\\ud83d"``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(name, "has half of a character") from error
    return text

"""The messages of a chat's body, and the error for a parameter that cannot be read or honoured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import InputError


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
    """The messages of a chat's body.

    Raises:
        ParameterError: there is none, or one cannot be read.
    """
    if not given.get("messages"):
        raise ParameterError("messages", "has no message")
    return [_message(f"messages[{place}]", message) for place, message in enumerate(given["messages"])]


def _message(name: str, message: object) -> dict[str, str]:
    """A message with its role and its text. The role of a developer is the system's by another name."""
    found = {} if not isinstance(message, dict) else {k: v for k, v in message.items() if v is not None}
    if not isinstance(found.get("role"), str) or "content" not in found:
        raise ParameterError(name, 'is not like {"role": "user", "content": "a text"}')
    if found["role"] not in ("system", "developer", "user", "assistant"):
        raise ParameterError(f"{name}.role", f"is {short(found['role'])}; there are system, user and assistant")
    for other in found.keys() - {"role", "content"}:
        if found[other] != []:
            raise ParameterError(f"{name}.{other[:80]}", "cannot be told to the model; leave it out")
    role = "system" if found["role"] == "developer" else found["role"]
    return {"role": role, "content": _content(f"{name}.content", found["content"])}


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

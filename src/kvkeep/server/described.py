"""Parts of bodies that the OpenAPI document describes, and that are checked where they are read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

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


def _message(roles: list[str], required: list[str], **more: object) -> dict[str, Any]:
    fields = {"role": {"enum": roles}, "content": _CONTENT, **more}
    return {"type": "object", "properties": fields, "required": ["role", *required], "additionalProperties": False}


_KINDS = [
    _message(["system", "developer", "user", "assistant"], ["content"]),
    _message(["assistant"], ["tool_calls"], tool_calls={"type": "array", "items": {**_CALL, "required": ["function"]}}),
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
        {"anyOf": [_TEXT, _IDS, *({"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _IDS))]}
    ),
]
"""A text, token ids, or a list of either."""

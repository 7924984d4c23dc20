"""The form of an answer in OpenAI's and vLLM's words: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.engine.request import Structure, json_structure, structure_of
from kvkeep.errors import InputError
from kvkeep.openai.messages import ParameterError, short

_FORMATS = ("text", "json_object", "json_schema")


def form_of(given: Mapping[str, Any]) -> Structure | None:
    """The form that a body asks for; ``None`` for any text.

    Raises:
        ParameterError: the form cannot be read, or two are asked for.
    """
    found = format_of("response_format", given.get("response_format"))
    try:
        other = structure_of(given.get("structured_outputs"))
    except InputError as error:
        raise ParameterError("structured_outputs", f"is refused: {error}") from error
    if found and other:
        raise ParameterError("structured_outputs", "and response_format both name a form; give one of them")
    return found or other


def format_of(name: str, given: Mapping[str, Any] | None) -> Structure | None:
    """The form of a ``response_format``, also as ``/v1/responses`` writes it; ``None`` for any text.

    Args:
        name: the parameter's name.
        given: its value.

    Raises:
        ParameterError: it cannot be read.
    """
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in _FORMATS:
        raise ParameterError(f"{name}.type", f"is {short(kind)}; there are {', '.join(_FORMATS)}")
    if kind == "json_object":
        return json_structure({"type": "object"})
    place = f"{name}.json_schema"
    described = given.get("json_schema") if "schema" not in given else given
    if not isinstance(described, dict) or described.get("schema") is None:
        raise ParameterError(place, 'has no schema; give {"name": "…", "schema": {…}}')
    try:
        return json_structure(described["schema"])
    except InputError as error:
        raise ParameterError(f"{place}.schema", f"is refused: {error}") from error

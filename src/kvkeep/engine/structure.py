"""The form that an answer must have: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from kvkeep.errors import InputError

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

MOST_CHARACTERS = 2**17
"""Characters of a form; a longer one takes long to compile."""

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as ``json.dumps`` writes it. A model that may write more of it may never end."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_EXAMPLE = '{"json": {"type": "object"}}'


@dataclass(frozen=True)
class Structure:
    """The form that an answer must have.

    Attributes:
        kind: how the text is to be read. ``grammar`` is GBNF or Lark; ``lark`` is Lark.
        text: the schema, the list of choices as JSON, the regular expression or the grammar.
    """

    kind: Kind
    text: str


Structured: TypeAlias = "Mapping[str, Any] | Structure"
"""A form by the names of vLLM's ``structured_outputs``, such as ``{"regex": "[a-z]+"}``."""


def structure_of(given: object) -> Structure | None:
    """Return the form that is asked for; ``None`` for none.

    Args:
        given: a mapping with one of ``json`` (a schema, also as text), ``json_object`` (true), ``regex``, ``choice`` (a
            list of texts) and ``grammar`` (GBNF or Lark).

    Raises:
        InputError: it is no such mapping, or is too long.
    """
    if given is None or isinstance(given, Structure):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"structured_outputs={given!r:.60} is no mapping such as {_EXAMPLE}.")
    found = {name: value for name, value in given.items() if value is not None and (name, value) != _NO_OBJECT}
    for name in found:
        if name not in _KINDS:
            alike = difflib.get_close_matches(str(name)[:80], _KINDS, 1)
            remedy = f"did you mean {alike[0]}?" if alike else f"there are {', '.join(_KINDS)}."
            raise InputError(f"structured_outputs has no {str(name)[:80]!r}; {remedy}")
    if len(found) != 1:
        raise InputError(f"structured_outputs names {len(found)} forms; give one of {', '.join(_KINDS)}.")
    ((name, value),) = found.items()
    return checked(_READ[name](value))


_NO_OBJECT = ("json_object", False)


def json_structure(schema: object) -> Structure:
    """Return the form of JSON that follows a schema.

    Raises:
        InputError: the schema is no JSON object or text of one, or is too long.
    """
    return checked(Structure("json", json.dumps(compact(schema))))


def compact(schema: object, **options: object) -> dict[str, Any]:
    """Return a schema whose white space is that of ``json.dumps``, unless it says otherwise in ``x-guidance``.

    Args:
        schema: the schema, also as text; ``True`` takes any JSON.
        **options: further options of llguidance.

    Raises:
        InputError: the schema is no JSON object or text of one.
    """
    try:
        found = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The JSON schema cannot be read ({error!s:.80}); give a schema such as {_SCHEMA}.") from error
    if found is True:
        found = {}
    if not isinstance(found, dict):
        raise InputError(f"The JSON schema {json.dumps(found)[:60]} is no JSON object; give one such as {_SCHEMA}.")
    own = found.get("x-guidance", {})
    if not isinstance(own, dict):
        raise InputError("The JSON schema has an x-guidance that is no JSON object; leave it out.")
    return {**found, "x-guidance": {**COMPACT, **options, **own}}


_SCHEMA = '{"type": "object"}'


def _object(value: object) -> Structure:
    if value is not True:
        raise InputError(f"structured_outputs has json_object={value!r:.60}; give True, or leave it out.")
    return json_structure({"type": "object"})


def _choice(value: object) -> Structure:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise InputError(f"structured_outputs has choice={value!r:.60}; give a list of texts that are not empty.")
    return Structure("choice", json.dumps(value, ensure_ascii=False))


def _text(kind: Kind, value: object) -> Structure:
    if not isinstance(value, str) or not value:
        raise InputError(f"structured_outputs has {kind}={value!r:.60}; give a text that is not empty.")
    return Structure(kind, value)


_READ: Mapping[str, Callable[[object], Structure]] = {
    "json": json_structure,
    "json_object": _object,
    "choice": _choice,
    "regex": lambda value: _text("regex", value),
    "grammar": lambda value: _text("grammar", value),
}


def checked(found: Structure) -> Structure:
    """Return a form after a check of its length and characters.

    Raises:
        InputError: it is too long, or has half of a character.
    """
    if len(found.text) > MOST_CHARACTERS:
        raise InputError(
            f"The {NAMES[found.kind]} has {len(found.text)} characters, and there may be {MOST_CHARACTERS}. Shorten it."
        )
    try:
        found.text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The {NAMES[found.kind]} has half of a character.") from error
    return found


NAMES = cast(
    "Mapping[Kind, str]",
    {
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "choice",
        "grammar": "grammar",
        "lark": "description of tools",
    },
)
"""Kinds as messages name them."""

"""JSON schemas that answers must follow: written without needless white space, and such that an answer can end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from kvkeep.errors import InputError

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as ``json.dumps`` writes it. A model that may write more of it may never end."""


def compact(schema: object, **options: object) -> dict[str, Any]:
    """Return a JSON schema whose answers have no white space but that of ``json.dumps``, and can always end.

    Its own ``x-guidance`` takes precedence.

    Args:
        schema: the schema, also as text; ``True`` takes any JSON.
        **options: further options of llguidance.

    Raises:
        InputError: the schema is no JSON object or text of one, or no JSON that follows it ever ends.
    """
    try:
        # dumped and loaded: a copy of plain types that the caller cannot change
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
    found = _with_ends(found)
    if found is False:
        raise InputError(
            "The JSON schema refers to itself ($ref) in such a way that no JSON that follows it ever ends. Leave a "
            "part of the cycle out of required, or allow null beside it."
        )
    return {**found, "x-guidance": {**COMPACT, **options, **own}}


_SCHEMA = '{"type": "object"}'


# Values that end: the grammar engine compiles a schema whose values hold themselves, and fails within the answer.


def has_values(schema: object) -> bool:
    """Return whether some value that follows a schema ends, as far as is known of its references to itself."""
    references = _References(schema)
    return not references.endless or references.may_end(schema)


def _with_ends(schema: Any) -> Any:
    """Return a schema without the branches that recurse for ever, for example a node that must hold a node; ``False``
    if every branch does.
    """
    references = _References(schema)
    if not references.endless:
        return schema
    return references.without_endless(schema) if references.may_end(schema) else False


class _References:
    """The references of a schema to parts of itself, and which of them have values that end.

    Whatever is not understood counts as a value that ends, as the grammar engine refuses what is wrong in other ways.

    Args:
        schema: the whole schema.

    Attributes:
        endless: the references of which no value that ends is known.
    """

    def __init__(self, schema: Any) -> None:
        self._steps = 0
        targets = {name: _target(schema, name) for name in _references(schema)}
        self.endless = set(targets)
        # All references count as endless at first. Those proven to end are removed until no more are found.
        while new := {name for name in self.endless if self.may_end(targets[name])}:
            self.endless -= new

    def may_end(self, part: Any) -> bool:
        """Return whether a part of the schema has finite values, by what is known of its references so far."""
        self._steps += 1
        if not isinstance(part, dict) or self._steps > _MOST_STEPS:
            return True
        if self._is_endless(part) or not all(map(self.may_end, _listed(part, "allOf"))):
            return False
        branches = [_listed(part, name) for name in ("anyOf", "oneOf")]
        if any(several and not any(map(self.may_end, several)) for several in branches):
            return False
        kinds = part.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return any(all(map(self.may_end, _held(part, kind))) for kind in kinds)

    def _is_endless(self, part: Any) -> bool:
        """Return whether a part, a mapping, is a reference to a schema of which no finite value is known."""
        name = part.get("$ref")
        return isinstance(name, str) and name in self.endless

    def without_endless(self, part: Any) -> Any:
        """Return a copy of a part of the schema, with ``False``, which matches nothing, in place of each reference to a
        schema without finite values.
        """
        if isinstance(part, list):
            return [self.without_endless(inner) for inner in part]
        if not isinstance(part, dict):
            return part
        if self._is_endless(part):
            return False
        return {name: value if name in _PLAIN else self.without_endless(value) for name, value in part.items()}


_MOST_STEPS = 20_000
"""Parts of a schema that are looked at; those beyond count as such that end."""
_DEEPEST = 100
"""Levels of lists and objects; the references of a deeper schema are left to the grammar engine."""
_PLAIN = ("const", "enum", "default", "examples")
"""Words beside which a value stands, and no schema."""


def _held(part: Any, kind: object) -> Iterator[Any]:
    """Yield the schemas of the values that any object or array of this schema must contain."""
    if kind == "object":
        known = part.get("properties")
        needed = [name for name in _listed(part, "required") if isinstance(name, str)]
        yield from (known[name] for name in needed if isinstance(known, dict) and name in known)
    if kind == "array" and isinstance(least := part.get("minItems"), int):
        first = _listed(part, "prefixItems")[: max(0, least)]
        yield from first
        if least > len(first):
            yield part.get("items")


def _listed(part: Any, name: str) -> list[Any]:
    """Return the list under a key of a schema; an empty list if the key is missing or holds something else."""
    return found if isinstance(found := part.get(name), list) else []


def _references(schema: Any) -> list[str]:
    """Return the ``$ref`` values in a schema that point into the schema itself."""
    found, level = list[str](), [schema]
    for _ in range(_DEEPEST):
        for part in level:
            # the whole schema, or a JSON pointer into it; "#name" is an anchor
            if isinstance(part, dict) and isinstance(name := part.get("$ref"), str) and name[:2] in ("#", "#/"):
                found.append(name)
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)]
    return [] if level else found


def _target(schema: Any, reference: str) -> Any:
    """Return the part of a schema at a JSON pointer such as ``#/$defs/node``; ``None`` if there is none."""
    found: Any = schema
    for step in reference.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")  # in this order: "~01" stands for "~1"
        if isinstance(found, list):
            # Python refuses to read a number of thousands of digits
            found = found[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found

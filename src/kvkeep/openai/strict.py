"""JSON objects that are strict: no NaN, no numbers beyond a float, no deeper than any program can read."""

from __future__ import annotations

import json
import math
from typing import Any

from kvkeep.errors import InputError

MAX_DEPTH = 200
"""Levels of nested lists and objects; Python's own parser can always handle this many."""

_EXAMPLE = '{"prompt": "…"}'
_MAX_DIGITS = 4300
"""Digits of a whole number that Python reads from a text."""


def decoded(raw: bytes) -> dict[str, Any]:
    """The fields of a JSON object.

    Raises:
        ValueError: it is no strict JSON, or no object.
        RecursionError: it is nested too deeply.
    """
    fields = _DECODER.decode(raw.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise InputError(f"it is no JSON object like {_EXAMPLE}")
    if _depth(fields) > MAX_DEPTH:
        raise RecursionError
    return fields


def _no_constant(name: str) -> float:
    raise InputError(f"it holds {name}, which JSON does not have")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InputError(f"its number {text[:40]} is too large")
    return value


def _int(text: str) -> int:
    if (digits := len(text.lstrip("-"))) > _MAX_DIGITS:
        raise InputError(f"its number {text[:40]}… has {digits} digits; there may be {_MAX_DIGITS}")
    return int(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_float, parse_int=_int)


def _depth(value: object) -> int:
    """The number of nested levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while found := [part for part in level if isinstance(part, dict | list)]:
        level = [part for one in found for part in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth

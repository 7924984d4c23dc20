"""Files of one JSON object a line: the objects, and whole numbers of tokens in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep.result_files import in_full

_LONGEST = 10**7


def objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each line, for messages, and its object. Lines without text are left out.

    Raises:
        InputError: the file cannot be read, or a line is no JSON object.
    """
    try:
        raw = in_full(str(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text.") from error
    for number, text in enumerate(raw.split("\n"), 1):
        if text.strip():
            where = f"{path}, line {number}"
            yield where, _object(where, text)


def length(where: str, fields: dict[str, Any], names: Sequence[str]) -> int | None:
    """The number of tokens that has one of these names, the first one before the others; ``None``: there is none.

    Raises:
        InputError: it is not a whole number of 1 or more.
    """
    for name in names:
        if (value := fields.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST:
                raise InputError(f"{where}: {name} is not a whole number from 1 to {_LONGEST}.")
            return value
    return None


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON.") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: no JSON object.")
    return fields

"""What a row of results must hold for tables, plots and resuming; rows are checked here when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvkeep.evals.measures import MEASURES, Row
from kvkeep.evals.metrics import TENTHS
from kvkeep.evals.plan import Cell

LONGEST = 1000
"""Characters of a name, at most."""


def key_of(row: Row) -> Cell:
    """The cell that a row belongs to."""
    return Cell(row["task"], row["case"], row["policy"], row["budget"], row["seed"], row.get("setup", ""))


def fault(row: Row) -> str | None:
    """What is wrong with a row, as part of a sentence; ``None`` if it can be shown."""
    place: Row = {"setup": "", **row}  # rows were written before there were setups
    return _first(place, _ROW) or _first(place["score"], _SCORES.get(place["task"], {}), "score.")


def _first(found: dict[str, Any], wanted: dict[str, _Kind], of: str = "") -> str | None:
    """The first entry that is missing or of another kind."""
    for path, (fits, kind) in wanted.items():
        value: Any = found
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return f"it has no {of + path!r}"
            value = value[key]
        if not fits(value):
            return f"its {of + path!r} is not {kind}"
    return None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _is_budget(value: object) -> bool:
    if not isinstance(value, str) or not value.isascii() or len(value) > LONGEST:
        return False
    if not value.endswith("%"):
        return value.isdecimal()
    try:
        return 0 < float(value[:-1]) <= 100
    except ValueError:
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_length(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_size(value: object) -> bool:
    return _is_number(value) and value >= 0  # type: ignore[operator]


def _is_score(value: object) -> bool:
    return value is None or _is_number(value)


def _are_shares(value: object) -> bool:
    return isinstance(value, list) and len(value) == TENTHS and all(map(_is_number, value))


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and len(value) == TENTHS and all(map(_is_pair, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))


_Kind = tuple[Callable[[object], bool], str]

_ROW: dict[str, _Kind] = {
    **dict.fromkeys(("task", "case", "policy", "setup"), (_is_name, f"text of at most {LONGEST} characters")),
    "budget": (_is_budget, "a number of tokens or a share of the text"),
    "seed": (_is_whole, "a whole number"),
    **dict.fromkeys(("budget_tokens", "text_tokens"), (_is_length, "a number above 0")),
    **dict.fromkeys(("memory.allocated_bytes", "memory.full_bytes"), (_is_size, "a number of bytes")),
    "score": (lambda value: isinstance(value, dict), "an object"),
}

_SCORES: dict[str, dict[str, _Kind]] = {
    task: {measure.key: (_is_score, "a number or null") for measure in MEASURES if measure.task == task}
    for task in dict.fromkeys(measure.task for measure in MEASURES)
}
_SCORES["recall"] |= {
    "by_depth": (_are_counts, f"{TENTHS} pairs of whole numbers"),
    "kept": (_are_shares, f"{TENTHS} numbers"),
}

"""Traces: files with the times and lengths of requests, one JSON object a line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.errors import InputError
from kvkeep_lab.fleet.load import Turn
from kvkeep_lab.loadtest.jsonl import length, objects
from kvkeep_lab.loadtest.plan import Line

_TIMES = ("at", "planned")
_PROMPTS, _ANSWERS = ("prompt_tokens",), ("new_tokens", "max_tokens")


class Trace(NamedTuple):
    """A file of requests.

    Attributes:
        turns: conversations, each with its turns at given times; empty if the lines have no times.
        lines: the lengths of every line.
        failed: lines of requests that failed, which are left out.
    """

    turns: tuple[tuple[Turn, ...], ...]
    lines: tuple[Line, ...]
    failed: int


def read_trace(path: str | Path) -> Trace:
    """Read a trace: the input of ``kvkeep bench-server``, or the output of one.

    A line has ``prompt_tokens`` and ``max_tokens`` (or ``new_tokens``), and may have ``at`` (or ``planned``): seconds
    from any beginning. Lines with one ``session`` are turns of a conversation. Lines with an ``error`` are left out.

    Raises:
        InputError: the file cannot be read, has no line, or a line is of another kind.
    """
    talks: dict[object, list[Turn]] = {}
    lines, timed, failed = [], 0, 0
    for where, fields in objects(path):
        if fields.get("error") is not None:
            failed += 1
            continue
        line, at = _lengths(where, fields), _time(where, fields)
        lines.append(line)
        timed += at is not None
        if timed not in (0, len(lines)):
            raise InputError(f"{where}: some lines have a time (`at`) and some have none.")
        if at is not None:
            turn = Turn(line.prompt_tokens or 1, line.new_tokens or 1, due=at)
            talks.setdefault(_session(where, fields), []).append(turn)
    if not lines:
        raise InputError(f"{path} has no line{' of a request that did not fail' if failed else ''}.")
    return Trace(_from_zero(talks), tuple(lines), failed)


def _from_zero(talks: dict[object, list[Turn]]) -> tuple[tuple[Turn, ...], ...]:
    """Conversations in the order of their beginning, from second 0 on."""
    sorted_turns = [sorted(turns, key=lambda turn: turn.due or 0.0) for turns in talks.values()]
    start = min((turns[0].due or 0.0 for turns in sorted_turns), default=0.0)
    moved = [tuple(turn._replace(due=(turn.due or 0.0) - start) for turn in turns) for turns in sorted_turns]
    return tuple(sorted(moved, key=lambda turns: turns[0].due or 0.0))


def _lengths(where: str, fields: dict[str, Any]) -> Line:
    prompt = length(where, fields, _PROMPTS)
    if prompt is None:
        text = " A text is not counted; give its tokens." if "prompt" in fields or "messages" in fields else ""
        raise InputError(f"{where}: it has no prompt_tokens.{text}")
    new = length(where, fields, _ANSWERS)
    times = fields.get("times")
    if new is None and isinstance(times, list) and times:  # of a server that does not count
        new = len(times)
    return Line(None, prompt, new)


def _time(where: str, fields: dict[str, Any]) -> float | None:
    for name in _TIMES:
        if (value := fields.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"{where}: {name} is not a number of seconds.")
            if not any(fields.get(one) is not None for one in (*_ANSWERS, "times")):
                raise InputError(f"{where}: it has a time and no new_tokens.")
            return float(value)
    return None


def _session(where: str, fields: dict[str, Any]) -> object:
    session = fields.get("session")
    if session is None:
        return (where,)  # a conversation of its own
    if isinstance(session, bool) or not isinstance(session, str | int):
        raise InputError(f"{where}: session is neither a text nor a whole number.")
    return str(session)

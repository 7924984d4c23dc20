"""Pins: spans of positions whose tokens no policy may evict, as users give them and as a table of numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import index, itemgetter
from typing import TYPE_CHECKING, TypeAlias

from kvkeep.errors import InputError, ShapeError

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

Span: TypeAlias = tuple[int, int]
"""The first position, and the position after the last one."""

Spans: TypeAlias = tuple[Span, ...]
"""Spans in their order that neither touch nor overlap."""

LAST = 2**31 - 1
"""The largest position that can be told: positions are counted in 32 bits."""

_EXAMPLE = "give spans of positions such as [(0, 120)]: the first one, and the one after the last"


def spans(pins: object) -> Spans:
    """Return the spans that a user pinned in one sequence, checked and in order; overlapping or touching ones become
    one, and empty ones are left out.

    Raises:
        InputError: ``pins`` is no list of spans, or a span is negative, reversed or beyond any position.
    """
    if not _is_list(pins):
        raise InputError(f"pins={pins!r:.60} are no list; {_EXAMPLE}.")
    merged: list[Span] = []
    for start, stop in sorted(map(_span, pins)):  # type: ignore[call-overload]  # iterable, as checked
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def spans_of_rows(pins: object) -> tuple[Spans, ...]:
    """Return the spans that a user pinned in a batch, checked: a tuple of one entry for all rows, or of one per row.

    A list of spans pins them in all rows; a list of lists of spans gives each row its own.

    Raises:
        InputError: see `spans`.
    """
    if not _is_list(pins):
        return (spans(pins),)
    rows = list(pins)  # type: ignore[call-overload]  # iterable, as checked
    per_row = rows and all(_is_list(row) and all(map(_is_list, row)) for row in rows)
    return tuple(map(spans, rows)) if per_row else (spans(rows),)


def _is_list(value: object) -> bool:
    """Return whether a value is an iterable that can hold spans or rows: not a text, bytes or a dict."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | dict)


def _span(pin: object) -> Span:
    """Return one span that a user gave, any pair of whole numbers, as a tuple of Python's ints.

    Raises:
        InputError: the pin is no pair of whole numbers, or out of range.
    """
    try:
        if isinstance(pin, str | bytes | dict | set):  # no pairs, though two items could be taken from each
            raise TypeError
        start, stop = map(index, pin)  # type: ignore[call-overload]  # anything else raises
    except (TypeError, ValueError):
        raise InputError(f"The pin {pin!r:.60} is no pair of whole numbers; {_EXAMPLE}.") from None
    if max(abs(start), abs(stop)) > LAST:
        raise InputError(f"A pin goes beyond {LAST}, the last position there can be.")
    if start < 0 or stop < 0:
        raise InputError(f"The pin ({start}, {stop}) is negative; positions count from 0, the prompt's first token.")
    if start > stop:
        raise InputError(f"The pin ({start}, {stop}) is reversed; give the first position and the one after the last.")
    return start, stop


def count(pins: Spans, sinks: int = 0) -> int:
    """Return the number of positions that are pinned or among the first ``sinks``; one that is both counts once."""
    return sum(stop - start for start, stop in spans((*pins, (0, sinks))))


def end(pins: Spans) -> int:
    """Return the position after the last pinned one; 0 if nothing is pinned."""
    return pins[-1][1] if pins else 0


def from_start(pins: Spans) -> Spans:
    """Return the spans with the first one extended to position 0: kernels protect a pinned beginning, but no other
    pins.
    """
    return spans(((0, pins[0][1]), *pins)) if pins else ()


def within(pins: Spans, tokens: int) -> Spans:
    """Return the parts of the spans that lie within the first ``tokens`` positions."""
    return tuple((start, min(stop, tokens)) for start, stop in pins if start < tokens)


def without(pins: Spans, others: Spans) -> Spans:
    """Return the parts of the spans that lie in none of the others."""
    found: list[Span] = []
    for start, stop in pins:
        # others are in order, so those that end before a span are passed at once
        for place in range(bisect_right(others, start, key=itemgetter(1)), len(others)):
            first, last = others[place]
            if first >= stop:
                break
            if first > start:
                found.append((start, first))
            start = min(last, stop)
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def common(pins: Spans, others: Spans) -> Spans:
    """Return the parts of the spans that lie in the others as well."""
    return without(pins, without(pins, others))


def table(rows: Sequence[Spans], device: torch.device, *, width: int = 0) -> Int[Tensor, "B bounds"]:
    """Return the bounds of each row's spans in order, for `kvkeep.kv.ranking.pinned`, filled up with `LAST`.

    Args:
        rows: the spans of each row.
        device: where the table lies.
        width: the least number of bounds per row; there are more if the longest row has more, and always two.
    """
    import torch  # here, since commands read pins without it

    # a row without pins needs a span, too: two bounds of `LAST` pin nothing
    width = max([width, 2, *(2 * len(row) for row in rows)])
    filled = [[bound for span in row for bound in span] + [LAST] * (width - 2 * len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device=device).reshape(len(rows), width)


def for_rows(pins: Sequence[Spans], rows: int) -> list[Spans]:
    """Return the pins of each row of a batch; a single entry is repeated for all rows.

    Raises:
        ShapeError: there are pins of several rows, but not of each row.
    """
    if len(pins) not in (1, rows):
        raise ShapeError(
            f"Pins of {len(pins)} rows were given for a batch of {rows}; give one list for all, or one per row."
        )
    return list(pins) * (rows if len(pins) == 1 else 1)

"""Tables of results in the width of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from kvkeep.cli import console
from kvkeep.evals import report

_GAP = 2
"""Spaces between two columns."""


def parts(found: report.Table, width: int) -> Iterator[Table]:
    """One table, or several below each other where its columns do not fit beside each other."""
    names = [console.visible(policy) for policy in found.rows]
    longest = min(max(map(len, ("policy", *names))), width // 2)
    columns = list(zip(map(console.visible, found.columns), *found.rows.values(), strict=True))
    for some in _fitting(columns, width - longest - _GAP):
        part = console.table("policy", *(column[0] for column in some))
        part.columns[0].overflow, part.columns[0].max_width = "fold", longest
        for column in part.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for row, name in enumerate(names, 1):
            part.add_row(name, *(column[row] for column in some))
        yield part


def _fitting(columns: Sequence[Sequence[str]], room: int) -> Iterator[Sequence[Sequence[str]]]:
    """The columns, a title and its cells each, in groups that fit into so many characters."""
    group: list[Sequence[str]] = []
    left = room
    for column in columns:
        size = max(map(len, column)) + _GAP
        if group and size > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= size
    yield group

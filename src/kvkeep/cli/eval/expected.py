"""``kvkeep eval --dry-run``: what a grid costs, before weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvkeep.cli import console
from kvkeep.errors import show_bytes
from kvkeep.evals.attention_probe import BATCH_TOKENS
from kvkeep.evals.grid import Planned
from kvkeep.evals.report import grouped
from kvkeep.evals.run import Grid
from kvkeep.models.device import parse_device
from kvkeep.planning.bandwidth import measure_bandwidth
from kvkeep.planning.model_shapes import Outline, outline
from kvkeep.planning.plan import plan

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Expected:
    """The cost of one cell.

    Attributes:
        planned: the cell.
        tokens: tokens of its longest row, new ones included.
        rows: rows that run at once.
        cache_bytes, full_bytes: bytes of their caches, and of full ones.
        peak_bytes: the most bytes at once, weights included.
        weight_bytes: bytes of the weights.
        decode_bytes: bytes that all its decode steps read if every reply is as long as the longest.
    """

    planned: Planned
    tokens: int
    rows: int
    cache_bytes: int
    full_bytes: int
    peak_bytes: int
    weight_bytes: int
    decode_bytes: float


def expect(grid: Grid, dtype: str) -> list[Expected]:
    """The costs of all cells, by `kvkeep.planning`.

    Raises:
        KVKeepError: the model cannot be planned.
    """
    model = outline(grid.checkpoint.name)
    return [_of(model, planned, part.task.new_tokens, dtype) for part in grid.parts for planned in part.planned]


def _of(model: Outline, planned: Planned, new: int, dtype: str) -> Expected:
    longest, count = max(planned.lengths), len(planned.lengths)
    rows = min(count, max(1, BATCH_TOKENS // longest))
    made = plan(model, planned.policy, max(planned.budgets), context=longest + new, dtype=dtype, rows=rows)
    return Expected(
        planned,
        longest + new,
        rows,
        rows * made.bounded.row_bytes,
        rows * made.full.row_bytes,
        made.bounded.peak_bytes(rows),
        made.bounded.weight_bytes,
        math.ceil(count / rows) * new * made.bounded.read_bytes(rows),
    )


def show(grid: Grid, dtype: str, device: str, about: Mapping[str, str]) -> None:
    """Print the largest cell of each case, the memory and time of the whole grid, and what else there is to say."""
    found = expect(grid, dtype)
    screen = console.out()
    table = console.table("case", "cells", "rows", "tokens", "at once", "caches", "full caches")
    for column in table.columns[1:]:
        column.justify = "right"
    cases = grouped(found, lambda one: f"{one.planned.cell.task} {one.planned.cell.case}")
    for case in list(cases)[:_MOST_SHOWN]:
        table.add_row(*_line(case, cases[case]))
    screen.print(table)
    if len(cases) > _MOST_SHOWN:
        screen.print(f"and {len(cases) - _MOST_SHOWN} more cases", style="dim")
    screen.print()
    console.progress("measuring the memory of this machine …")
    speed = measure_bandwidth(parse_device(device)).best
    screen.print(
        console.facts(
            {
                **about,
                "cells": str(len(found)),
                "tokens to read": f"{sum(sum(one.planned.lengths) for one in found):,}",
                "peak memory": f"{show_bytes(max(one.peak_bytes for one in found))}, weights included",
                "decoding": f"{_time(sum(one.decode_bytes for one in found) / speed)} at {speed / 1e9:.3g} GB/s",
            }
        )
    )
    console.note(
        "nothing was run. Decoding is counted as if every reply were as long as the longest. Reading the prompts takes "
        "time on top, which depends on arithmetic, not on memory."
    )


def _line(case: str, own: Sequence[Expected]) -> list[str]:
    first = own[0]
    bounded = [one for one in own if one.planned.policy.evicts] or own
    return [
        console.visible(case),
        *(str(len(own)), str(len(first.planned.lengths)), str(first.tokens), str(first.rows)),
        show_bytes(max(one.cache_bytes for one in bounded)),
        show_bytes(max(one.full_bytes for one in own)),
    ]


def _time(seconds: float) -> str:
    """A time with two parts at most: ``3 h 20 min``, ``4 min 10 s``, ``0.4 s``."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"

"""From rows to tables; needs nothing but the JSONL file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.evals.measures import MEASURES, Row, by_budget, by_case, by_name, grouped, held, of_task, over, seeds


@dataclass(frozen=True)
class Table:
    """One measure of one case: policies down, budgets across; an empty cell was not run."""

    title: str
    columns: list[str]
    rows: dict[str, list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for every measure of every case, and one of the bytes that caches held."""
    found = [
        _table(f"{measure.title} ({case})", group, measure.show)
        for measure in MEASURES
        for case, group in by_case(of_task(rows, measure.task)).items()
    ]
    return [*found, _memory(rows)] if rows else found


def _memory(rows: Sequence[Row]) -> Table:
    """What caches held in the part of the first task that has most rows, of equals the last."""
    first = next(iter(grouped(rows, lambda row: row["task"]).values()))
    case, group = max(reversed(by_case(first).items()), key=lambda item: len(item[1]))
    columns = list(by_budget(group))
    cells = _cells(group, columns, lambda part: f"{over([*map(held, part)]).mean:.0%}")
    return Table(f"KV memory held, % of a full cache ({group[0]['task']}, {case})", columns, cells)


def _table(title: str, group: Sequence[Row], show: Callable[[Sequence[Row]], str]) -> Table:
    columns = list(by_budget(group))
    several = seeds(group)
    title = f"{title}, mean ± half of the range over {several}" if several else title
    return Table(title, columns, _cells(group, columns, show))


def _cells(group: Sequence[Row], columns: Sequence[str], show: Callable[[Sequence[Row]], str]) -> dict[str, list[str]]:
    """Each policy's line."""
    lines = {name: by_budget(part) for name, part in by_name(group).items()}
    return {name: [show(line[column]) if column in line else "" for column in columns] for name, line in lines.items()}

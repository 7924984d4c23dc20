"""Tables of the policies' differences on the same questions, and a note on the ones that chance may have made."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvkeep.evals.certainty import Pair, pairs
from kvkeep.evals.report import Row, Table, by_budget, by_name, grouped, is_full, of_task

BEST = "best"


def tables(rows: Sequence[Row]) -> list[Table]:
    """For every task and protocol: each policy's difference to the best one of its budget. `full` is left out."""
    full = {name for name, own in by_name(rows).items() if is_full(own)}
    some = [pair for pair in pairs(rows) if not {pair.one, pair.other} & full]
    return [
        _table(f"{task}, {protocol}", group, _order(of_task(rows, task)))
        for (task, protocol), group in grouped(some, lambda pair: (pair.task, pair.protocol)).items()
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """How many differences are clear, and how many questions the others would need."""
    found = []
    for (task, protocol), group in grouped(pairs(rows), lambda pair: (pair.task, pair.protocol)).items():
        unclear = [pair for pair in group if not pair.clear]
        if not unclear:
            continue
        text = f"{task}, {protocol}: {len(unclear)} of {len(group)} differences may be chance at n={_span(group)}"
        if needed := [pair for pair in unclear if pair.needed]:
            most = max(needed, key=lambda pair: abs(pair.points))
            text += (
                f"; the largest of them, {abs(most.points):.1f} points ({_better(most)} at {most.budget}), "
                f"would need about {_rounded(most.needed or 0)} questions"
            )
        found.append(f"{text}.")
    return found


def _better(pair: Pair) -> str:
    one, other = (pair.one, pair.other) if pair.points > 0 else (pair.other, pair.one)
    return f"{one} before {other}"


def _span(group: Sequence[Pair]) -> str:
    low, high = min(pair.n for pair in group), max(pair.n for pair in group)
    return str(low) if low == high else f"{low} to {high}"


def _rounded(n: int) -> int:
    """A number of questions with two digits."""
    size: int = 10 ** max(0, len(str(n)) - 2)
    return math.ceil(n / size) * size


def _order(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    bounded = [row for row in rows if not is_full([row])]
    return list(by_name(bounded)), list(by_budget(bounded))


def _table(about: str, group: Sequence[Pair], order: tuple[list[str], list[str]]) -> Table:
    names, budgets = order
    by = {budget: _against(own) for budget, own in grouped(group, lambda pair: pair.budget).items()}
    columns = [budget for budget in budgets if budget in by]
    title = (
        f"points below the best policy of the budget ({about}; all cases together, n={_span(group)}; bootstrap 95 % "
        "intervals; * = clear: sign-flip test, Holm)"
    )
    return Table(title, columns, {name: [by[budget].get(name, "") for budget in columns] for name in names})


def _against(group: Sequence[Pair]) -> dict[str, str]:
    """The cell of each policy of a budget."""
    names = list(dict.fromkeys(name for pair in group for name in (pair.one, pair.other)))
    sums = dict.fromkeys(names, 0.0)
    for pair in group:
        if not math.isnan(pair.points):
            sums[pair.one] += pair.points
            sums[pair.other] -= pair.points
    best = max(names, key=sums.__getitem__)
    cells = {best: BEST}
    for pair in group:
        if best in (pair.one, pair.other):
            name, sign = (pair.other, -1) if pair.one == best else (pair.one, 1)
            cells[name] = _cell(pair, sign)
    return cells


def _cell(pair: Pair, sign: int) -> str:
    """``−12 (−20…−4) *``: points, their interval, and a star if the difference is clear."""
    if math.isnan(pair.points):
        return "–"
    low, high = sorted(sign * limit for limit in pair.interval)
    limits = "" if math.isnan(low) else f" ({_signed(low)}…{_signed(high)})"
    return f"{_signed(sign * pair.points)}{limits}{' *' if pair.clear else ''}"


def _signed(value: float) -> str:
    return f"{value:+.0f}".replace("-", "−") if round(value) else "0"

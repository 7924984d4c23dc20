"""Tables of results, and notes on the differences that chance may have made; needs only ``results.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.evals.confidence import Answers, PolicyPair, answers, interval_text, is_reference, kept, of_cell, pairs
from kvkeep.evals.results import (
    ABLE_PERCENT,
    MEASURES,
    RIGHT,
    Row,
    ScoreMeasure,
    by_budget,
    by_case,
    by_policy,
    case_title,
    grouped,
    held,
    is_full,
    of_task,
    over,
    seeds,
)
from kvkeep.evals.task_names import TEXT_TASKS


@dataclass(frozen=True)
class Table:
    """One measure of one case: policies down, budgets across.

    Attributes:
        title: what is measured, and where.
        columns: the budgets.
        rows: policy → a text per column; empty where the cell was not run.
    """

    title: str
    columns: list[str]
    rows: dict[str, list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for every measure of every case, then one of the bytes that caches held; no table without rows.

    Cells of tasks with questions have their 95 % interval, where it is known.
    """
    measured = [
        _measure_table(measure, case, group)
        for measure in MEASURES
        for case, group in by_case(of_task(rows, measure.task)).items()
    ]
    return [*measured, _memory(rows)] if rows else measured


def _memory(rows: Sequence[Row]) -> Table:
    """Return the table of the bytes that caches held, in percent of a full cache: policies by budgets, mean over seeds.

    It shows one case of the task of the first row: the case with most rows, and of several such cases the last one.
    """
    first = next(iter(grouped(rows, lambda row: row["task"]).values()))
    # from the end, since `max` returns the first of equal ones
    case, group = max(reversed(by_case(first).items()), key=lambda item: len(item[1]))
    columns, task = list(by_budget(group)), str(group[0]["task"])
    cells = _cells(group, columns, lambda part: f"{over([*map(held, part)]).mean:.0%}")
    return Table(f"KV memory held, % of a full cache ({task}, {case_title(task, case)})", columns, cells)


WEAK = " †"
"""Follows each cell of a case whose full cache is too seldom right, see `Weakness`."""


@dataclass(frozen=True)
class Weakness:
    """A case for which the model is too weak: even with the full cache fewer than `ABLE_PERCENT` of its answers are
    right.

    Attributes:
        task: the task.
        case: the case.
        percent: right answers under the full cache, in percent.
    """

    task: str
    case: str
    percent: float


def weaknesses(rows: Sequence[Row]) -> list[Weakness]:
    """Return the cases for which the model is too weak: its full cache answers less than `ABLE_PERCENT` % right.

    Cases without rows of a policy that never evicts, and tasks without right answers, are never among them.
    """
    cases = [
        (measure, case, _full_percent(measure, group))
        for measure in MEASURES
        for case, group in by_case(of_task(rows, measure.task)).items()
    ]
    return [Weakness(measure.task, case, percent) for measure, case, percent in cases if percent < ABLE_PERCENT]


def _full_percent(measure: ScoreMeasure, group: Sequence[Row]) -> float:
    """Return the right answers under the full cache, in percent; NaN if they are not known or the task has none.

    Comparisons with NaN are false, so a case of which nothing is known is neither weak nor able.
    """
    full = [row for row in group if is_full([row])]
    return measure.of(full).mean if full and measure.graded and measure.task in RIGHT else math.nan


def weakness_notes(rows: Sequence[Row]) -> list[str]:
    """Return a note about each case for which the model is too weak, and then one on the tasks and cases that can tell
    what eviction costs; no note if there is no such case.
    """
    found = weaknesses(rows)
    if not found:
        return []
    weak = {(weakness.task, weakness.case) for weakness in found}
    able = [
        f"{measure.task} ({case_title(measure.task, case)})"
        for measure in MEASURES
        for case, group in by_case(of_task(rows, measure.task)).items()
        if _full_percent(measure, group) >= ABLE_PERCENT and (measure.task, case) not in weak
    ]
    able += [task for task in TEXT_TASKS if of_task(rows, task)]
    return [
        *(
            f"† {weakness.task}, {case_title(weakness.task, weakness.case)}: the full cache is right in "
            f"{weakness.percent:.0f} % of the cases, fewer than {ABLE_PERCENT:.0f} %. The model is too weak for this "
            "task to show what eviction costs."
            for weakness in found
        ),
        f"† With this model {', '.join(able)} can tell."
        if able
        else f"† With this model other tasks can tell: `tasks={','.join(TEXT_TASKS)}`.",
    ]


def _measure_table(measure: ScoreMeasure, case: str, group: Sequence[Row]) -> Table:
    """Return the table of a measure in one case: policies by budgets, with 95 % intervals where they are known.

    The cells of a case for which the model is too weak end with `WEAK`.
    """
    columns = list(by_budget(group))
    several = seeds(group)
    title = f"{measure.title} ({case_title(measure.task, case)})"
    title = f"{title}, mean ± half of the range over {several}" if several else title
    if not measure.graded:
        return Table(title, columns, _cells(group, columns, measure.show))
    # a model that fails with everything kept cannot show what eviction costs
    mark = WEAK if _full_percent(measure, group) < ABLE_PERCENT else ""
    cells = _cells(group, columns, lambda part: measure.show(part) + interval_text(of_cell(part)) + mark)
    known = any("(" in cell for line in cells.values() for cell in line)
    return Table(f"{title}, with 95 % intervals" if known else title, columns, cells)


def _cells(group: Sequence[Row], columns: Sequence[str], show: Callable[[Sequence[Row]], str]) -> dict[str, list[str]]:
    """Return policy → its line of a table: what ``show`` makes of its rows at each budget; empty where it has none."""
    lines = {name: by_budget(part) for name, part in by_policy(group).items()}
    return {name: [show(line[column]) if column in line else "" for column in columns] for name, line in lines.items()}


# What stays of the full cache's answers.


def share_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table per case of recall in which ``full`` is right at all: the share of its answers that stays."""
    tables = []
    for case, rows_of_case in by_case(of_task(rows, "recall")).items():
        full = answers(row for row in rows_of_case if is_reference(row))
        # a row may lack the record of its questions, see `records.fault`
        others = [row for row in rows_of_case if not is_reference(row) and "asked" in row["score"]]
        if any(full.values()) and others:  # of no right answer none can stay
            tables.append(_share_table(case, others, full))
    return tables


def _share_table(case: str, rows: Sequence[Row], full: Answers) -> Table:
    """Return the table of the shares of the full cache's answers that each policy keeps at each budget."""
    columns = list(by_budget(rows))
    texts = len({question[:2] for question in full})  # without the number of the question in its text
    title = (
        f"answers of the full cache that stay, % with 95 % interval ({case_title('recall', case)}; the full cache "
        f"answers {sum(full.values())} of {len(full)} questions about {texts} text{'s' * (texts != 1)})"
    )
    return Table(title, columns, _cells(rows, columns, lambda part: str(kept(answers(part), full))))


# The policies' differences on the same questions.

BEST = "best"


def difference_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each task and protocol: how far each policy is behind the best one of its budget.

    Policies that never evict are left out.
    """
    full = {name for name, own in by_policy(rows).items() if is_full(own)}
    bounded = [pair for pair in pairs(rows) if not {pair.one, pair.other} & full]
    return [
        _difference_table(f"{task}, {protocol}", group, _order(of_task(rows, task)))
        for (task, protocol), group in grouped(bounded, lambda pair: (pair.task, pair.protocol)).items()
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a note for each task and protocol in which differences between policies may be chance.

    It says how many of all differences may be, and how many questions the largest of these would need to be clear.
    """
    texts = []
    for (task, protocol), group in grouped(pairs(rows), lambda pair: (pair.task, pair.protocol)).items():
        unclear = [pair for pair in group if not pair.clear]
        if not unclear:
            continue
        text = f"{task}, {protocol}: {len(unclear)} of {len(group)} differences may be chance at n={_span(group)}"
        if needed := [pair for pair in unclear if pair.needed]:
            most = max(needed, key=lambda pair: abs(pair.points))
            text += (
                f"; the largest of them, {abs(most.points):.1f} points ({_better(most)} at {most.budget}), "
                f"would need about {_rounded(most.needed or 0)} questions"  # never 0, see `if needed`
            )
        texts.append(f"{text}.")
    return texts


def _better(pair: PolicyPair) -> str:
    """Return as text which of two policies is before the other: ``h2o before local``."""
    better, worse = (pair.one, pair.other) if pair.points > 0 else (pair.other, pair.one)
    return f"{better} before {worse}"


def _span(group: Sequence[PolicyPair]) -> str:
    """Return the number of questions of the pairs as text, or the range if they differ: ``20 to 30``."""
    low, high = min(pair.n for pair in group), max(pair.n for pair in group)
    return str(low) if low == high else f"{low} to {high}"


def _rounded(n: int) -> int:
    """Return a number of questions rounded up to two significant digits."""
    size: int = 10 ** max(0, len(str(n)) - 2)
    return math.ceil(n / size) * size


def _order(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the policies and the budgets of bounded caches, in the order of the rows."""
    bounded = [row for row in rows if not is_full([row])]
    return list(by_policy(bounded)), list(by_budget(bounded))


def _difference_table(about: str, group: Sequence[PolicyPair], order: tuple[list[str], list[str]]) -> Table:
    """Return the table of each policy's points below the best policy of its budget.

    Args:
        about: task and protocol, for the title.
        group: the comparisons of all pairs of policies.
        order: the names of the policies and of the budgets, in the order of the table.
    """
    names, budgets = order
    by = {budget: _against(own) for budget, own in grouped(group, lambda pair: pair.budget).items()}
    columns = [budget for budget in budgets if budget in by]
    title = (
        f"points below the best policy of the budget ({about}; all cases together, n={_span(group)}; bootstrap 95 % "
        "intervals; * = clear: sign-flip test, Holm)"
    )
    return Table(title, columns, {name: [by[budget].get(name, "") for budget in columns] for name in names})


def _against(group: Sequence[PolicyPair]) -> dict[str, str]:
    """Return policy → cell of the table, at one budget: `BEST` for the best policy, for each other one its distance
    from it as `_difference_cell` writes it.

    The best policy is the one whose points over all others add up to most.
    """
    names = list(dict.fromkeys(name for pair in group for name in (pair.one, pair.other)))
    sums = dict.fromkeys(names, 0.0)
    for pair in group:
        if not math.isnan(pair.points):  # policies without a question in common
            sums[pair.one] += pair.points
            sums[pair.other] -= pair.points
    best = max(names, key=sums.__getitem__)
    cells = {best: BEST}
    for pair in group:
        if best in (pair.one, pair.other):
            name, sign = (pair.other, -1) if pair.one == best else (pair.one, 1)
            cells[name] = _difference_cell(pair, sign)
    return cells


def _difference_cell(pair: PolicyPair, sign: int) -> str:
    """Return points, their interval, and a star if the difference is clear, as text: ``−12 (−20…−4) *``.

    A dash stands for points that are not known.

    Args:
        pair: the comparison of two policies.
        sign: 1 for the points of the first policy over the other one, -1 for those of the other one over the first.
    """
    if math.isnan(pair.points):
        return "–"
    low, high = sorted(sign * limit for limit in pair.interval)
    limits = "" if math.isnan(low) else f" ({_signed(low)}…{_signed(high)})"
    return f"{_signed(sign * pair.points)}{limits}{' *' if pair.clear else ''}"


def _signed(value: float) -> str:
    """Return a number of points with its sign; 0 has none."""
    return f"{value:+.0f}".replace("-", "−") if round(value) else "0"  # else -0.4 would be −0

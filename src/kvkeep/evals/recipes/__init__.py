"""The tables of papers as recipes: the options of a run, and the published figures beside which ours are shown."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvkeep.errors import InputError, closest
from kvkeep.evals.arms import split_arms
from kvkeep.evals.report import Table
from kvkeep.evals.results import Row, of_task
from kvkeep.kv_bits import check_bits
from kvkeep.policies.registry import spec

_FOLDER = "kvkeep.evals.recipes"
_LARGE = 3.0
"""Half of an interval in points that is worth a note."""


@dataclass(frozen=True)
class Recipe:
    """A table of a paper.

    Attributes:
        name: by which the user asks for it.
        title, source, model: the table, where it stands, and the model that it was measured on.
        apart: what else cannot be compared.
        run: options of ``kvkeep eval``, name → value as the user would write it.
        quick: options that replace some of them for a first look.
        columns: the table's columns, with the parts of the task that each averages; ``*`` for all.
        figures: the paper's figures, line → one per column; NaN where the paper prints none. A line is a policy, as in
            ``h2o``, ``h2o@4bit`` or ``h2o at 20%``.
    """

    name: str
    title: str
    source: str
    model: str
    apart: tuple[str, ...]
    run: Mapping[str, str]
    quick: Mapping[str, str]
    columns: Mapping[str, tuple[str, ...]]
    figures: Mapping[str, tuple[float, ...]]

    def options(self, *, quick: bool) -> dict[str, str]:
        """Return the options of the recipe's full run, or of its quick one."""
        return {**self.run, **(self.quick if quick else {})}

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return sentences on how the measurement of our figures, from these rows, differs from that of the paper's.

        The last one says how wide intervals are, if a case has few questions.
        """
        models = ", ".join(dict.fromkeys(str(row.get("model", "unknown")) for row in rows))
        about = [f"{self.source}; measured on {self.model}, ours on {models}.", *self.apart]
        counts = [int(row["score"]["n"]) for row in of_task(rows, self.run["tasks"])]
        # 1.96 deviations of a share, in points. A deviation is at most 50 / √n.
        if counts and (error := 98 / math.sqrt(min(counts))) > _LARGE:
            about.append(f"{min(counts)} questions in a case: 95% intervals of one case are up to ±{error:.0f} points.")
        return about

    def table(self, rows: Sequence[Row]) -> Table:
        """Return a table of the paper's figures, ours, and the differences.

        A dash stands where no row fits, or where the paper prints no figure.
        """
        own = of_task(rows, self.run["tasks"])
        title = f"{self.title} (paper | ours | difference)"
        cells = {
            policy: [
                _cell(paper, _ours(own, policy, parts))
                for paper, parts in zip(figures, self.columns.values(), strict=True)
            ]
            for policy, figures in self.figures.items()
        }
        return Table(title, list(self.columns), cells)


def names() -> list[str]:
    """Return the names of all recipes."""
    files = (entry.name for entry in resources.files(_FOLDER).iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def find(name: str) -> Recipe:
    """Return the recipe of this name, read from its file in the package.

    Raises:
        InputError: there is no such recipe.
    """
    if name not in names():
        close = closest(name, names())
        hint = f" Did you mean {close!r}?" if close else ""
        raise InputError(f"There is no recipe {name!r}.{hint} Known: {', '.join(names())}.")
    found: dict[str, Any] = tomllib.loads((resources.files(_FOLDER) / f"{name}.toml").read_text(encoding="utf-8"))
    columns = found["figures"]["columns"]
    return Recipe(
        name=name,
        title=found["title"],
        source=found["source"],
        model=found["model"],
        apart=tuple(found["apart"]),
        run=found["run"],
        quick=found["quick"],
        # a list of columns names the parts themselves
        columns={key: tuple(columns[key]) if isinstance(columns, dict) else (key,) for key in columns},
        figures={policy: tuple(map(float, figures)) for policy, figures in found["figures"]["rows"].items()},
    )


def read_line(line: str) -> tuple[str, str, str | None]:
    """Return the policy, setup and budget that a line of figures names, as rows of results have them.

    A line is written as ``h2o@4bit at 20%``. A setup without differences is an empty text. A budget of ``None`` stands
    for the first one that was run.
    """
    name, _, budget = line.partition(" at ")
    (arm,) = split_arms(name)
    found = {"head-budget": arm.head_budget, "kv-bits": check_bits(arm.kv_bits)}
    setup = ",".join(f"{option}={value}" for option, value in found.items() if value is not None)
    return spec(arm.policy), setup, budget or None


def _ours(rows: Sequence[Row], line: str, parts: tuple[str, ...]) -> float | None:
    """Return a line's score in percent: the mean over some parts of each part's mean over its cases and seeds;
    ``None`` without rows.

    A line without a budget takes the budget of its first row.
    """
    wanted, setup, budget = read_line(line)
    own = [row for row in rows if row["policy"] == wanted and row.get("setup", "") == setup]
    if budget is not None:
        own = [row for row in own if row["budget"] == budget]
    elif budgets := list(dict.fromkeys(row["budget"] for row in own)):
        own = [row for row in own if row["budget"] == budgets[0]]
    scores: dict[str, list[float]] = {}
    for row in own:
        part = str(row["case"]).partition(",")[0]  # a case's name begins with its part
        if (part in parts or parts == ("*",)) and row["score"]["score"] is not None:
            scores.setdefault(part, []).append(row["score"]["score"])
    means = [sum(values) / len(values) for values in scores.values()]
    return 100 * sum(means) / len(means) if means else None


def _cell(paper: float, ours: float | None) -> str:
    """Return a cell of the comparison: the paper's figure, ours, and the difference. NaN: the paper has none."""
    if math.isnan(paper):
        return "–" if ours is None else f"– | {ours:.1f}"
    return f"{paper:.1f} | –" if ours is None else f"{paper:.1f} | {ours:.1f} | {ours - paper:+.1f}"

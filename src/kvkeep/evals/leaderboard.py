"""A page with the results of many folders: a line per model, policy and budget, a column per measure and protocol."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import InputError
from kvkeep.evals.confidence import interval_text, of_cell
from kvkeep.evals.records import ResultFolder, protocol
from kvkeep.evals.results import MEASURES, Row, ScoreMeasure, by_case, grouped, held, of_task, over, policy_label
from kvkeep.result_files import read_whole, write_whole

FILES = ("leaderboard.html", "leaderboard.md")
_MARK = "<!-- a leaderboard of kvkeep -->"
"""Begins each page; a file without it is somebody else's, and is not overwritten."""

_LOW_IS_GOOD = ("perplexity", "kl", "regret", "self_bleu")
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem;color:#1a1a1a;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}th,td{padding:.3rem "
    ".8rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}td.n,th.n{text-align:right}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}th,td{border-color:#3a3a3a}}"
)


@dataclass(frozen=True)
class Board:
    """The content of the page.

    Attributes:
        columns: titles, without the first three (model, policy, budget).
        lines: model, policy, budget, and a text per column; the best of the first measure first.
        notes: what readers have to know.
    """

    columns: list[str]
    lines: list[list[str]]
    notes: list[str]


def board(folders: Sequence[ResultFolder]) -> Board:
    """Build the leaderboard from folders whose tasks can stand in one table (`records.read`).

    It has a line for each model, policy and budget, and a column for each measure and protocol. The lines are in the
    order of the first column, the best one first.

    Raises:
        InputError: there is no row, or one line has results of different weights.
    """
    rows = [
        {**row, **{key: folder.manifest[key] for key in ("model", "weights")}}
        for folder in folders
        for row in folder.rows
    ]
    if not rows:
        raise InputError("These folders have no finished cells, so there is nothing to list.")
    columns = [
        (measure, how)
        for measure in MEASURES
        if measure.key not in ("kl", "regret")  # as in `curves.quality`, which says why
        for how in grouped(of_task(rows, measure.task), protocol)
    ]
    lines = grouped(rows, _line)
    for (model, *_), own in lines.items():
        if len({row["weights"] for row in own}) > 1:
            raise InputError(f"Two folders have other weights under the name {model!r:.80}; leave one of them out.")
    order = sorted(lines, key=lambda line: _rank(lines[line], columns))
    cases = [len(by_case(_of(rows, *column))) for column in columns]
    made = [
        [*line, *(_cell(own, *column, n) for column, n in zip(columns, cases, strict=True)), _held(own)]
        for line, own in ((line, lines[line]) for line in order)
    ]
    return Board([_title(*column) for column in columns] + ["KV memory"], made, _notes(folders, rows))


def write(page: Board, folder: Path) -> list[Path]:
    """Write the leaderboard to a folder as HTML and as Markdown, and return the paths.

    The folder is made if need be.

    Raises:
        InputError: a file cannot be written, or a file of that name is no leaderboard.
    """
    pages = {FILES[0]: _html(page), FILES[1]: _markdown(page)}
    paths = [folder / name for name in pages]
    if folder.exists() and not folder.is_dir():
        raise InputError(f"The leaderboard cannot be written to {folder}, which is no folder.")
    # both are looked at before one of them is written
    for path in paths:
        before = read_whole(path)
        if before is not None and not before.startswith(_MARK.encode()):
            raise InputError(f"{path} is no leaderboard of kvkeep and would be overwritten. Choose another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, pages.values(), strict=True):
            write_whole(path, text.encode())
    except OSError as error:
        raise InputError(f"The leaderboard cannot be written to {folder}: {error.strerror}.") from error
    return paths


def _line(row: Row) -> tuple[str, str, str]:
    """Return what a row of the table is about: model, policy and budget."""
    return str(row["model"]), policy_label(row), str(row["budget"])


def _of(rows: Sequence[Row], measure: ScoreMeasure, how: str) -> list[Row]:
    """Return the rows of a measure's task that were asked by this protocol."""
    return [row for row in of_task(rows, measure.task) if protocol(row) == how]


def _value(rows: Sequence[Row], measure: ScoreMeasure, how: str) -> float:
    """Return the mean of a measure over cases, each of which counts alike; NaN without rows."""
    means = [measure.of(own).mean for own in by_case(_of(rows, measure, how)).values()]
    return over(means).mean if means else math.nan


def _rank(rows: Sequence[Row], columns: Sequence[tuple[ScoreMeasure, str]]) -> tuple[float, ...]:
    """Return the sort key of a line: its measures, best first; a measure without a number sorts last."""
    values = [(_value(rows, *column), column[0].key in _LOW_IS_GOOD) for column in columns]
    return tuple(math.inf if math.isnan(value) else value if low else -value for value, low in values)


def _title(measure: ScoreMeasure, how: str) -> str:
    """Return the title of a column: the measure and, if it asks questions, the protocol."""
    return f"{measure.title} ({how})" if how else measure.title


def _cell(own: Sequence[Row], measure: ScoreMeasure, how: str, cases: int) -> str:
    """Return the text of a cell: the mean over cases of a measure under one protocol, with an interval if it is graded.

    A dash without rows, or if a row lacks the number.

    Args:
        own: all rows of the table's line.
        measure: the measure.
        how: the protocol.
        cases: the number of cases that any line has; a line with fewer says how many it has.
    """
    mine, value = _of(own, measure, how), _value(own, measure, how)
    if math.isnan(value):
        return "–"
    text = f"{value:#.3g}" if measure.decimals is None else f"{value:.{max(1, measure.decimals)}f}"
    text += interval_text(of_cell(mine)) if measure.graded else ""
    done = len(by_case(mine))
    return text if done == cases else f"{text}, {done} of {cases} cases"


def _held(rows: Sequence[Row]) -> str:
    """Return the KV memory that rows held, as a share of a full cache: the mean over them, in percent."""
    return f"{over([held(row) for row in rows]).mean:.0%}"


def _notes(folders: Sequence[ResultFolder], rows: Sequence[Row]) -> list[str]:
    """Return the sentences below the table: how to read it, how many cells it has, and each task's settings."""
    settings = {task: dict(found) for folder in folders for task, found in folder.manifest["tasks"].items()}
    about = [f"{task}: {', '.join(f'{k}={v}' for k, v in found.items())}" for task, found in settings.items()]
    return [
        "A number is the mean over a task's cases. In brackets: its 95 % interval from all questions together. "
        "Lines of one model share their questions, so two of them may differ clearly although intervals overlap.",
        "KV memory: bytes held, relative to a full cache. Only numbers of one protocol can be compared.",
        f"{len(folders)} folders, {len(rows)} cells. Settings: {'; '.join(about)}.",
    ]


# -- pages -------------------------------------------------------------------------------------------------------------


def _html(page: Board) -> str:
    """Return the leaderboard as an HTML page that needs no other file; all its texts are escaped."""
    # numbers begin in the third column, and stand on the right
    head = "".join(
        f"<th{' class=n' if i > 1 else ''}>{_escaped(title)}</th>"
        for i, title in enumerate(("model", "policy", "budget", *page.columns))
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{' class=n' if i > 1 else ''}>{_escaped(text)}</td>" for i, text in enumerate(line))
        + "</tr>"
        for line in page.lines
    )
    notes = "\n".join(f"<p>{_escaped(note)}</p>" for note in page.notes)
    return (
        f'{_MARK}\n<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvkeep: results</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        f"<h1>Policies at budgets</h1>\n<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>\n"
        f"{notes}\n</body></html>\n"
    )


def _markdown(page: Board) -> str:
    """Return the leaderboard as Markdown: a table, and a list of notes; all its texts are escaped."""
    titles = ["model", "policy", "budget", *page.columns]
    rule = ["---", "---", *("---:" for _ in titles[2:])]
    table = "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in (titles, rule, *page.lines))
    return (
        f"{_MARK}\n\n# Policies at budgets\n\n{table}\n\n"
        + "\n".join(f"- {_plain(note)}" for note in page.notes)
        + "\n"
    )


def _escaped(text: str) -> str:
    """Return a text for HTML."""
    return html.escape(_visible(text))


def _plain(text: str) -> str:
    """Return a text with its Markdown signs escaped, for a table."""
    return "".join(f"\\{sign}" if sign in "\\|<>`*_[]" else sign for sign in _visible(text))


def _visible(text: str) -> str:
    r"""Return a text with escapes in place of characters that do not print, such as ``\x1b``."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)

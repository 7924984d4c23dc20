"""Later questions where retention rules have it hard: facts that do not stand out, other scripts, turns, long texts.

    python bench/hard.py --output DIR [--write lab/log/quality.md]

One line for each kind of text, one column per policy: the share of the full cache's answers that stays. Where the full
cache answers less than half of the questions itself, all questions count. Resumable, like `bench/quality.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib import report
from quality import replaced, rows_of

from kvkeep.evals.confidence import Answers, answers, kept
from kvkeep.evals.results import FULL, Row

POLICIES = ("full", "reread", "leverage", "keydiff:document", "blend", "snapkv:late", "h2o", "local")
BUDGET = "10%"
ABLE = 0.5
MARKS = ("<!-- hard: begin -->", "<!-- hard: end -->")


@dataclass(frozen=True)
class Kind:
    """One kind of text, and the options of ``kvkeep eval`` that make it."""

    name: str
    title: str
    options: str = ""


KINDS = (
    Kind("prose", "16 facts in plain prose", "--context 1024"),
    Kind("facts-4", "4 facts", "--context 1024 --facts 4"),
    Kind("facts-64", "64 facts in 2 040 tokens", "--context 2040 --facts 64"),
    Kind("facts", "16 facts among other facts", "--context 1024 --documents facts"),
    Kind("list", "the same as a list", "--context 1024 --documents list"),
    Kind("dialogue", "a dialogue of speakers with the same names", "--context 1024 --documents dialogue"),
    Kind("script", "prose in Cyrillic letters", "--context 1024 --documents script"),
    Kind("table", "rows of a table", "--context 1024 --documents table"),
    Kind("code", "comments above lines of a program", "--context 1024 --documents code"),
    Kind("hops", "questions over two facts", "--context 1024 --documents hops"),
    Kind("turns", "30 turns, cut after each", "--context 1024 --prefill-chunk 34"),
    Kind("turns-later", "30 turns, each asked ten turns later", "--context 1024 --turns 30"),
    Kind(
        "long-4096",
        "4 096 tokens, slot positions, chunks of 512",
        "--context 4096 --positions slot --prefill-chunk 512",
    ),
    Kind(
        "long-8192",
        "8 192 tokens, slot positions, chunks of 512",
        "--context 8192 --positions slot --prefill-chunk 512",
    ),
)


def command(kind: Kind, output: Path, questions: int) -> list[str]:
    words = [sys.executable, "-m", "kvkeep", "eval", "--tasks", "recall", "--ask", "later", "--no-plots", "--json"]
    words += ["--policies", ",".join(POLICIES), "--budgets", BUDGET, "--limit", str(questions), "--threads", "1"]
    return [*words, *kind.options.split(), "--output", str(output / kind.name)]


def line(kind: Kind, rows: list[Row]) -> list[str]:
    """The full cache's own answers, and what each policy keeps of them."""
    full = answers(row for row in rows if row["budget"] == FULL)
    able = sum(full.values()) >= ABLE * len(full)
    against: Answers = full if able else dict.fromkeys(full, True)
    cells = [str(kept(answers([row]), against)) for row in rows if row["budget"] != FULL]
    return [kind.title, f"{sum(full.values())} of {len(full)}", *(cell if able else f"{cell}*" for cell in cells)]


def lines(output: Path) -> Iterator[list[str]]:
    for kind in KINDS:
        if len(rows := rows_of(output / kind.name)) == len(POLICIES):
            yield line(kind, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("hard-results"))
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    for kind in [] if options.collect else KINDS:
        if options.only is None or kind.name in options.only:
            subprocess.run(command(kind, options.output, options.questions), check=True, stdout=subprocess.DEVNULL)
    head = ["text", "full cache", *(f"`{policy}`" for policy in POLICIES[1:])]
    body = list(lines(options.output))
    report(f"Later questions, {BUDGET}: % of the full cache's answers that stay", head, body, {})
    if options.write:
        rows = ["| " + " | ".join(row) + " |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)]
        replaced(options.write, MARKS, "\n".join(rows))


if __name__ == "__main__":
    main()

"""Do budgets per head help? The same questions with equal heads and with a profile, or under a rule, at small budgets.

    kvkeep calibrate --seed 7 --output heads.json
    python bench/heads.py --output DIR --profile heads.json [--questions 400] [--protocols later]
    python bench/heads.py --output DIR --rule global

Runs `kvkeep eval` on the embedded model with equal heads, and with the profile or the rule. Shows what stays of the
full cache's answers, and the difference over the same questions with its 95 % interval. The same command goes on where
it stopped. `--collect` runs nothing and shows what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lib import report
from quality import rows_of

from kvkeep import parse
from kvkeep.evals.confidence import Answers, PolicyDifference, answers, difference, kept
from kvkeep.evals.forward import Setup
from kvkeep.evals.results import FULL, Row, grouped
from kvkeep.models.load import find
from kvkeep.models.tiny import embedded

CELLS = {
    "later": (("reread", "leverage", "keydiff:document", "blend"), ("5%", "10%", "20%")),
    "inside": (("snapkv:window=12,kernel=21", "snapkv:late", "blend"), ("4%", "10%", "20%")),
}
"""Protocol → policies and budgets."""

COLUMNS = ["policy", "case", "budget", "equal heads", "divided", "difference", "questions"]


def held(output: Path, profile: Path) -> Path:
    """A copy of the profile that is named by its content, so that results never mix two profiles."""
    if not profile.is_file():
        raise SystemExit(f"There is no profile {profile}; kvkeep calibrate makes one.")
    content = profile.read_bytes()
    copy = output / f"heads-{hashlib.sha256(content).hexdigest()[:8]}.json"
    output.mkdir(parents=True, exist_ok=True)
    if not copy.exists():
        shutil.copyfile(profile, copy)
    return copy


def named(rule: str) -> str:
    """How results of the embedded model under a rule or profile are named."""
    return Setup(head_budget=rule).differences(find(embedded()), parse("h2o"))


def command(output: Path, protocol: str, policies: str, budgets: str, options: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "kvkeep", "eval", "--tasks", "recall", "--no-plots", "--json", "--threads", "1"]
    words += ["--policies", f"full,{policies}", "--budgets", budgets, "--ask", protocol]
    words += ["--context", str(options.context), "--limit", str(options.questions), "--seed", str(options.seed)]
    return [*words, "--output", str(output / protocol)]


def found(output: Path, rule: str) -> Iterator[tuple[list[str], PolicyDifference]]:
    """A line, and the difference in it, for each cell that was measured both ways."""
    for protocol in CELLS:
        for case, rows in grouped(rows_of(output / protocol), lambda row: str(row["case"])).items():
            yield from _of_case(f"{protocol} {case.partition(',')[0].removeprefix('context=')}", rows, rule)


def _of_case(name: str, rows: list[Row], rule: str) -> Iterator[tuple[list[str], PolicyDifference]]:
    full = answers(row for row in rows if row["budget"] == FULL)
    for (policy, budget), part in grouped(rows, lambda row: (str(row["policy"]), str(row["budget"]))).items():
        ways: dict[str, Answers] = {setup: answers(some) for setup, some in grouped(part, _setup).items()}
        if budget == FULL or not ways.keys() >= {"", rule}:
            continue
        change = difference(ways[rule], ways[""], full)
        shown = "{:+.0f} ({:+.0f} to {:+.0f})".format(change.points, *change.interval)
        both = [str(kept(ways[way], full)) for way in ("", rule)]
        yield [policy, name, budget, *both, shown, str(change.n)], change


def _setup(row: Row) -> str:
    return str(row.get("setup", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--profile", type=Path, help="a profile of the embedded model's heads")
    ways.add_argument("--rule", help="a rule for --head-budget, such as global or ada:0.2")
    parser.add_argument("--questions", type=int, default=400, help="questions per cell")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--protocols", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--policies", help="in place of each protocol's own, as for kvkeep eval")
    parser.add_argument("--budgets", help="in place of each protocol's own")
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    options = parser.parse_args()
    rule = options.rule or f"profile:{held(options.output, options.profile).resolve()}"
    for protocol in [] if options.collect else options.protocols:
        policies, budgets = options.policies or ",".join(CELLS[protocol][0]), options.budgets or CELLS[protocol][1]
        numbers = budgets if isinstance(budgets, str) else ",".join(budgets)
        for more in ([], ["--head-budget", rule]):
            words = command(options.output, protocol, policies, numbers, options)
            subprocess.run([*words, *more], check=True, stdout=subprocess.DEVNULL)
    cells = list(found(options.output, named(rule)))
    better = sum(change.clear and change.points > 0 for _, change in cells)
    worse = sum(change.clear and change.points < 0 for _, change in cells)
    numbers = {"cells": len(cells), "clearly_better": better, "clearly_worse": worse}
    report("budgets per head against equal heads", COLUMNS, [line for line, _ in cells], numbers)


if __name__ == "__main__":
    main()

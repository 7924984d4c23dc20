"""Quality of policies in slots of 16, 8 and 4 bits, at equal budgets and at equal bytes.

    python bench/bits.py --output DIR [--write lab/log/quantized.md]
    python bench/bits.py --output DIR --look          # minutes: few questions, few windows

Runs `kvkeep eval` on the embedded model, in the kind of H2O's Table 6 (20 % of the tokens) and Scissorhands' Table 4
(50 %): recall of questions inside the text, in the model's dtype, and perplexity in float32, where a tenth of a
percent is not lost among roundings. The same command goes on where it stopped; `--collect` runs nothing and shows
what there is. "The same bytes" are 20 % of the tokens in the model's dtype, 40 % in 8 bits, 50 % with keys in 8 bits
and values in 4, and 75 % in 4 bits; perplexity is measured with as many tokens. `--write` replaces the tables between
the marks in pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import report

from kvkeep.evals.confidence import Answers, answers, difference, kept
from kvkeep.result_files import ROWS

POLICIES = ("h2o", "snapkv")
BITS = ("16", "8", "k8v4", "4")
SPLIT = {"16": "20%", "8": "40%", "k8v4": "50%", "4": "75%"}
"""Bits → the share of a text's tokens, about the same bytes each in bfloat16."""

PAPERS = {"h2o": ("H2O, Table 6", "20%"), "scissorhands": ("Scissorhands, Table 4", "50%")}
"""Policy → the table that its paper has, and the share of a text's tokens there."""

CONTEXT = 1024
CASE = f"context={CONTEXT}"
MARKS = ("bits", "bits in short")
"""The names of the places in pages: all tables, and the papers' settings with the same bytes of recall."""


@dataclass(frozen=True)
class Step:
    """One call of ``kvkeep eval``."""

    folder: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    options: tuple[str, ...]

    def command(self, output: Path) -> list[str]:
        words = [sys.executable, "-m", "kvkeep", "eval", "--no-plots", "--json", "--threads", "1", *self.options]
        lists = ["--policies", ",".join(self.policies), "--budgets", ",".join(self.budgets)]
        return [*words, *lists, "--output", str(output / self.folder)]


def steps(questions: int, windows: int) -> Iterator[Step]:
    """Every policy with all bits at one budget, the same bytes spent in four ways, and the papers' settings."""
    asked = ("--tasks", "recall", "--ask", "inside", "--context", str(CONTEXT), "--limit", str(questions))
    loss = ("--tasks", "perplexity", "--limit", str(windows), "--dtype", "float32")
    whole = ("full", *(f"full@{bits}" for bits in BITS if bits != "16"))
    first = (*whole, *(f"{policy}@{bits}" for policy in POLICIES for bits in BITS))
    for folder, options, budgets in (("perplexity", loss, ("20%", "60%", "100%")), ("inside", asked, ("20%",))):
        yield Step(folder, first, budgets, options)
        for bits in BITS[1:]:
            yield Step(folder, tuple(f"{policy}@{bits}" for policy in POLICIES), (SPLIT[bits],), options)
        yield Step(folder, tuple(f"scissorhands@{bits}" for bits in BITS), (PAPERS["scissorhands"][1],), options)


# -- tables ------------------------------------------------------------------------------------------------------------


Cells = dict[tuple[str, str, str], list[dict[str, Any]]]
"""Policy, bits and budget → rows of results."""


def read(folder: Path, task: str, case: Callable[[str], bool]) -> Cells:
    path, found = folder / ROWS, {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        bits = str(row.get("setup", "")).removeprefix("kv-bits=") or "16"
        if row["task"] == task and case(str(row["case"])) and bits in BITS:
            found.setdefault((row["policy"], bits, str(row["budget"])), []).append(row)
    return found


def table(found: Cells, shown: Callable[[str, str, str], str]) -> list[list[str]]:
    """A line for each policy and bits, a cell for each budget."""
    columns, body = budgets_of(found), []
    for policy in dict.fromkeys(policy for policy, _, _ in found):
        for bits in BITS:
            line = [shown(policy, bits, one) if (policy, bits, one) in found else "" for one in columns]
            body += [[f"`{policy}`", bits, *line]] if any(line) else []
    return body


def budgets_of(found: Cells) -> list[str]:
    """The budgets that were measured, the smallest first."""
    return sorted({budget for _, _, budget in found}, key=lambda one: float(one.rstrip("%")))


def of_split(found: Cells, shown: Callable[[str, str, str], str]) -> list[list[str]]:
    """A line for each policy, a cell for each way to spend the same bytes."""
    policies = [policy for policy, bits, share in found if (bits, share) == ("8", SPLIT["8"])]
    return [[f"`{p}`", *(shown(p, *one) if (p, *one) in found else "" for one in SPLIT.items())] for p in policies]


def recall(found: Cells) -> Callable[[str, str, str], str]:
    """The share of the full cache's answers that stays; a star where it differs clearly from the model's dtype."""
    full: Answers = answers(found.get(("full", "16", "100%"), []))

    def shown(policy: str, bits: str, budget: str) -> str:
        own, plain = (answers(found.get((policy, one, budget), [])) for one in (bits, "16"))
        clear = bits != "16" and bool(plain) and difference(own, plain, full).clear
        return f"{kept(own, full)}{'*' * clear}"

    return shown


def perplexity(found: Cells) -> Callable[[str, str, str], str]:
    """The perplexity, and how much it is above that in the model's dtype."""

    def shown(policy: str, bits: str, budget: str) -> str:
        own, plain = (found.get((policy, one, budget)) for one in (bits, "16"))
        value = own[0]["score"]["perplexity"] if own else float("nan")
        more = 100 * (value / plain[0]["score"]["perplexity"] - 1) if plain and bits != "16" else None
        if more is None:
            return f"{value:.2f}"
        return f"{value:.2f} ({more:+.1f} %)" if abs(more) >= 0.05 else f"{value:.2f} (0.0 %)"

    return shown


Table = tuple[str, list[str], list[list[str]]]
"""Title, head and lines."""


def measured(output: Path) -> tuple[Cells, Cells]:
    """The cells of perplexity, and those of recall."""
    return read(output / "perplexity", "perplexity", lambda case: True), read(output / "inside", "recall", CASE.__eq__)


def tables(output: Path) -> Iterator[Table]:
    """Every table for which there are results."""
    losses, recalls = measured(output)
    asked = len(answers(recalls.get(("full", "16", "100%"), [])))
    title = f"recall, inside, {CONTEXT} tokens, {asked} questions: % of the full cache's answers that stay"
    # computed in float32, slots of "16 bits" have 32, but the number of tokens is what the bytes hold in bfloat16
    loss = "perplexity, float32", "tokens that take the same bytes beside bfloat16", losses, perplexity
    for name, same, found, shown in (loss, (title, "the same bytes", recalls, recall)):
        if body := table(found, shown(found)):
            yield name, ["policy", "bits", *budgets_of(found)], body
        if body := of_split(found, shown(found)):
            yield f"{same}; {name}", ["policy", *(f"{share} at {bits}" for bits, share in SPLIT.items())], body


def in_short(output: Path) -> Iterator[Table]:
    """The papers' settings with every number of bits, and what the same bytes keep."""
    losses, recalls = measured(output)
    shown, body = (perplexity(losses), recall(recalls)), []
    for policy, (name, share) in PAPERS.items():
        for bits in BITS:
            cells = [
                one(policy, bits, share) if (policy, bits, share) in found else ""
                for one, found in zip(shown, (losses, recalls), strict=True)
            ]
            body += [[name, f"`{policy}`", share, bits, *cells]] if any(cells) else []
    if body:
        head = ["of the kind of", "policy", "budget", "bits", "perplexity", "answers that stay, %"]
        yield "the papers' settings in kind", head, body
    yield from (one for one in tables(output) if one[0].startswith("the same bytes; recall"))


def markdown(title: str, head: list[str], body: list[list[str]]) -> str:
    rules = ["---" if name in ("of the kind of", "policy", "bits") else "---:" for name in head]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))
    return f"**{title[0].upper()}{title[1:]}**\n\n{lines}"


def write(page: Path, found: dict[str, list[Table]]) -> None:
    """Put tables between the marks of a page, which has those of at least one name."""
    text, written = page.read_text(encoding="utf-8"), 0
    for name, these in found.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text and end in text:
            before, _, rest = text.partition(begin)
            body = "\n\n".join(markdown(*one) for one in these)
            text, written = f"{before}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}", written + 1
    if not written:
        raise SystemExit(f"{page} has no marks for tables: <!-- NAME: begin -->, NAME one of {', '.join(found)}")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("bits-results"))
    parser.add_argument("--questions", type=int, default=400, help="questions per cell")
    parser.add_argument("--windows", type=int, default=40, help="windows of 1024 tokens for perplexity")
    parser.add_argument("--look", action="store_true", help="16 questions and 4 windows")
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    parser.add_argument("--write", type=Path, nargs="+", default=[], help="pages whose tables are replaced")
    options = parser.parse_args()
    planned = steps(16, 4) if options.look else steps(options.questions, options.windows)
    for step in () if options.collect else planned:
        subprocess.run(step.command(options.output), check=True, stdout=subprocess.DEVNULL)
    found = dict(zip(MARKS, (list(tables(options.output)), list(in_short(options.output))), strict=True))
    for title, head, body in (one for these in found.values() for one in these):
        report(title, head, body, {})
    for page in options.write:
        write(page, found)


if __name__ == "__main__":
    main()

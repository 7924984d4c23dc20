"""Quality of policies in slots of 16, 8 and 4 bits, at equal budgets and at equal bytes.

    python bench/bits.py --output DIR [--write docs/quantised.md]
    python bench/bits.py --output DIR --papers        # an hour: the budgets of the papers' tables and the same bytes
    python bench/bits.py --output DIR --look          # minutes: few questions, one length

Runs `kvkeep eval` on the embedded model, in the kind of H2O's Table 6 and Scissorhands' Table 4: recall of questions
inside the text and asked later, and perplexity. The same command goes on where it stopped; `--collect` runs nothing and
shows what is there. "At equal bytes" compares 20 % of the tokens in the model's dtype, 40 % in 8 bits and 75 % in 4
bits. `--write` replaces the tables between the marks in a page.
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

from kvkeep.evals.paired import Answers, answers, difference, kept
from kvkeep.evals.records import ROWS

POLICIES = ("h2o", "snapkv", "snapkv:late", "streaming_llm")
BITS = ("16", "8", "k8v4", "4")
BUDGETS = ("5%", "10%", "20%", "60%")
SPLIT = {"16": "20%", "8": "40%", "4": "75%"}
"""Bits → the share of a text's tokens, about the same bytes each in bfloat16."""

CONTEXTS = (1024, 2040)
PROTOCOLS = {"inside": "", "later": ",ask=later"}
"""Protocol → the end of its cases' names."""

MARKS = ("<!-- bits: begin -->", "<!-- bits: end -->")


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


def cells() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Policies with their bits, and the budgets at which these are measured."""
    whole = tuple(f"full@{bits}" for bits in BITS if bits != "16")
    yield ("full", *whole, *(f"{policy}@{bits}" for policy in POLICIES for bits in BITS)), BUDGETS
    for bits, share in SPLIT.items():
        yield tuple(f"{policy}@{bits}" for policy in POLICIES), (share,)


def steps(questions: int, *, contexts: tuple[int, ...], tokens: int) -> Iterator[Step]:
    for policies, budgets in cells():
        yield Step("perplexity", policies, budgets, ("--tasks", "perplexity", "--limit", str(tokens)))
        for context in contexts:
            for protocol in PROTOCOLS:
                options = ("--tasks", "recall", "--ask", protocol, "--context", str(context), "--limit", str(questions))
                yield Step(protocol, policies, budgets, options)


def of_papers(questions: int) -> Iterator[Step]:
    """H2O at 20 %, Scissorhands at 50 %, `snapkv` beside them, and the same bytes spent in three ways."""
    asked = ("--tasks", "recall", "--ask", "inside", "--context", str(CONTEXTS[0]), "--limit", str(questions))
    read = ("--tasks", "perplexity", "--limit", "8")
    rest = [(("h2o@8", "snapkv@8"), ("40%",)), (("h2o@4", "snapkv@4"), ("75%",))]
    rest.append((("scissorhands@16", "scissorhands@4"), ("50%",)))
    for folder, options, bits, budgets in (
        ("perplexity", read, BITS, ("20%", "60%")),
        ("inside", asked, ("16", "8", "4"), ("20%",)),
    ):
        whole = ["full", *(f"full@{one}" for one in bits if one != "16" and folder == "perplexity")]
        first = [*whole, *(f"{policy}@{one}" for policy in ("h2o", "snapkv") for one in bits)]
        for policies, shares in [(tuple(first), budgets), *rest]:
            yield Step(folder, policies, shares, options)


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


def tables(output: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, head and lines of every table for which there are results."""
    kinds = [("perplexity", read(output / "perplexity", "perplexity", lambda case: True), perplexity)]
    for protocol, end in PROTOCOLS.items():
        for context in CONTEXTS:
            found = read(output / protocol, "recall", f"context={context}{end}".__eq__)
            asked = len(answers(found.get(("full", "16", "100%"), [])))
            title = f"recall, {protocol}, {context} tokens, {asked} questions: % of the full cache's answers that stay"
            kinds.append((title, found, recall))
    for title, found, shown in kinds:
        if body := table(found, shown(found)):
            yield title, ["policy", "bits", *budgets_of(found)], body
        if body := of_split(found, shown(found)):
            head = ["policy", *(f"{share} at {bits}" for bits, share in SPLIT.items())]
            yield f"the same bytes; {title}", head, body


def markdown(title: str, head: list[str], body: list[list[str]]) -> str:
    rules = ["---" if name in ("policy", "bits") else "---:" for name in head]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))
    return f"**{title[0].upper()}{title[1:]}**\n\n{lines}"


def replaced(page: Path, written: str) -> None:
    """Put a text between two marks of a page."""
    text = page.read_text(encoding="utf-8")
    if not all(mark in text for mark in MARKS):
        raise SystemExit(f"{page} has no marks for tables: {' and '.join(MARKS)}")
    before, _, rest = text.partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{written}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("bits-results"))
    parser.add_argument("--questions", type=int, default=400, help="questions per cell")
    parser.add_argument("--limit", type=int, default=32, help="windows of 1024 tokens for perplexity")
    parser.add_argument("--papers", action="store_true", help="the budgets of the papers' tables, and the same bytes")
    parser.add_argument("--look", action="store_true", help="few questions, one length")
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    parser.add_argument("--write", type=Path, help="a page whose tables are replaced")
    options = parser.parse_args()
    few = {"contexts": CONTEXTS[:1], "tokens": 4} if options.look else {"contexts": CONTEXTS, "tokens": options.limit}
    planned = of_papers(options.questions) if options.papers else None
    planned = planned or steps(16 if options.look else options.questions, **few)
    for step in [] if options.collect else planned:
        subprocess.run(step.command(options.output), check=True, stdout=subprocess.DEVNULL)
    found = list(tables(options.output))
    for title, head, body in found:
        report(title, head, body, {})
    if options.write:
        replaced(options.write, "\n\n".join(markdown(*one) for one in found))


if __name__ == "__main__":
    main()

"""What every policy keeps of the full cache's answers, for questions inside the text and for later ones.

    kvkeep calibrate --seed 7 --output heads.json
    python bench/quality.py --output DIR --text NOVEL --profile heads.json [--write lab/log/quality.md]
    python bench/quality.py --output DIR --look          # minutes: few questions, one length

Runs `kvkeep eval` on the embedded model, the most important cells first. The same command goes on where it stopped.
`--groups rest` runs the policies with fewer questions alone.
`--text` adds the loss on the 64 tokens that follow a text of 1 024 tokens after its cut, and `--profile` the rules for
later questions under head budgets. `--collect` runs nothing and shows what is there. `--write` replaces the tables
between the marks in a page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import report

from kvkeep.evals.confidence import Answers, KeptShare, answers, difference, kept, of_mean
from kvkeep.evals.results import FULL, Row, grouped, over
from kvkeep.policies import DEFAULT, LATER
from kvkeep.result_files import ROWS

MAIN = (
    "full",
    "blend",
    "snapkv:late",
    "leverage",
    DEFAULT,
    "keydiff:document",
    LATER,
    "h2o",
    "local",
    "snapkv",
    "adakv",
    "tova",
    "expected_attention",
    "reread",
)
"""The policies with most questions; `reread` is last, since it takes longest."""

REST = (
    "full",
    "streaming_llm",
    "random",
    "h2o_avg",
    "scissorhands",
    "ahakv",
    "topk",
    "pyramidkv",
    "nacl",
    "restkv",
    "defensivekv",
    "rkv",
    "triattention",
    "vase",
    "keyformer",
    "spatten",
    "sparse_fixed",
    "sparse_strided",
    "knorm",
    "keydiff",
)
HEADS = ("reread", "leverage", "keydiff:document", "blend")
"""The policies that are measured under head budgets, too."""

CONTEXTS = (1024, 2040)
"""Tokens of the prompts. With a reply of 8 tokens the longer ones are as long as the model was trained for."""

BUDGETS = ("4%", "5%", "10%", "20%", "60%")
TEXTS = 64
"""Texts whose next tokens are measured."""

PROTOCOLS = {"inside": "", "later": ",ask=later"}
"""Protocol → the end of its cases' names."""

MARKS = ("<!-- quality: begin -->", "<!-- quality: end -->")
MARKS_OF_REST = ("<!-- quality of the rest: begin -->", "<!-- quality of the rest: end -->")
GROUPS = ("main", "heads", "rest")


@dataclass(frozen=True)
class Step:
    """One call of ``kvkeep eval``."""

    group: str
    policies: Sequence[str]
    budgets: Sequence[str]
    protocol: str
    questions: int
    context: int
    options: Sequence[str] = ()

    def command(self, output: Path) -> list[str]:
        words = [sys.executable, "-m", "kvkeep", "eval", "--tasks", "recall", "--no-plots", "--json", "--threads", "1"]
        words += ["--policies", ",".join(self.policies), "--budgets", ",".join(self.budgets), "--ask", self.protocol]
        words += ["--context", str(self.context), "--limit", str(self.questions)]
        return [*words, *self.options, "--output", str(folder(output, self.group, self.protocol))]


def folder(output: Path, group: str, protocol: str) -> Path:
    """Each protocol has folders of its own, so that two processes can share the work."""
    return output / f"{group}-{protocol}"


def steps(protocols: Sequence[str], main: int, rest: int) -> list[Step]:
    """All steps, the most important ones first.

    A question inside its text costs a reading, and a later one does not, so some cells of the former have fewer.
    """
    found = []
    for protocol, (few, others) in {"later": (BUDGETS, ()), "inside": (("10%", "4%"), ("20%", "60%"))}.items():
        if protocol in protocols:
            found += [Step("main", MAIN, few, protocol, main, context) for context in CONTEXTS]
            found += [Step("rest", MAIN, others, protocol, rest, context) for context in CONTEXTS if others]
            found += [Step("rest", REST, ("10%", "4%", "20%", "60%"), protocol, rest, context) for context in CONTEXTS]
    return found


def profiled(profile: Path, main: int) -> list[Step]:
    """The rules of later questions under head budgets from a profile."""
    options = ("--head-budget", f"profile:{profile}")
    return [
        Step("heads", ("full", *HEADS), ("4%", "5%", "10%", "20%"), protocol, main, context, options)
        for protocol in PROTOCOLS
        for context in CONTEXTS
    ]


def look() -> list[Step]:
    return [Step("main", MAIN, ("10%",), protocol, 24, 1024) for protocol in PROTOCOLS]


def continuation(output: Path, text: Path) -> list[str]:
    """The command that measures the tokens after a cut."""
    words = [
        sys.executable,
        "-m",
        "kvkeep",
        "eval",
        "--tasks",
        "continuation",
        "--no-plots",
        "--json",
        "--threads",
        "1",
    ]
    words += ["--policies", ",".join(MAIN), "--budgets", "10%,20%", "--text", str(text), "--limit", str(TEXTS)]
    return [*words, "--output", str(output / "continuation")]


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The answers of one folder to the questions of one case: policy → budget → answers."""

    cells: dict[str, dict[str, Answers]]

    @property
    def full(self) -> Answers:
        return self.cells.get("full", {}).get(FULL, {})

    def kept(self, policy: str, budget: str) -> KeptShare | None:
        own = self.cells[policy].get(budget)
        return None if own is None or not self.full else kept(own, self.full)

    def best(self, budget: str) -> str | None:
        """The policy that keeps most."""
        shares = {policy: found.share for policy in self.cells if (found := self.kept(policy, budget))}
        return max(shares, key=lambda policy: shares[policy], default=None)

    def is_clearly_worse(self, policy: str, budget: str) -> bool:
        """Whether the best policy answers clearly more of the same questions."""
        best = self.best(budget)
        assert best is not None
        lines = self.cells
        return best != policy and difference(lines[best][budget], lines[policy][budget], self.full).clear


def rows_of(folder: Path) -> list[Row]:
    path = folder / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def part(rows: list[Row], case: str) -> Part:
    rows = [row for row in rows if row["task"] == "recall" and row["case"] == case]
    return Part(
        {
            policy: {budget: answers(cell) for budget, cell in grouped(group, lambda row: str(row["budget"])).items()}
            for policy, group in grouped(rows, named).items()
            if policy
        }
    )


def named(row: Row) -> str | None:
    """The policy, and whether a profile gave its heads their budgets; ``None`` under any other setup."""
    setup = str(row.get("setup", ""))
    if setup.startswith("head-budget=profile") and "," not in setup:
        return f"{row['policy']} with a profile of heads"
    return None if setup else str(row["policy"])


def lines(found: Part) -> Iterator[list[str]]:
    """One line per policy; the policies that are not clearly worse than the best of the column are bold."""
    for policy in found.cells:
        cells = ["`{}`{}{}".format(*policy.partition(" "))]
        for budget in BUDGETS:
            one = found.kept(policy, budget) if policy != "full" else None
            text = "" if one is None else str(one)
            bold = one is not None and one.share > 0 and not found.is_clearly_worse(policy, budget)
            cells.append(f"**{text}**" if bold and text else text)
        if policy != "full":
            yield cells


def titled(found: Part, protocol: str, context: int) -> str:
    n, able = len(found.full), sum(found.full.values())
    texts = len({question[:2] for question in found.full})
    return f"{protocol}, {context} tokens: {able} of {n} questions about {texts} texts are answered by the full cache"


def tables(output: Path, groups: Sequence[str] = GROUPS) -> dict[str, list[list[str]]]:
    """Title → lines, for every protocol, length and group of policies."""
    parts: dict[str, Part] = {}
    for protocol, end in PROTOCOLS.items():
        for context in CONTEXTS:
            for group in groups:
                one = part(rows_of(folder(output, group, protocol)), f"context={context}{end}")
                if one.full and len(one.cells) > 1:
                    title = titled(one, protocol, context)
                    before = parts.get(title, Part({})).cells  # groups with as many questions share a table
                    parts[title] = Part({**before, **one.cells})
    return {title: list(lines(one)) for title, one in parts.items()}


def losses(output: Path) -> tuple[str, list[list[str]]]:
    """Title and lines: the loss after the cut above the full cache's, text by text, in nats per token."""
    rows = {(row["policy"], row["budget"]): row["score"]["nll_by_text"] for row in rows_of(output / "continuation")}
    full = rows.get(("full", FULL), [])
    found: dict[str, list[str]] = {}
    for (policy, budget), own in rows.items():
        if policy != "full":
            gap = over([one - other for one, other in zip(own, full, strict=True)])
            low, high = of_mean(gap)
            cells = found.setdefault(policy, [f"`{policy}`", *[""] * len(BUDGETS)])
            cells[1 + BUDGETS.index(budget)] = f"{gap.mean:.3f} ({low:.3f}–{high:.3f})"
    return f"64 tokens after the cut, nats per token above the full cache, {len(full)} texts", list(found.values())


def markdown(title: str, body: list[list[str]]) -> str:
    used = [0, *(i for i, _ in enumerate(BUDGETS, 1) if any(line[i] for line in body))]
    head = ["policy", *BUDGETS]
    picked = [[line[i] for i in used] for line in (head, ["---", *["---:"] * len(BUDGETS)], *body)]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in picked)


def replaced(page: Path, marks: tuple[str, str], written: str) -> None:
    """Put a text between two marks of a page."""
    text = page.read_text(encoding="utf-8")
    if not all(mark in text for mark in marks):
        raise SystemExit(f"{page} has no marks for tables: {' and '.join(marks)}")
    before, _, rest = text.partition(marks[0])
    after = rest.partition(marks[1])[2]
    page.write_text(f"{before}{marks[0]}\n\n{written}\n\n{marks[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("quality-results"))
    parser.add_argument("--questions", type=int, default=400, help="questions per cell of the main policies")
    parser.add_argument("--rest", type=int, default=128, help="questions per cell of the other policies")
    parser.add_argument("--text", type=Path, help="a novel, for the loss after the cut")
    parser.add_argument("--profile", type=Path, help="a profile of the model's heads, from kvkeep calibrate")
    parser.add_argument("--only-profile", action="store_true", help="nothing but the rules under this profile")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="groups of policies that are run")
    parser.add_argument("--protocols", nargs="+", choices=list(PROTOCOLS), default=["later", "inside"])
    parser.add_argument("--look", action="store_true", help="few questions, one length, one budget")
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    parser.add_argument("--write", type=Path, help="a page whose tables are replaced")
    options = parser.parse_args()
    todo = look() if options.look else steps(options.protocols, options.questions, options.rest)
    todo = [step for step in todo if step.group in options.groups]
    if options.profile:
        found = [step for step in profiled(options.profile, options.questions) if step.protocol in options.protocols]
        todo = found if options.only_profile else [*todo, *found]
    for step in [] if options.collect else todo:
        subprocess.run(step.command(options.output), check=True, stdout=subprocess.DEVNULL)
    if options.text and not options.collect:
        command = continuation(options.output, options.text)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = tables(options.output)
    title, body = losses(options.output)
    after = {title: body} if body else {}
    found |= after
    for title, body in found.items():
        report(title, ["policy", *BUDGETS], body, {})
    for marks, groups in {MARKS: ("main", "heads"), MARKS_OF_REST: ("rest",)}.items():
        own = tables(options.output, groups) | (after if marks is MARKS else {})
        if options.write and own:
            replaced(options.write, marks, "\n\n".join(markdown(name, lines) for name, lines in own.items()))


if __name__ == "__main__":
    main()

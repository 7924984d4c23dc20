"""Recall and perplexity of every policy at every budget on the embedded model, over several seeds, with their spread.

    python bench/quality.py --full --text NOVEL --output DIR [--write docs/choose-a-policy.md]

Runs `kvkeep eval` for all seeds (resumable: start the same command again) and puts the results together. Without --full
it is a short look: one seed, few questions. --write replaces the tables between the marks in a page.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lib import report

from kvkeep.evals.records import ROWS
from kvkeep.evals.report import FULL, Row, by_budget, by_name, of_task, over

POLICIES = (
    "full",
    "local",
    "streaming_llm",
    "random",
    "h2o",
    "h2o_avg",
    "scissorhands",
    "ahakv",
    "ahakv:sinks=4",
    "ahakv:recent_accumulation=false",
    "ahakv:sg_softmax=false",
    "ahakv:value_prior=false",
    "tova",
    "topk",
    "snapkv",
    "pyramidkv",
    "adakv",
    "nacl",
    "keyformer",
    "spatten",
    "sparse_fixed",
    "sparse_strided",
    "knorm",
    "keydiff",
)
BUDGETS = "4%,10%,20%,60%"
LOOK = 6
SHOWN = {"recall": (100.0, 0), "middle": (100.0, 0), "rise": (100.0, 1), "early": (100.0, 0)}
MARKS = ("<!-- quality: begin -->", "<!-- quality: end -->")


def evaluate(options: argparse.Namespace) -> list[Row]:
    """The rows of all seeds, run or read; those of other setups and later questions are left aside."""
    command = [sys.executable, "-m", "kvkeep", "eval", "--policies", ",".join(POLICIES), "--budgets", BUDGETS]
    command += ["--tasks", "recall,perplexity", "--context", str(options.context), "--no-plots", "--json"]
    command += ["--seed", ",".join(map(str, options.seeds)), "--output", str(options.output)]
    if options.text:
        command += ["--text", str(options.text)]
    if options.limit:
        command += ["--limit", str(options.limit)]
    if not options.collect:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (options.output / ROWS).read_text().splitlines())
    return [row for row in rows if not row.get("setup") and "ask=" not in row["case"]]


def accuracy(row: Row) -> float:
    return row["score"]["accuracy"]


def middle(row: Row) -> float:
    """The same of questions whose fact stands in the middle six tenths of the text."""
    right, asked = map(sum, zip(*row["score"]["by_depth"][2:8], strict=True))
    return right / asked if asked else math.nan


def early(row: Row) -> float:
    """Share of the kept tokens from the first half of the prompt."""
    return sum(row["score"]["kept"][:5])


def full_perplexities(windows: list[Row]) -> dict[int, float]:
    """Of the full cache, for each seed."""
    return {row["seed"]: row["score"]["perplexity"] for row in windows if row["policy"] == "full"}


def collect(rows: list[Row], number: Callable[[Row], float]) -> dict[str, dict[str, list[float]]]:
    """Policy → budget → the number under each seed."""
    return {
        policy: {budget: [*map(number, part)] for budget, part in by_budget(group).items()}
        for policy, group in by_name(rows).items()
    }


def cell(values: list[float] | None, scale: float, digits: int) -> str:
    """Mean over seeds, and half of the distance between the lowest and the highest."""
    if not values:
        return ""
    found = over(values)
    return f"{found.mean * scale:.{digits}f}" + (f" ± {found.half * scale:.{digits}f}" if found.n > 1 else "")


def table(found: dict[str, dict[str, list[float]]], scale: float, digits: int) -> list[list[str]]:
    """One line per policy, one column per budget; the full cache is the same in all."""
    return [
        [f"`{policy}`", *(cell(line.get(FULL) or line.get(budget), scale, digits) for budget in BUDGETS.split(","))]
        for policy, line in found.items()
    ]


def markdown(title: str, lines: list[list[str]]) -> str:
    head = ["policy", *BUDGETS.split(",")]
    body = ["| " + " | ".join(line) + " |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *lines)]
    return f"**{title}**\n\n" + "\n".join(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="three seeds and all questions")
    parser.add_argument("--limit", type=int, help="questions and windows per seed, under --full")
    parser.add_argument("--context", type=int, default=1024, help="length of recall prompts")
    parser.add_argument("--text", type=Path, help="UTF-8 text for perplexity; the package's own sentences if not given")
    parser.add_argument("--output", type=Path, default=Path("quality-results"))
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 under --full, else 0")
    parser.add_argument("--collect", action="store_true", help="run nothing, put together what is there")
    parser.add_argument("--write", type=Path, help="a page whose tables are replaced")
    options = parser.parse_args()
    options.seeds = options.seeds or ([0, 1, 2] if options.full else [0])
    options.limit = options.limit if options.full else LOOK
    rows = evaluate(options)
    recalls, windows = of_task(rows, "recall"), of_task(rows, "perplexity")
    full = full_perplexities(windows)
    data = {
        "recall": collect(recalls, accuracy),
        "middle": collect(recalls, middle),
        # seeds read other windows, which differ by more than policies do: so every seed is compared with itself
        "rise": collect(windows, lambda row: row["score"]["perplexity"] / full[row["seed"]] - 1),
        "early": collect(recalls, early),
    }
    tables = {name: table(found, *SHOWN[name]) for name, found in data.items()}
    columns = ["policy", *BUDGETS.split(",")]
    report("Recall, % right", columns, tables["recall"], {})
    report("Recall of facts in the middle six tenths of the text, % right", columns, tables["middle"], {})
    report("Kept tokens from the first half of the prompt, %", columns, tables["early"], {})
    title = f"Perplexity above the full cache's, % (which has {', '.join(f'{found:.1f}' for found in full.values())})"
    report(
        title, columns, tables["rise"], {"bench": "quality", "seeds": options.seeds, "full_perplexity": full, **data}
    )
    if options.write:
        titles = {
            "recall": f"Recall in percent, {recalls[0]['rows']} questions per seed, prompts of {options.context} "
            f"tokens, mean ± half range over {len(options.seeds)} seeds",
            "middle": "The same of facts in the middle six tenths of the text, in percent",
            "early": "Share of the kept tokens that stand in the first half of the prompt, in percent",
            "rise": f"{title}, windows of {round(windows[0]['text_tokens'])} tokens".replace("%", "in percent"),
        }
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        written = "\n\n".join(markdown(title, tables[name]) for name, title in titles.items())
        options.write.write_text(f"{before}{MARKS[0]}\n\n{written}\n\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

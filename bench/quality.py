"""Recall and perplexity of every policy at every budget on the embedded model, over several seeds, with their spread.

    python bench/quality.py --full --text NOVEL --output DIR [--write docs/choose-a-policy.md]

Runs `kvkeep eval` once for each seed (resumable: start the same command again), then puts the results together. Without
--full it is a short look: one seed, few questions. --write replaces the tables between the marks in a page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from lib import report

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
MARKS = ("<!-- quality: begin -->", "<!-- quality: end -->")


def evaluate(seed: int, options: argparse.Namespace) -> list[dict]:
    """The rows of one seed, run or read."""
    folder = options.output / f"seed-{seed}"
    command = [sys.executable, "-m", "kvkeep", "eval", "--policies", ",".join(POLICIES), "--budgets", BUDGETS]
    command += ["--tasks", "recall,perplexity", "--context", str(options.context), "--seed", str(seed), "--no-plots"]
    command += ["--output", str(folder), "--json"]
    if options.text:
        command += ["--text", str(options.text)]
    if not options.full:
        command += ["--limit", "6"]
    elif options.limit:
        command += ["--limit", str(options.limit)]
    if not options.collect:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def collect(rows: list[dict], task: str, key: str) -> dict[str, dict[str, list[float]]]:
    """Policy → budget → the measure of each seed; ``early`` is the share of kept tokens from the first half."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["task"] == task:
            found.setdefault(row["policy"], {}).setdefault(row["budget"], []).append(
                sum(row["score"]["kept"][:5]) if key == "early" else row["score"][key]
            )
    return found


def cell(values: list[float] | None, scale: float, digits: int) -> str:
    """Mean over seeds, and half of the distance between the lowest and the highest."""
    if not values:
        return ""
    mean, half = statistics.mean(values) * scale, (max(values) - min(values)) / 2 * scale
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def table(rows: list[dict], task: str, key: str, scale: float, digits: int) -> list[list[str]]:
    """One line per policy, one column per budget; the full cache is the same in all."""
    found = collect(rows, task, key)
    budgets = BUDGETS.split(",")
    lines = []
    for policy, by_budget in found.items():
        full = by_budget.get("100%")
        lines.append([f"`{policy}`", *(cell(full or by_budget.get(b), scale, digits) for b in budgets)])
    return lines


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
    seeds = options.seeds or ([0, 1, 2] if options.full else [0])
    rows = [row for seed in seeds for row in evaluate(seed, options)]
    recall = table(rows, "recall", "accuracy", 100.0, 0)
    perplexity = table(rows, "perplexity", "perplexity", 1.0, 1)
    early = table(rows, "recall", "early", 100.0, 0)
    data = {
        "bench": "quality",
        "seeds": seeds,
        "recall": collect(rows, "recall", "accuracy"),
        "perplexity": collect(rows, "perplexity", "perplexity"),
        "early": collect(rows, "recall", "early"),
    }
    report("Recall, % right", ["policy", *BUDGETS.split(",")], recall, {})
    report("Kept tokens from the first half of the prompt, %", ["policy", *BUDGETS.split(",")], early, {})
    report("Perplexity", ["policy", *BUDGETS.split(",")], perplexity, data)
    if options.write:
        asked = next(row["rows"] for row in rows if row["task"] == "recall")
        titles = (
            f"Recall in percent, {asked} questions per seed, prompts of {options.context} tokens, mean ± half range "
            f"over {len(seeds)} seeds",
            "Share of the kept tokens that stand in the first half of the prompt, in percent",
            f"Perplexity, windows of {round(next(r['text_tokens'] for r in rows if r['task'] == 'perplexity'))} tokens",
        )
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        tables = "\n\n".join(markdown(t, lines) for t, lines in zip(titles, (recall, early, perplexity), strict=True))
        options.write.write_text(f"{before}{MARKS[0]}\n\n{tables}\n\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

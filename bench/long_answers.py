"""How far does each policy follow the full cache's own long answer, with `keep_prompt` and without?

    kvkeep calibrate MODEL --for triattention --text NOVEL -o queries.pt
    python bench/long_answers.py MODEL --text NOVEL --output DIR --calibration queries.pt
    python bench/long_answers.py MODEL --text NOVEL --output DIR --prompts 16 --new 24 --budgets 32 --limit 1

One GPU day (Qwen3-8B, not measured yet):

    kvkeep calibrate Qwen/Qwen3-8B --for triattention --text NOVEL --context 4096 -o queries.pt --device cuda
    python bench/long_answers.py Qwen/Qwen3-8B --text NOVEL --output DIR --calibration queries.pt --device cuda
        --prompts 128,512 --new 8000 --budgets 512,1024,2048 --limit 4

Answers are drawn, since those of the likeliest tokens repeat themselves on small models, which any policy follows. Runs
`kvkeep eval --tasks agreement` for each length of the prompt and each budget, in a folder of its own under DIR.
The same command goes on where it stopped. Policies that cannot keep the prompt in a budget are left out, and named. The
full cache's logits stay in main memory: prompts x new tokens x vocabulary numbers of the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from lib import report

import kvkeep
from kvkeep.errors import BudgetError
from kvkeep.policies import CONVERSATION, DEFAULT
from kvkeep.policies._keep_prompt import check_budget, check_read, keeping
from kvkeep.policies.registry import label
from kvkeep.result_files import ROWS

POLICIES = (
    *("local", "streaming_llm", "h2o", "scissorhands", "ahakv", "tova", DEFAULT, CONVERSATION, "rkv"),
    *("random:buffer=64,recent=64", "vase"),
)


def arms(options: argparse.Namespace, prompt: int, budget: int) -> tuple[list[str], list[str]]:
    """Return the policies of one run, without and with the prompt kept, and those that a budget cannot hold."""
    asked = [*POLICIES, *([f"triattention:calibration={options.calibration}"] if options.calibration else [])]
    found, left_out = [], []
    for policy in asked:
        for keep in (None, True):
            made = keeping(kvkeep.parse(policy), keep)
            try:
                check_budget(made, budget)
                check_read(made, budget, ((0, prompt),))
                found.append(kvkeep.spec(made))
            except BudgetError:
                left_out.append(kvkeep.spec(made))
    return found, left_out


def run(options: argparse.Namespace, prompt: int, budget: int) -> None:
    """Run the policies of one prompt length and budget, unless they have been run."""
    policies, left_out = arms(options, prompt, budget)
    for policy in left_out:
        print(f"{policy} is left out: a budget of {budget} cannot hold it with a prompt of {prompt}", file=sys.stderr)
    lengths = ("--prompt-tokens", str(prompt), "--new-tokens", str(options.new), "--limit", str(options.limit))
    words = [sys.executable, "-m", "kvkeep", "eval", options.model, "--tasks", "agreement", *lengths]
    words += ["--draw", "--text", options.text, "--policies", ",".join(["full", *policies]), "--budgets", str(budget)]
    words += ["--device", options.device, "--dtype", options.dtype, "--no-plots"]
    subprocess.run([*words, "--output", str(folder(options, prompt, budget))], check=True, stdout=subprocess.DEVNULL)


def folder(options: argparse.Namespace, prompt: int, budget: int) -> Path:
    """Return the folder of one run."""
    return options.output / f"prompt{prompt}-new{options.new}-budget{budget}"


def rows(options: argparse.Namespace, prompt: int, budget: int) -> list[list[str]]:
    """Return a line of the table for each policy of a run."""
    file = folder(options, prompt, budget) / ROWS
    found = [json.loads(line) for line in file.read_text().splitlines()]
    cells = [row for row in found if "score" in row]
    return [
        [
            *(str(prompt), str(budget), *named(row["policy"])),
            *(f"{row['score'][name]:.{digits}f}" for name, digits in (("kl", 4), ("agreement", 3))),
            f"{row['score']['first_difference']:.0f}",
        ]
        for row in sorted(cells, key=lambda row: row["score"]["kl"])
    ]


def named(policy: str) -> tuple[str, str]:
    """Return a policy's label without what it keeps of the prompt, and whether it keeps it."""
    found = kvkeep.parse(policy)
    return label(keeping(found, False)), "" if found.keep_prompt is None else "kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--calibration", help="a file of kvkeep calibrate --for triattention")
    parser.add_argument("--prompts", default="64,128")
    parser.add_argument("--budgets", default="128,256,512")
    parser.add_argument("--new", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    pairs = [(int(p), int(b)) for p in options.prompts.split(",") for b in options.budgets.split(",")]
    for prompt, budget in pairs:
        run(options, prompt, budget)
    lines = [line for prompt, budget in pairs for line in rows(options, prompt, budget)]
    title = f"{options.model}: answers of {options.new} tokens, {options.limit} prompts"
    columns = ["prompt", "budget", "policy", "prompt is", "KL, nats", "agreement", "until a difference"]
    report(title, columns, lines, {"bench": "long_answers", "lines": lines})


if __name__ == "__main__":
    main()

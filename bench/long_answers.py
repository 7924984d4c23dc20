"""How far does each policy follow the full cache's own long answer, with `keep_prompt` and without?

    kvkeep calibrate MODEL --for triattention --text NOVEL -o queries.pt
    python bench/long_answers.py MODEL --text NOVEL --output DIR --calibration queries.pt
    python bench/long_answers.py MODEL --text NOVEL --output DIR --prompts 16 --new 24 --budgets 32 --limit 1

One GPU day (Qwen3-8B, not measured yet):

    kvkeep calibrate Qwen/Qwen3-8B --for triattention --text NOVEL --context 4096 -o queries.pt --device cuda
    python bench/long_answers.py Qwen/Qwen3-8B --text NOVEL --output DIR --calibration queries.pt --device cuda
        --prompts 128,512 --new 8000 --budgets 512,1024,2048 --limit 4

Answers are drawn, since those of the likeliest tokens repeat themselves on small models, which any policy follows. Each
policy follows the full cache's answers under all budgets at once: they are rows of one batch, since the weights take
most of a step's time. DIR/rows.jsonl has a line for each policy and budget with all that it depends on, so the same
command goes on where it stopped, and another one adds its lines. Policies that cannot keep the prompt in a budget are
left out there, and named. The full cache's logits stay in main memory: answers x new tokens x vocabulary numbers of the
model's dtype.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lib import report
from lib.rows import named, save, saved

import kvkeep
from kvkeep.errors import BudgetError
from kvkeep.evals.arms import split_policies
from kvkeep.evals.run import fingerprint
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.agreement import Agreement
from kvkeep.models.tokenization import Writer
from kvkeep.policies import CONVERSATION, DEFAULT
from kvkeep.policies._keep_prompt import check_budget, check_read, keeping
from kvkeep.policies.registry import label
from kvkeep.scale.driver import ModelRecipe

POLICIES = (
    *("local", "streaming_llm", "h2o", "scissorhands", "ahakv", "tova", DEFAULT, CONVERSATION, "rkv"),
    *("random:buffer=64,recent=64", "vase"),
)


def arms(options: argparse.Namespace, prompt: int) -> dict[str, list[int]]:
    """Return the policies, without and with the prompt kept, each with the budgets that can hold it, the smallest
    first.
    """
    calibrated = [f"triattention:calibration={options.calibration}"] if options.calibration else []
    asked = options.policies or [kvkeep.parse(policy) for policy in (*POLICIES, *calibrated)]
    found: dict[str, list[int]] = {}
    for policy in dict.fromkeys(keeping(one, keep) for one in asked for keep in (None, True)):
        for budget in options.budgets:
            try:
                check_budget(policy, budget)
                check_read(policy, budget, ((0, prompt),))
            except BudgetError:
                what = f"a budget of {budget} cannot hold it with a prompt of {prompt}"
                print(f"{kvkeep.spec(policy)} is left out: {what}", file=sys.stderr)
            else:
                found.setdefault(kvkeep.spec(policy), []).append(budget)
    return found


def run(options: argparse.Namespace, writer: Writer, prompt: int) -> list[dict[str, Any]]:
    """Run the policies under the budgets that have no line, and return the lines of all that were asked for."""
    file = options.output / "rows.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text(encoding="utf-8")
    about = {
        "model": options.model,
        "weights": fingerprint(writer),
        "dtype": writer.dtype,
        "text": named(text),
        "prompt": prompt,
        "new": options.new,
        "limit": options.limit,
    }
    done = saved(file, about)
    known, asked = {(row["policy"], row["budget"]) for row in done}, arms(options, prompt)
    left = {policy: [one for one in budgets if (policy, one) not in known] for policy, budgets in asked.items()}
    todo = {policy: budgets for policy, budgets in left.items() if budgets}
    if todo:
        lengths = {"prompt_tokens": prompt, "new_tokens": options.new, "limit": options.limit}
        task = Agreement.load(writer.checkpoint, Options(text=text, draw=True, **lengths))
        print(f"prompts of {prompt}: the full cache's own answers", file=sys.stderr)
        task.prepare(writer)
    for number, (policy, budgets) in enumerate(todo.items(), 1):
        print(f"prompts of {prompt}: {policy}, {number} of {len(todo)}", file=sys.stderr)
        scores = follow(writer, task, policy, budgets)
        rows = [{**about, "policy": policy, "budget": budget, "score": scores.get(budget)} for budget in budgets]
        save(file, rows)
        done += rows
    return [row for row in done if row["budget"] in asked.get(row["policy"], ())]


def follow(writer: Writer, task: Agreement, policy: str, budgets: list[int]) -> dict[int, dict[str, Any]]:
    """Return a policy's scores by budget, without the smallest ones if layers that have less refuse them."""
    while budgets:
        try:
            scores = task.under_budgets(writer, kvkeep.parse(policy), budgets)
        except BudgetError as error:
            print(f"{policy} is left out under a budget of {budgets[0]}: {error}", file=sys.stderr)
            budgets = budgets[1:]
        else:
            return dict(zip(budgets, scores, strict=True))
    return {}


def table(done: list[dict[str, Any]], prompt: int) -> list[list[str]]:
    """Return a line for each budget and policy, the smallest KL first."""
    measured = [row for row in done if row["score"] is not None]
    return [
        [
            *(str(prompt), str(row["budget"]), *described(row["policy"])),
            *(f"{row['score'][name]:.{digits}f}" for name, digits in (("kl", 4), ("agreement", 3))),
            f"{row['score']['first_difference']:.0f}",
        ]
        for row in sorted(measured, key=lambda row: (row["budget"], row["score"]["kl"]))
    ]


def described(policy: str) -> tuple[str, str]:
    """Return a policy's label without what it keeps of the prompt, and how much it keeps."""
    found = kvkeep.parse(policy)
    share = found.keep_prompt
    return label(keeping(found, False)), "" if share is None else "kept" if share == 1 else f"cut to {share:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--policies", type=split_policies, help="instead of all, such as h2o,tova:sinks=4")
    parser.add_argument("--calibration", help="a file of kvkeep calibrate --for triattention")
    parser.add_argument("--prompts", type=numbers, default="64,128")
    parser.add_argument("--budgets", type=lambda text: sorted({*numbers(text)}), default="128,256,512")
    parser.add_argument("--new", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    writer = ModelRecipe(model=options.model, dtype=options.dtype, device=options.device).load()
    lines = [line for prompt in options.prompts for line in table(run(options, writer, prompt), prompt)]
    title = f"{options.model}: answers of {options.new} tokens, {options.limit} prompts"
    columns = ["prompt", "budget", "policy", "prompt is", "KL, nats", "agreement", "until a difference"]
    report(title, columns, lines, {"bench": "long_answers", "lines": lines})


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a list with commas."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()

"""Does `kvkeep tune` find what an exhaustive search finds? Both on the same documents of the embedded model.

    python bench/tune.py --output DIR [--case later] [--target 0.98] [--limit 448] [--budgets LIST] [--text FILE]

The search runs first and prints its answer and its processor time. Then every policy at every budget is measured on
the documents of the confirmation, and the smallest memory that passes is printed beside it. DIR is a folder of `kvkeep
tune`, so a run that was stopped goes on, and measurements are shared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kvkeep.cli.options import parse_budget
from kvkeep.evals.tune.candidates import CASES, Candidate
from kvkeep.evals.tune.plan import Plan, Wanted, lay_out
from kvkeep.evals.tune.quality import Kept, kept
from kvkeep.evals.tune.records import Records
from kvkeep.evals.tune.run import Measured, Result, sizes_of, tune
from kvkeep.models import threads
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.models.text import Writer
from kvkeep.models.weights import fingerprint


def exhaustive(plan: Plan, study: Measured, span: tuple[int, int]) -> dict[Candidate, Kept]:
    """Every candidate on the documents of the confirmation."""
    candidates = sorted((step for ladder in plan.ladders for step in ladder), key=lambda step: step.row_bytes)
    found = {}
    for candidate in candidates:
        found[candidate] = kept(study.tallies(candidate, *span), study.kind)
        print(f"{candidate}: {found[candidate].share:.3f}, at least {found[candidate].low:.3f}", flush=True)
    return found


def show(result: Result, everything: dict[Candidate, Kept], target: float, seconds: float) -> None:
    passing = [one for one, quality in everything.items() if quality.passes(target)]
    best = min(passing, key=lambda one: one.row_bytes, default=None)
    chosen = result.found.chosen
    steps = None
    if best is not None and chosen is not None:
        (own,) = (ladder for ladder in result.ladders if ladder[0].arm == chosen.arm)
        steps = sum(best.row_bytes < step.row_bytes <= chosen.row_bytes for step in own)
    print(f"search: {chosen} in {seconds:.0f} s of processor time; exhaustive: {best}; steps between: {steps}")
    measured = {"chosen": str(chosen), "exhaustive": str(best), "steps": steps, "cpu_s": round(seconds, 1)}
    print(json.dumps({**measured, "candidates": len(everything), "searched": len(result.searched)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--case", default="later", choices=CASES)
    parser.add_argument("--target", type=float, default=0.98)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--budgets")
    parser.add_argument("--policies")
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    budgets = [parse_budget(one, "--budgets") for one in options.budgets.split(",")] if options.budgets else ()
    text = options.text and options.text.read_text()
    wanted = Wanted(case=options.case, text=text, budgets=budgets, policies=options.policies)
    with quiet(), threads.restored():
        checkpoint = find(embedded())
        plan = lay_out(checkpoint, "embedded", wanted)
        writer = Writer(checkpoint, read_weights(checkpoint))
        threads.use(writer.model, None)
        records = Records(options.output)
        with records.locked():
            records.open({**plan.settings, "weights": fingerprint(writer.model), "dtype": writer.dtype})
            begin = time.process_time()
            result = tune(plan.measure, plan.ladders, writer, records, target=options.target, limit=options.limit)
            seconds = time.process_time() - begin
            sizes = sizes_of(plan.measure, options.target, options.limit)
            study = Measured(plan.measure, writer, records, lambda progress: None)
            show(result, exhaustive(plan, study, sizes.confirm), options.target, seconds)


if __name__ == "__main__":
    main()

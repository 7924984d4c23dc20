"""Does `kvkeep tune` find what an exhaustive search finds? Both on the same documents of the embedded model.

    python bench/tune.py --output DIR [--case later] [--target 0.98] [--limit 448] [--budgets LIST] [--text FILE]

The search runs first and prints its answer and its time. Then every policy at every budget is measured on the documents
of the confirmation, the smallest memory first, up to the first candidate that passes: no other one can be the answer. A
candidate is given up once it would fail even if it kept all answers that are left. DIR is a folder of `kvkeep tune`, so
a run that was stopped goes on, and measurements are shared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kvkeep.cli.options import parse_budget
from kvkeep.evals.tune.measure import CASES, Candidate
from kvkeep.evals.tune.plan import TuneArguments, TunePlan, lay_out
from kvkeep.evals.tune.search import CachedMeasure, Confirmation, TuneRecords, TuneResult, tune
from kvkeep.models import threads
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.models.weight_hash import fingerprint


def exhaustive(plan: TunePlan, test: Confirmation) -> Candidate | None:
    """The candidate with the smallest memory that passes, of all."""
    for candidate in sorted((step for ladder in plan.ladders for step in ladder), key=lambda step: step.row_bytes):
        passes, quality = test(candidate), test.seen[candidate]
        print(f"{candidate}: {quality.share:.3f}, at least {quality.low:.3f} of {quality.weight:.0f}", flush=True)
        if passes:
            return candidate
    return None


def show(result: TuneResult, best: Candidate | None, test: Confirmation, seconds: tuple[float, float]) -> None:
    chosen = result.found.chosen
    steps = None
    if best is not None and chosen is not None:
        grid = sorted({step.budget for ladder in result.ladders for step in ladder})
        steps = grid.index(chosen.budget) - grid.index(best.budget)
    wall, cpu = (round(one, 1) for one in seconds)
    print(
        f"search: {chosen} in {wall:.0f} s ({cpu:.0f} s of processor time); exhaustive: {best}; steps between: {steps}"
    )
    measured = {"chosen": str(chosen), "exhaustive": str(best), "steps": steps, "wall_s": wall, "cpu_s": cpu}
    print(json.dumps({**measured, "measured": len(test.seen), "searched": len(result.searched)}))


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
    wanted = TuneArguments(
        case=options.case, text=text, limit=options.limit, budgets=budgets, policies=options.policies
    )
    with quiet(), threads.restored():
        checkpoint = find(embedded())
        plan = lay_out(checkpoint, "embedded", wanted)
        writer = Writer(checkpoint, read_weights(checkpoint))
        threads.use(writer.model, None)
        records = TuneRecords(options.output)
        with records.locked():
            records.open({**plan.settings, "weights": fingerprint(writer.model), "dtype": writer.dtype})
            begin = time.perf_counter(), time.process_time()
            result = tune(plan.measure, plan.ladders, writer, records, target=options.target, limits=wanted.sizes)
            seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
            study = CachedMeasure(plan.measure, writer, records, lambda progress: None)
            test = Confirmation(study, result.sizes.confirm, options.target, promises=result.promises)
            show(result, exhaustive(plan, test), test, seconds)


if __name__ == "__main__":
    main()

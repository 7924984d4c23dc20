"""When does KV memory in main memory pay?

    python bench/host_rows.py [--rows 4] [--requests 16] [--budget 512] [--prompt 256] [--new 128] [--policy h2o]

Two ways to use main memory for more sequences than rows fit beside the model, and what each of them copies:

- `Engine(host_rows=N)`: sequences take turns in the rows. A turn copies two rows, one out and one in. The first table
  shows times to the first token and throughput, without and with turns, and the share of the time that copies took.
  On a CUDA device most copies take place beside the steps; there the table has a line without that and one with it.
- H2O's setting (arXiv:2306.14048): the slots of all rows stay in main memory, and every step copies what
  it reads. The second table has the bytes of both ways, and the shortest turn whose copies take 5 % of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from lib import arguments, finish, policy, positive, show, speed_model

import kvkeep
from kvkeep.engine import swapping


@dataclass(frozen=True)
class Run:
    """Requests that came at once.

    Attributes:
        host_rows: sequences that could wait in main memory.
        staged: whether copies took place beside the steps.
        first_s: seconds to the first token of each request, sorted.
        tokens_per_s: new tokens of all requests per second.
        swaps: how often a row changed hands.
        share: of the time of all steps, taken by copies.
        copy_s: seconds that steps waited for a swap.
        step_s: seconds of a step.
    """

    host_rows: int
    staged: bool
    first_s: list[float]
    tokens_per_s: float
    swaps: int
    share: float
    copy_s: float
    step_s: float


def run(model: kvkeep.models.load.Model, options: argparse.Namespace, host_rows: int, staged: bool) -> Run:
    """Answer all requests once; ``staged``: copies take place beside the steps, if the device can do that."""
    engine = kvkeep.Engine(
        model, policy=options.policy, budget=options.budget, rows=options.rows, host_rows=host_rows, graphs=False
    )
    swapper = engine._swapper
    if (staging := swapper.staging if swapper else None) is not None and not staged:
        staging.most_bytes = 0
    ids = torch.randint(0, model.config.vocab_size, (options.requests, options.prompt), generator=seeded())
    sampling = kvkeep.SamplingParams(max_new_tokens=options.new)
    asked = [kvkeep.Request(prompt=one.tolist(), sampling=sampling, ignore_end=True) for one in ids]
    engine.generate(asked[:1])
    began, steps = time.perf_counter(), 0
    for one in asked:
        engine.add(one)
    found: list[kvkeep.Result] = []
    while engine.busy:
        found += [event.result for event in engine.step() if event.result]
        steps += 1
    took = time.perf_counter() - began
    first = sorted(one.ttft_s or 0.0 for one in found)
    swaps, copied_s, worked_s = (swapper.swaps, swapper.copied_s, swapper.worked_s) if swapper else (0, 0.0, took)
    copy_s = copied_s / swaps if swaps else 0.0
    share = copied_s / (copied_s + worked_s)
    return Run(
        host_rows,
        staged and staging is not None,
        first,
        options.requests * options.new / took,
        swaps,
        share,
        copy_s,
        took / steps,
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def line(one: Run) -> list[str]:
    """A run as a line of the table."""
    first = [statistics.median(one.first_s), one.first_s[-1]]
    return [
        str(one.host_rows),
        "beside steps" if one.staged else "between steps" if one.swaps else "–",
        *(f"{seconds:.2f}" for seconds in first),
        f"{one.tokens_per_s:.1f}",
        str(one.swaps),
        f"{100 * one.share:.1f}",
        f"{1e3 * one.copy_s:.2f}" if one.swaps else "–",
        f"{1e3 * one.step_s:.2f}",
    ]


def bytes_of(row_bytes: int, bus: float, step_s: float, rows: int) -> list[list[str]]:
    """The bytes that each way copies, the seconds on the bus, and a step's time with them.

    Args:
        row_bytes: bytes of a row.
        bus: bytes per second between main memory and the device.
        step_s: seconds of a step whose slots lie on the device.
        rows: rows of a step.
    """
    swap, all_rows = 2 * row_bytes / bus, rows * row_bytes / bus
    turn = swap / (swapping.SHARE * step_s)
    return [
        ["a turn (two rows)", f"{2 * row_bytes / 1e6:.2f}", f"{1e3 * swap:.3f}", f"every {max(1, round(turn))} steps"],
        ["slots in main memory", f"{rows * row_bytes / 1e6:.2f}", f"{1e3 * all_rows:.3f}", "in every step"],
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--policy", type=policy, default="h2o")
    parser.add_argument("--budget", type=positive, default=512)
    parser.add_argument("--rows", type=positive, default=4)
    parser.add_argument("--requests", type=positive, default=16)
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of each prompt")
    parser.add_argument("--new", type=positive, default=128, help="new tokens of each request")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = speed_model(getattr(torch, options.dtype), options.layers).to(options.device)
    beyond = max(1, options.requests - options.rows)
    cuda = torch.device(options.device).type == "cuda"
    kinds = [(0, False), (beyond, False), *([(beyond, True)] if cuda else [])]
    found = [run(model, options, *kind) for kind in kinds]
    title = f"{options.requests} requests in {options.rows} rows, {options.policy}, {options.budget} slots"
    columns = ["host_rows", "copies", "first token, median s", "latest", "tokens/s", "swaps", "copies, %"]
    show(title, [*columns, "swap, ms", "step, ms"], [line(one) for one in found])
    row = kvkeep.Engine(model, policy=options.policy, budget=options.budget, rows=1, graphs=False).row_bytes
    bus = 2 * row / found[1].copy_s if found[1].copy_s else float("inf")
    cells = bytes_of(row, bus, found[0].step_s, options.rows)
    show(f"Bytes at {bus / 1e9:.2f} GB/s, as measured by swaps", ["", "MB", "ms", "how often"], cells)
    finish({"row_bytes": row, "bus_bytes_per_s": bus, "runs": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()

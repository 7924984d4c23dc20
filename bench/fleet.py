"""Does `kvkeep fleet` foretell what an engine does?

    python bench/fleet.py [--repeats 3]           # the model for speed with 6 layers, three loads
    python bench/fleet.py --embedded              # the embedded model, whose steps are short
    python bench/fleet.py --steps-only > steps.txt    # measured steps alone, for kvkeep fleet --steps

Requests arrive at random times, in an open loop in this process, at shares of the rate that the rows could just bear;
the simulator gets the same arrivals and lengths, and lines through measured steps with the ratios of single steps to
them. Two kinds are shown. With the run's own steps nothing is left but the simulator's rules. Steps of other arrivals
at the same load, just before and after, foretell a run; that holds as far as the speed of the machine stays. Steps of
a fixed number of rows would be shorter than those after rows have come or gone. Figures are medians over repeats.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from typing import Any

import torch
from lib import arguments, finish, kernel, positive, show, speed_model
from lib.real import Real, fitted, steps_alone

import kvkeep
from kvkeep.engine.scheduler import MIXED_TOKENS, pace_of
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep_lab.fleet.bounded import Bounded, DeviceRows
from kvkeep_lab.fleet.load import Arrivals, FleetLoad, Turn
from kvkeep_lab.fleet.steps import Fitted, fit
from kvkeep_lab.loadtest.percentiles import percentile
from kvkeep_lab.loadtest.plan import Lengths

AIM = 0.15
"""Relative difference that is aimed at."""

SIMULATED = {"simulated": "own steps", "foretold": "steps around"}
"""Kinds of simulated figures, and whose steps they are from."""

FIGURES = {"first_p50": "first token, p50", "first_p99": "p99", "token_p50": "per token, p50", "token_p99": "p99"}


def drawn(rate: float, options: argparse.Namespace, seed: int) -> list[Turn]:
    """Requests at random times."""
    draw, at, turns = random.Random(seed), 0.0, []
    for _ in range(options.requests):
        turns.append(Turn(options.prompt.draw(draw), options.new.draw(draw), due=at))
        at += draw.expovariate(rate)
    return turns


def simulated(turns: list[Turn], lines: Fitted, options: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """What the simulator says of the same requests."""
    one = Lengths(1, 1)
    load = FleetLoad(rate=1.0, prompt_tokens=one, new_tokens=one, trace=tuple((turn,) for turn in turns))
    rules = {"chunk": options.chunk, "decode_every": pace_of("cpu"), "mixed_tokens": MIXED_TOKENS["cpu"]}
    log = Bounded(lines, Arrivals(load), DeviceRows(count=options.rows, slots=options.budget + 1, **rules)).run()
    return log.first_s, log.token_s, log.new_tokens / log.seconds


def figures(found: tuple[list[float], list[float], float]) -> dict[str, float]:
    """Percentiles of times, and tokens per second."""
    first, tokens = sorted(found[0]), sorted(found[1])
    shares = {"p50": 50.0, "p99": 99.0}
    return {
        **{f"first_{name}": percentile(first, share) for name, share in shares.items()},
        **{f"token_{name}": percentile(tokens, share) for name, share in shares.items()},
        "tokens_per_s": found[2],
    }


def capacity(lines: Fitted, options: argparse.Namespace) -> float:
    """Requests per second that full rows could just bear."""
    read = lines.seconds(options.rows, 0.0, 1000) - lines.seconds(options.rows, 0.0, 500)
    step = lines.seconds(options.rows, 0.0) / options.rows
    return 1.0 / (options.prompt.average * read / 500 + (options.new.average - 1) * step)


def compared(runs: list[dict[str, Any]], load: float) -> list[list[str]]:
    """Lines of the table for a load."""
    lines = []
    mine = [run for run in runs if run["load"] == load]
    for name, words in {**FIGURES, "tokens_per_s": "tokens/s"}.items():
        unit, scale = ("", 1) if name == "tokens_per_s" else (" ms", 1000)
        line = [f"{load:.0%}" if name == "first_p50" else "", words]
        for kind in ("measured", *SIMULATED):
            line.append(f"{scale * statistics.median(run[kind][name] for run in mine):.1f}{unit}")
            line += [] if kind == "measured" else [f"{off(mine, kind, name):+.0%}"]
        lines.append(line)
    return lines


def off(runs: list[dict[str, Any]], kind: str, name: str) -> float:
    """The median relative difference of a simulated figure."""
    return statistics.median(run[kind][name] / run["measured"][name] - 1 for run in runs)


def within(runs: list[dict[str, Any]], loads: list[float]) -> str:
    """How many figures are within the aim."""
    by_load = [[run for run in runs if run["load"] == load] for load in loads]
    names = [*FIGURES, "tokens_per_s"]
    counts = {kind: sum(abs(off(mine, kind, name)) <= AIM for mine in by_load for name in names) for kind in SIMULATED}
    told = ", ".join(
        f"{count} with {words}" for (_, words), count in zip(SIMULATED.items(), counts.values(), strict=True)
    )
    return f"within {AIM:.0%} of {len(by_load) * len(names)} figures: {told}"


def engine(options: argparse.Namespace) -> kvkeep.Engine:
    """The engine that is measured."""
    with quiet():
        if options.embedded:
            model = read_weights(find(embedded()), options.dtype, "cpu")
        else:
            model = speed_model(getattr(torch, options.dtype), options.layers)
    settings = {"policy": options.policy, "budget": options.budget, "prefill_chunk": options.chunk}
    return kvkeep.Engine(model, rows=options.rows, **settings)


def lengths(text: str) -> Lengths:
    """Lengths, from the command line."""
    try:
        return Lengths.read(text, "lengths")
    except kvkeep.KVKeepError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.set_defaults(layers=6)
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--prompt", type=lengths, default=Lengths(32, 192), help="tokens: 64, 32-192 or ~100")
    parser.add_argument("--new", type=lengths, default=Lengths(16, 64), help="the same, of answers")
    parser.add_argument("--chunk", type=positive, default=128)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", type=positive, default=64)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.6, 0.8], help="shares of what rows can bear")
    parser.add_argument("--requests", type=positive, default=60, help="at each load")
    parser.add_argument("--steps", type=positive, default=15, help="timed steps of each kind")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--embedded", action="store_true", help="the embedded model, whose steps are short")
    parser.add_argument("--steps-only", action="store_true", help="time steps, and simulate nothing")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    runs: list[dict[str, Any]] = []
    with engine(options) as made:
        real = Real(made, 0)
        real.drop(real.decoding(options.rows, options.chunk, 20))
        alone = steps_alone(real, options)
        lines = fit(alone, "steps")
        del real.noted[:]
        for load in options.loads:
            real.answer(drawn(load * capacity(lines, options), options, -1))
        steps, lines = fitted(alone, real.noted)
        rate = capacity(lines, options)
        for repeat, load in () if options.steps_only else itertools.product(range(options.repeats), options.loads):
            real.noted = around = []
            real.answer(drawn(load * rate, options, -2 - 2 * repeat))
            real.noted, turns = (own := []), drawn(load * rate, options, repeat)
            run = {"load": load, "rate": load * rate, "measured": figures(real.answer(turns))}
            real.noted = around
            real.answer(drawn(load * rate, options, -3 - 2 * repeat))
            for kind, noted in zip(SIMULATED, (own, around), strict=True):
                _, lines = fitted(alone, noted)
                run[kind] = figures(simulated(turns, lines, options))
            runs.append({**run, "error": lines.error})
    title = f"{options.policy} {options.budget}, {options.rows} rows, {options.dtype}, kernel: {kernel()}"
    if runs:
        columns = ["load", "", "measured", *itertools.chain.from_iterable((words, "") for words in SIMULATED.values())]
        rows = [line for load in options.loads for line in compared(runs, load)]
        show(title, columns, rows, [f"{options.requests} requests at each load, {options.repeats} repeats"])
        print(within(runs, options.loads))
    print(f"lines through the steps are off by up to {max((run['error'] for run in runs), default=lines.error):.0%}")
    settings = {**vars(options), "prompt": str(options.prompt), "new": str(options.new)}
    finish({"bench": "fleet", **settings, "timed_steps": options.steps, "steps": steps, "runs": runs})


if __name__ == "__main__":
    main()

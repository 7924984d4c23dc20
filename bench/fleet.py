"""Does `kvkeep plan --fleet` foretell what an engine does?

    python bench/fleet.py [--repeats 3]           # the model for speed with 6 layers, three loads
    python bench/fleet.py --embedded              # the embedded model, whose steps are short
    python bench/fleet.py --steps-only > steps.txt    # measured steps alone, for kvkeep plan --fleet --steps

Requests arrive at random times, in an open loop in this process, at shares of the rate that the rows could just bear;
the simulator gets the same arrivals and lengths, and lines through measured steps. These are of
other arrivals at the same load, just before and just after: the speed of a machine drifts, steps of a fixed number of
rows are shorter than steps after rows have come or gone, and what adds up is their mean. Single steps scatter around
the lines; the simulator takes their ratios to the lines one after the other. Shown are the medians over repeats of
both, and of their relative difference.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from lib import arguments, finish, kernel, positive, show, speed_model

import kvkeep
from kvkeep.engine.batch import Run
from kvkeep.engine.scheduler import MIXED_TOKENS, pace_of
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.planning.fleet.bounded import Bounded, Rows
from kvkeep.planning.fleet.load import Arrivals, FleetLoad, Turn
from kvkeep.planning.fleet.steps import Fitted, fit
from kvkeep.traffic.lengths import Lengths
from kvkeep.traffic.percentiles import percentile
from kvkeep.types import Phase

AIM = 0.15
"""Relative difference that is aimed at."""

FEWEST = 5
"""Steps of a kind in a mean."""

FIGURES = {"first_p50": "first token, p50", "first_p99": "p99", "token_p50": "per token, p50", "token_p99": "p99"}


class Real:
    """An engine, and requests with random prompts.

    Args:
        engine: the engine.
        seed: of the prompts.

    Attributes:
        noted: of steps with one run: rows that got a token, prompt tokens that were read, seconds.
    """

    def __init__(self, engine: kvkeep.Engine, seed: int) -> None:
        self._engine, self._draw = engine, random.Random(seed)
        self.noted: list[tuple[int, int, float]] = []
        self._plan, self._runs = engine._scheduler.plan, list[Run]()
        engine._scheduler.plan = self._noted  # type: ignore[method-assign]
        self._known = range(3, engine.model.config.get_text_config().vocab_size)

    def add(self, prompt: int, new: int) -> int:
        """Add a request of these lengths, and return its number."""
        wish = kvkeep.Sampling(max_new_tokens=new)
        tokens = self._draw.choices(self._known, k=prompt)
        return self._engine.add(kvkeep.Request(prompt=tokens, sampling=wish, ignore_end=True))

    def _noted(self) -> list[Run]:
        self._runs = self._plan()
        return self._runs

    def step(self) -> list[kvkeep.Event]:
        """A step, which is noted if it was one run."""
        start = time.perf_counter()
        events = self._engine.step()
        seconds = time.perf_counter() - start
        if len(self._runs) == 1:
            fed = [(batch.phase, len(tokens)) for batch in self._runs[0].batches for tokens in batch.tokens]
            rows, read = (sum(n for phase, n in fed if phase is kind) for kind in (Phase.DECODE, Phase.PREFILL))
            self.noted.append((rows, read, seconds))
        return events

    def timed(self, prompt: int = 0) -> float:
        """Seconds of a step, which may read a prompt."""
        if prompt:
            self.add(prompt, 1)
        self.step()
        return self.noted[-1][2]

    def decoding(self, rows: int, prompt: int, new: int) -> list[int]:
        """Rows that decode."""
        numbers = [self.add(prompt, new) for _ in range(rows)]
        waiting = set(numbers)
        while waiting:
            waiting -= {event.id for event in self._engine.step()}
        return numbers

    def drop(self, numbers: list[int]) -> None:
        """End requests."""
        for number in numbers:
            self._engine.cancel(number)
        while self._engine.busy:
            self._engine.step()

    def answer(self, turns: list[Turn]) -> tuple[list[float], list[float], float]:
        """Answer requests when they are due: seconds to first tokens, seconds per token, and tokens per second."""
        engine, left, places = self._engine, [*enumerate(turns)], {}
        first, last = [0.0] * len(turns), [0.0] * len(turns)
        start = time.perf_counter()
        while left or engine.busy:
            while left and (left[0][1].due or 0.0) <= time.perf_counter() - start:
                place, turn = left.pop(0)
                places[self.add(turn.prompt, turn.new)] = place
            if not engine.busy:
                time.sleep(max(0.0, (left[0][1].due or 0.0) - (time.perf_counter() - start)))
                continue
            events = self.step()
            now = time.perf_counter() - start
            for event in events:
                place = places[event.id]
                first[place], last[place] = first[place] or now, now
        seconds = [at - (turn.due or 0.0) for at, turn in zip(first, turns, strict=True)]
        tokens = [(b - a) / (turn.new - 1) for a, b, turn in zip(first, last, turns, strict=True) if turn.new > 1]
        return seconds, tokens, sum(turn.new for turn in turns) / max(last)


def steps_alone(real: Real, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of steps of fixed rows and prompts, in the form that `kvkeep.planning.fleet.steps.read_steps` reads."""
    prompt, steps = round(options.prompt.average), {"decode": [], "prompt": []}
    for rows in sorted({1, 2, max(2, options.rows // 2), options.rows}):
        some = real.decoding(rows, prompt, 10**4)
        seconds = statistics.median(real.timed() for _ in range(options.steps))
        steps["decode"].append({"rows": rows, "seconds": seconds})
        real.drop(some)
    for size in sorted({options.chunk // 8, options.chunk // 2, options.chunk}):
        seconds = statistics.median(real.timed(size) for _ in range(options.steps))
        steps["prompt"].append({"tokens": size, "seconds": seconds})
    return steps


def points(noted: list[tuple[int, int, float]]) -> dict[str, Any]:
    """Noted steps in the form of `steps_alone`: means over steps of nearly one size."""
    kinds: dict[str, list[tuple[int, int, float]]] = {"decode": [], "prompt": [], "mixed": []}
    for one in noted:
        kinds["prompt" if not one[0] else "mixed" if one[1] else "decode"].append(one)
    steps = {kind: [point(some) for some in groups(of_kind, kind)] for kind, of_kind in kinds.items()}
    return {"device": "cpu", **steps}


def groups(noted: list[tuple[int, int, float]], kind: str) -> Iterator[list[tuple[int, int, float]]]:
    """Steps of the same number of rows, in parts of similar numbers of prompt tokens; no part is small."""
    noted.sort()
    for _, same in itertools.groupby(noted, key=lambda one: one[0]):
        some = [*same]
        count = min(4 if kind != "decode" else 1, len(some) // FEWEST)
        yield from (some[len(some) * n // count : len(some) * (n + 1) // count] for n in range(count))


def point(some: list[tuple[int, int, float]]) -> dict[str, float]:
    """The mean of steps."""
    rows, tokens, seconds = (statistics.fmean(column) for column in zip(*some, strict=True))
    return {"rows": rows, "tokens": tokens, "seconds": seconds}


def fitted(alone: dict[str, Any], noted: list[tuple[int, int, float]]) -> tuple[dict[str, Any], Fitted]:
    """Noted steps and lines through them; of kinds that are too few, those that were timed alone."""
    steps = {**alone, **{kind: found for kind, found in points(noted).items() if kind == "device" or len(found) > 1}}
    lines = fit(steps, "steps")
    steps["ratios"] = [seconds / lines.seconds(rows, 0.0, tokens) for rows, tokens, seconds in noted]
    return steps, fit(steps, "steps")


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
    log = Bounded(lines, Arrivals(load), Rows(count=options.rows, slots=options.budget + 1, **rules)).run()
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
        real, told = (statistics.median(run[kind][name] for run in mine) for kind in ("measured", "simulated"))
        off = statistics.median(run["simulated"][name] / run["measured"][name] - 1 for run in mine)
        unit, scale = ("", 1) if name == "tokens_per_s" else (" ms", 1000)
        title = f"{load:.0%} load" if name == "first_p50" else ""
        kept = "yes" if abs(off) <= AIM else "no"
        lines.append([title, words, f"{scale * real:.1f}{unit}", f"{scale * told:.1f}{unit}", f"{off:+.0%}", kept])
    return lines


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
            real.noted, turns = [], drawn(load * rate, options, repeat)
            measured = figures(real.answer(turns))
            real.noted = around
            real.answer(drawn(load * rate, options, -3 - 2 * repeat))
            _, lines = fitted(alone, around)
            both = {"measured": measured, "simulated": figures(simulated(turns, lines, options))}
            runs.append({"load": load, "rate": load * rate, "error": lines.error, **both})
    title = f"{options.policy} {options.budget}, {options.rows} rows, {options.dtype}, kernel: {kernel()}"
    if runs:
        columns = ["", "", "measured", "simulated", "difference", f"within {AIM:.0%}"]
        rows = [line for load in options.loads for line in compared(runs, load)]
        show(title, columns, rows, [f"{options.requests} requests at each load, {options.repeats} repeats"])
    print(f"lines through the steps are off by up to {max((run['error'] for run in runs), default=lines.error):.0%}")
    settings = {**vars(options), "prompt": str(options.prompt), "new": str(options.new)}
    finish({"bench": "fleet", **settings, "timed_steps": options.steps, "steps": steps, "runs": runs})


if __name__ == "__main__":
    main()

"""An engine under requests that arrive over time, and the time of its steps."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import kvkeep
from kvkeep.engine.scheduler import ModelRun
from kvkeep.types import Phase
from kvkeep_lab.fleet.load import Turn
from kvkeep_lab.fleet.steps import Fitted, fit

FEWEST = 5
"""Steps of a kind in a mean."""


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
        self._plan, self._runs = engine._scheduler.plan, list[ModelRun]()
        engine._scheduler.plan = self._noted  # type: ignore[method-assign]
        self._known = range(3, engine.model.config.get_text_config().vocab_size)

    def add(self, prompt: int, new: int) -> int:
        """Add a request of these lengths, and return its number."""
        wish = kvkeep.SamplingParams(max_new_tokens=new)
        tokens = self._draw.choices(self._known, k=prompt)
        return self._engine.add(kvkeep.Request(prompt=tokens, sampling=wish, ignore_end=True))

    def _noted(self) -> list[ModelRun]:
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
    """Medians of steps of fixed rows and prompts, in the form that `kvkeep_lab.fleet.steps.read_steps` reads."""
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

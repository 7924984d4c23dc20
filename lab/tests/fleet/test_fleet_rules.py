"""The simulator's runs are those that the engine's own scheduler plans, for the same arrivals and times of runs."""

import random

import pytest

from kvkeep.engine.request import Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import Sequence, SequenceStatus
from kvkeep.policies.registry import parse
from kvkeep.types import Phase
from kvkeep_lab.fleet.bounded import Bounded, DeviceRows
from kvkeep_lab.fleet.load import Arrivals, FleetLoad, Turn
from kvkeep_lab.loadtest.plan import Lengths

ANY = Lengths(1, 1)


def generation(number, turn):
    """What a scheduler sees of a request."""
    request = Request(prompt=[0] * turn.prompt, sampling=SamplingParams(max_new_tokens=turn.new))
    return Sequence(number, request, parse("h2o"), 64, frozenset())


def cost(rows, tokens):
    return (0.05 + 0.01 * rows if rows else 0.02) + 0.002 * tokens


class Noted:
    """Step costs that note what they were asked for."""

    def __init__(self):
        self.runs = []

    def seconds(self, rows, slots, tokens=0, pairs=0.0):
        self.runs.append((rows, tokens))
        return cost(rows, tokens)


def by_scheduler(requests, rows, **rules):
    """The runs, and the second of each first token, by the engine's scheduler and its loop: admit, plan, run, take."""
    scheduler = Scheduler(rows, alone=False, **rules)
    coming, now, runs, first = [*enumerate(requests)], 0.0, [], {}
    while coming or scheduler.waiting or scheduler.running:
        while coming and float(coming[0][1].due) <= now:
            number, turn = coming.pop(0)
            scheduler.waiting.append(generation(number, turn))
        if not (scheduler.waiting or scheduler.running):
            now = coming[0][1].due
            continue
        for sequence in scheduler.admit(lambda policy: True):
            sequence.start()
        while (gap := scheduler.gap()) is not None:
            scheduler.move(gap)
        for run in scheduler.plan():
            fed = [
                (batch.phase, len(tokens))
                for batch in run.batches
                for sequence, tokens in zip(batch.rows, batch.tokens, strict=True)
                if sequence
            ]
            read = sum(count for phase, count in fed if phase is Phase.PREFILL)
            decoded = sum(phase is Phase.DECODE for phase, _ in fed)
            runs.append((decoded, read))
            now += cost(decoded, read)
            for _, sequence in run.commit():
                first.setdefault(sequence.id, now)
                sequence.take(0)
                if sequence.status is SequenceStatus.FINISHED:
                    scheduler.leave(sequence)
    return runs, first


def drawn(seed):
    draw = random.Random(seed)
    at, turns = 0.0, []
    for _ in range(60):
        at += draw.expovariate(draw.choice([1, 4, 20]))
        turns.append(Turn(draw.choice([1, 7, 40, 300, 700]), draw.randint(1, 30), due=at))
    return turns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [None, 16, 128])
@pytest.mark.parametrize(("decode_every", "mixed_tokens"), [(1, 0), (32, 64), (128, 256), (100_000, 0)])
def test_runs_are_those_of_the_engines_scheduler(seed, chunk, decode_every, mixed_tokens):
    turns, steps = drawn(seed), Noted()
    rules = {"chunk": chunk, "decode_every": decode_every, "mixed_tokens": mixed_tokens}
    runs, first = by_scheduler(turns, 5, **rules)
    load = FleetLoad(rate=1.0, prompt_tokens=ANY, new_tokens=ANY, trace=tuple((turn,) for turn in turns))
    device = Bounded(steps, Arrivals(load), DeviceRows(count=5, slots=65, **rules))
    begun, plain = {}, device._goes_on
    device._goes_on = lambda job: begun.update({job.number: device.now}) or plain(job)
    device.run()
    assert steps.runs == runs
    assert begun == first  # to the last bit: the same sums of the same numbers

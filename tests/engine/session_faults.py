"""Random lives of sessions with faults in them: whatever fails, each session is as after its last finished turn.

``python -m engine.session_faults 0 30``, in the folder of the tests, runs the lives 0 to 29 and prints how turns ended.
"""

import functools
import random
import sys
import tempfile
from collections import Counter

from kvkeep.engine import Engine, Request
from kvkeep.errors import KVKeepError
from kvkeep.policies._head_budgets import refusal
from kvkeep.policies.registry import parse

from .faults import PROMPTS, Faults, run_all
from .models import model
from .session_models import Alone, short

POLICIES = ["h2o", "tova", "scissorhands", "random", "adakv:window=4", "spatten", "streaming_llm:sinks=2"]
RULES = [None, None, "global:0.1"]
BUDGET = 12
NEW = (1, 2, 5)


@functools.cache
def answer(policy, chunk, rule, turns):
    """The answer to the last of several turns, each a prompt and a number of new tokens, and all tokens so far."""
    alone, told = Alone(policy, BUDGET, chunk, head_budget=rule), []
    for prompt, new in turns:
        found = alone.ask(prompt, new)
        told += [*prompt, *found]
    return found, tuple(told)


class Full:
    """A disk that is full from time to time."""

    def __init__(self, rng, rate, write):
        self._rng, self._rate, self._write = rng, rate, write
        self.struck = 0

    def __call__(self, *args):
        if self._rng.random() < self._rate:
            self.struck += 1
            raise OSError(28, "No space left on device")
        return self._write(*args)


def life(seed, monkeypatch):
    """Run one life; returns how many turns ended how, and how many faults there were."""
    rng = random.Random(seed)
    policy = rng.choice(POLICIES)
    chunk = None if policy == "spatten" else rng.choice((None, 4))
    rule = random.Random(seed + 0.5).choice(RULES) if refusal(parse(policy)) is None else None
    rate = rng.choice((0.0, 0.2, 0.5))
    faults, ends = Faults(rng, rate), Counter()
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patched:
        from kvkeep.snapshot import snapshot as snapshots

        full = Full(rng, rate, snapshots.write_whole)
        patched.setattr(snapshots, "write_whole", full)
        engine = Engine(
            model("llama"),
            policy=policy,
            budget=BUDGET,
            head_budget=rule,
            rows=rng.choice((1, 2)),
            prefill_chunk=chunk,
            prefix_memory=10**5 if chunk and rng.random() < 0.5 else 0,
            session_memory=rng.choice((0, 30_000, 10**9)),
            session_dir=folder,
        )
        open_ones = [[engine.session(name="anna"), ()], [engine.session(), ()]]
        kept = []
        with faults.injected(model("llama"), monkeypatch):
            for _ in range(14):
                ends.update(act(rng, engine, open_ones, kept, faults, full, (policy, chunk, rule)))
            faults.armed = None
        full._rate = 0
        for session, turns in open_ones:
            assert session.token_ids == (answer(policy, chunk, rule, turns)[1] if turns else ())
            turn = (PROMPTS[3], 3)
            assert session.ask(*wish(turn)).token_ids == answer(policy, chunk, rule, (*turns, turn))[0]
        engine.close()
    return ends, faults.fired + full.struck


def wish(turn):
    return turn[0], short(turn[1])


def act(rng, engine, open_ones, kept, faults, full, way):
    """One thing that a user does with a session; returns how a turn ended."""
    one = rng.choice(open_ones)
    session, turns = one
    what = rng.choice(("ask", "ask", "ask", "leave", "fork", "snapshot", "rewind", "request"))
    struck = faults.fired, full.struck
    faults.arm()
    try:
        if what == "ask":
            turn = (rng.choice(PROMPTS), rng.choice(NEW))
            result = session.ask(*wish(turn))
            faults.armed = None  # what is expected is computed by the same model
            wanted = answer(*way, (*turns, turn))[0]
            assert result.token_ids == wanted[: len(result.token_ids)]
            if result.finish_reason == "length":
                one[1] = (*turns, turn)
            else:
                assert (result.finish_reason, struck == (faults.fired, full.struck)) == ("error", False), result
            return [result.finish_reason]
        if what == "leave":
            stream = session.send(rng.choice(PROMPTS), short(50))
            next(stream)
            stream.close()
        elif what == "fork" and turns and len(open_ones) < 5:  # a fork of nothing has random numbers of its own
            open_ones += [[fork, turns] for fork in session.fork(2)]
        elif what == "snapshot" and turns:
            kept.append((session.snapshot(), turns))
        elif what == "rewind" and kept:
            snapshot, before = rng.choice(kept)
            session.rewind(snapshot)
            one[1] = before
        elif what == "request":
            engine.generate([Request(prompt=PROMPTS[-1], sampling=short(2))] * 2)
    except (KeyboardInterrupt, KVKeepError):
        assert struck != (faults.fired, full.struck)
        return ["raised"]
    finally:
        faults.armed = None
    return [what]


if __name__ == "__main__":
    run_all(life, *map(int, sys.argv[1:]), called="live")

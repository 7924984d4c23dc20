"""Random schedules of an engine with faults in them, and what must hold whatever happens.

``python -m engine.faults 0 30``, in the folder of the tests, runs the schedules 0 to 29 and prints how requests ended.
"""

import functools
import json
import logging
import random
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch

from kvkeep.engine import Engine, Request
from kvkeep.engine.host_copies import Staging
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError, CapacityError
from kvkeep.policies._head_budgets import refusal
from kvkeep.policies.registry import parse

from .late import LateQueue
from .models import VOCABULARY, model
from .test_equal import POLICIES

PROMPTS = [
    tuple(random.Random(100 + i).choices(range(VOCABULARY), k=n)) for i, n in enumerate((1, 2, 4, 6, 7, 11, 15, 18))
]
OTHERS = ["h2o:recent=3", "snapkv:window=4,decode=grow", "streaming_llm:sinks=2", "scissorhands"]
LAYER_BUDGETS = [None, None, None, "ramp:0.3", "pyramid:3"]
HEAD_BUDGETS = [None, None, None, "ada:0.3", "global:0.1", "global:0"]
BUDGETS = [10, 14]
NEW = (1, 3, 8)
ROOMY = 64


class BoomError(Exception):
    """What is thrown."""


class Faults:
    """Where and when something fails, drawn anew for every step.

    Args:
        rng: decides.
        rate: probability of a fault in a step.
    """

    KINDS = ("layer", "policy", "sampler", "interrupt", "interrupted policy", "nan", "begin", "rows")

    def __init__(self, rng, rate):
        self._rng, self._rate = rng, rate
        self.armed, self.fired, self._countdown = None, 0, 0

    def arm(self):
        """Draw whether, and after how many calls, the next step fails."""
        self.armed = self._rng.choice(self.KINDS) if self._rng.random() < self._rate else None
        self._countdown = self._rng.randrange(6)

    def strikes(self, kind):
        """Whether this call is the one that fails."""
        if self.armed != kind:
            return False
        self._countdown -= 1
        if self._countdown >= 0 and kind not in ("sampler", "nan", "begin", "rows"):
            return False
        self.armed, self.fired = None, self.fired + 1
        return True

    def _failing(self, plain, kinds):
        """A function that throws what a kind of fault throws when it strikes."""

        @functools.wraps(plain)
        def run(*args, **options):
            for kind, error in kinds.items():
                if self.strikes(kind):
                    raise error
            return plain(*args, **options)

        return run

    @contextmanager
    def injected(self, network, monkeypatch):
        """Put the faults into a model, the layers' policies, the sampler and the rows."""
        from kvkeep.cache.layer import Layer
        from kvkeep.engine import swapping
        from kvkeep.engine.kv_manager import KVManager
        from kvkeep.engine.sampler import Sampler

        def before(module, args):
            if self.strikes("layer"):
                raise BoomError("in a layer")
            if self.strikes("interrupt"):
                raise KeyboardInterrupt

        def after(module, args, out):
            if self.strikes("nan"):
                out = out.clone()
                out[self._rng.randrange(len(out)), -1, 5] = torch.nan
            return out

        hooks = [block.mlp.register_forward_pre_hook(before) for block in network.model.layers]
        hooks.append(network.lm_head.register_forward_hook(after))
        with monkeypatch.context() as monkeypatch:
            policy = {"policy": BoomError("in a policy"), "interrupted policy": KeyboardInterrupt()}
            monkeypatch.setattr(Layer, "_view", self._failing(Layer._view, policy))
            monkeypatch.setattr(Sampler, "draw", self._failing(Sampler.draw, {"sampler": BoomError("in the sampler")}))
            monkeypatch.setattr(KVManager, "begin", self._failing(KVManager.begin, {"begin": MemoryError()}))
            monkeypatch.setattr(swapping, "SHARE", 1e9)  # rows change hands whatever the copies take
            monkeypatch.setattr(swapping, "LEAST", 1)
            monkeypatch.setattr(
                KVManager, "allocate", self._failing(KVManager.allocate, {"rows": MemoryError("no room")})
            )
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()


@functools.cache
def longest(name, prompt, policy, budget, rules, most):
    """The tokens of a request that has an engine for itself."""
    engine = Engine(model(name), policy=policy, budget=budget, rows=1, graphs=False, **dict(rules))
    return engine.generate([Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=most))])[0].token_ids


def alone(request, name, rules):
    """The tokens that a request gets alone; more are made at once, where its policy has room for them."""
    new, key = request.sampling.max_new_tokens, (name, request.prompt, request.policy, request.budget, rules)
    try:
        return longest(*key, NEW[-1])[:new]
    except CapacityError:
        return longest(*key, new)


def named(seed, head_budget):
    """The model of a schedule: where heads share budgets, in turn one with a sliding window."""
    return "gemma2" if head_budget and random.Random(seed + 0.75).random() < 0.5 else "llama"


def staged(engine, seed):
    """Lets half of the engines whose rows change hands copy beside their steps, often without success."""
    rng = random.Random(seed + 0.6)
    if engine._swapper is None or rng.random() < 0.5:
        return None

    def fails(name):
        if name in ("empty", "pinned", "copy", "half a copy", "hold", "query") and rng.random() < 0.05:
            raise torch.OutOfMemoryError("no room on the device")

    queue = LateQueue(rng, fails)
    engine._swapper.staging = Staging(queue)
    return queue


def schedule(seed, monkeypatch):
    """Run one schedule; returns how many requests ended how, and how many faults there were."""
    rng = random.Random(seed)
    double = seed % 10 == 0
    policies = [p for p in [*POLICIES, *OTHERS] if double or p != "knorm"]  # its ties hang on rounding
    head_budget = random.Random(seed + 0.25).choice(HEAD_BUDGETS)
    name = "llama-double" if double else named(seed, head_budget)
    if head_budget:
        policies = [p for p in policies if refusal(parse(p)) is None]
    policies = rng.sample(policies, rng.choice((1, 1, 2, 4)))
    layer_budget, chunk = rng.choice(LAYER_BUDGETS), rng.choice((None, 4, 5, 8))
    rules = {"prefill_chunk": chunk, "layer_budget": None if head_budget else layer_budget, "head_budget": head_budget}
    most = ROOMY if rng.random() < 0.3 else max(BUDGETS)
    try:
        engine = Engine(
            *(model(name),),
            policy=policies[0],
            budget=most,
            rows=rng.choice((1, 2, 3, 5)),
            **rules,
            graphs=rng.random() < 0.2,
            decode_every=random.Random(~seed).choice((1, 3, 128)),
            prompts_first=random.Random(seed + 0.25).random() < 0.3,
            host_rows=random.Random(seed + 0.5).choice((0, 0, 1, 4)),
        )
    except BudgetError:
        return {}, 0  # the layers of a pyramid are too small for what the policy protects
    queue = staged(engine, seed)
    faults = Faults(rng, rate=rng.choice((0.0, 0.1, 0.3)))
    asked, found, cancelled, bound = {}, {}, set(), 20
    with faults.injected(model(name), monkeypatch), queue.watched() if queue else nullcontext():
        left = rng.randrange(1, 8)
        while left or engine.busy:
            while left and rng.random() < 0.5:
                left -= 1
                new = rng.choice(NEW)
                request = Request(
                    prompt=rng.choice(PROMPTS),
                    sampling=SamplingParams(max_new_tokens=new),
                    policy=rng.choice(policies),
                    budget=rng.choice([most, *BUDGETS]),
                )
                try:
                    asked[engine.add(request)] = request
                    bound += 2 * (len(request.prompt) + new)
                except (BudgetError, CapacityError):
                    pass  # refused at the door: too small for it, or it never evicts
            if engine.busy and rng.random() < 0.05:
                number = rng.choice(list(engine._sequences) or [-1])
                if result := engine.cancel(number):
                    found[number] = result
                    cancelled.add(number)
            faults.arm()
            fired = faults.fired
            try:
                events = engine.step()
            except KeyboardInterrupt:
                events = engine._unreported[:]
                engine._unreported.clear()
            ended = {event.id: event.result for event in events if event.result}
            assert faults.fired > fired or all(r.finish_reason != "error" for r in ended.values()), ended
            found |= ended
            bound -= 1
            assert bound > 0, "it goes on for ever"
    check(engine, asked, found, name, tuple(rules.items()))
    ends = {}
    for result in found.values():
        ends[result.finish_reason] = ends.get(result.finish_reason, 0) + 1
    return ends, faults.fired


def check(engine, asked, found, name, rules):
    """Every request has ended, with the tokens that it gets alone; no row is taken; the engine still works."""
    assert found.keys() == asked.keys()
    for number, request in asked.items():
        result = found[number]
        want = alone(request, name, rules)
        if result.finish_reason == "length":
            assert result.token_ids == want, (request, result)
            assert result.error is None
        else:
            assert result.finish_reason in ("error", "cancelled")
            assert result.token_ids == want[: len(result.token_ids)], (request, result)
            assert bool(result.error) == (result.finish_reason == "error")
    assert not engine._scheduler.running
    assert not engine._scheduler.waiting
    assert not engine._sequences
    assert all(bool((block.store.positions < 0).all()) for block in engine._kv._blocks)
    again = list(asked.values())[:2]
    for request, result in zip(again, engine.generate(again), strict=True):
        assert result.token_ids == alone(request, name, rules)
    before = engine.memory_usage().allocated_bytes
    engine.generate(again)
    assert engine.memory_usage().allocated_bytes == before


def tally(one, first, last, *, called):
    """Run one case for each seed; return how many of what ended how, and how many faults there were."""
    ends, fired = Counter(), 0
    for seed in range(first, last):
        try:
            found, faults = one(seed, pytest.MonkeyPatch())
        except BaseException:
            print(f"{called} {seed}", file=sys.stderr)
            raise
        ends.update(found)
        fired += faults
    return {f"{called}s": last - first, "faults": fired, **ends}


def run_all(one, first, last, *, called):
    """Run one case for each seed; the numbers go to the standard output."""
    logging.disable()
    torch.set_num_threads(1)
    print(json.dumps(tally(one, first, last, called=called)))


if __name__ == "__main__":
    run_all(schedule, *map(int, sys.argv[1:]), called="schedule")

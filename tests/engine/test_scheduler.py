"""Who runs when: prompts share a run of the model, and running rows get tokens while prompts are read."""

import itertools
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweeps import sweep

from kvkeep import BudgetError
from kvkeep.engine import Engine, Request, scheduler
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import SHARED_TOKENS

from .models import alone, model
from .test_equal import CAPACITY, prompt_of

LONG = 1000
"""More tokens than any test generates."""


def watched(engine):
    """The runs of an engine's model, noted as they begin."""
    runs, plain = [], engine._runner.run

    def run(one, rows):
        runs.append(one)
        return plain(one, rows)

    engine._runner.run = run
    return runs


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Prompts and generated tokens have runs of their own, however short the prompts are."""
    monkeypatch.setattr(scheduler, "MIXED_TOKENS", {})


def sizes(runs):
    """The prompt tokens of each run, and 0 for a run of generated tokens."""
    return [sum(len(t) for b in run.batches for t in b.tokens) * (run.reads) for run in runs]


def ask(engine, length, new=4, seed=0, **options):
    return engine.add(Request(prompt=prompt_of(seed, length), sampling=SamplingParams(max_new_tokens=new), **options))


def drain(engine):
    found = {}
    while engine.busy:
        found |= {event.id: event.result for event in engine.step() if event.result}
    return found


@pytest.mark.parametrize("policy", ["h2o", "random", "scissorhands", "full"])
@pytest.mark.parametrize("whole", [True, False])
def test_prompts_share_a_run_and_get_the_tokens_that_they_get_alone(policy, whole, monkeypatch):
    """Rows 0 and 2 to 4 share runs; row 1 is busy. Without ``logits_to_keep`` all logits are there."""
    budget, chunk = 80 if policy == "full" else CAPACITY, 16
    engine = Engine(model("llama"), policy=policy, budget=budget, rows=5, prefill_chunk=chunk)
    if whole:
        monkeypatch.setattr(engine._runner, "_keeps_any", False)
    lengths = [1, 2, 40, 7, 20]
    first = [ask(engine, 1, 1), ask(engine, 2, 30, seed=1)]
    engine.step()
    runs, numbers = watched(engine), [ask(engine, n, seed=i) for i, n in enumerate(lengths) if i != 1]
    results = drain(engine)
    assert max(len(run.batches) for run in runs if run.reads) > 1
    for number, (i, n) in zip(numbers, [(i, n) for i, n in enumerate(lengths) if i != 1], strict=True):
        assert results[number].token_ids == alone("llama", prompt_of(i, n), 4, policy, budget, chunk)
    assert results[first[1]].token_ids == alone("llama", prompt_of(1, 2), 30, policy, budget, chunk)


def test_a_run_takes_what_fits_beside_the_oldest_prompt():
    engine = Engine(model("llama"), budget=CAPACITY, rows=6, prefill_chunk=32)
    ask(engine, 1, LONG)
    engine.step()
    runs = watched(engine)
    for i, length in enumerate((40, 20, 9, 30, 5)):
        ask(engine, length, LONG, seed=i)
    steps = []
    while not all(one.token_ids for one in engine._scheduler.running) or engine._scheduler.waiting:
        runs.clear()
        engine.step()
        steps.append(sizes(runs))
    # 32 of 40; its 8 with 20, which leaves no room for 9, but for none of 5 either: 8 + 20 = 28; 9 + 5; 30
    assert [step[0] for step in steps] == [32, 28, 14, 30]
    assert all(step[1:] == [0] for step in steps)


def test_with_nobody_waiting_small_chunks_share_a_longer_run():
    engine = Engine(model("llama"), budget=CAPACITY, rows=4, prefill_chunk=8)
    runs = watched(engine)
    for i in range(4):
        ask(engine, 24, 1, seed=i)
    drain(engine)
    assert sizes(runs) == [32, 32, 32]
    assert [len(run.batches) for run in runs] == [1, 1, 1]  # neighbours of one length: one batch


def test_policies_share_a_run():
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=4, prefill_chunk=16)
    runs = watched(engine)
    policies = ["h2o", "local", "tova", "h2o"]
    numbers = [ask(engine, 5 + 9 * i, seed=i, policy=policy) for i, policy in enumerate(policies)]
    results = drain(engine)
    assert len(runs[0].requests) == 4
    for i, (number, policy) in enumerate(zip(numbers, policies, strict=True)):
        assert results[number].token_ids == alone("llama", prompt_of(i, 5 + 9 * i), 4, policy, CAPACITY, 16)


@pytest.mark.parametrize(("every", "steps"), [(1, 16), (4, 4), (5, 3), (16, 1), (10**6, 1)])
def test_running_rows_get_a_token_for_so_many_prompt_tokens(every, steps):
    """After 16 prompt tokens; what is left over counts for the next run: 16 tokens are worth 3.2 steps of 5."""
    engine = Engine(model("llama"), budget=CAPACITY, rows=2, prefill_chunk=16, decode_every=every)
    running = ask(engine, 1, LONG)
    engine.step()
    runs = watched(engine)
    ask(engine, 64, 1)
    tokens, seen = 0, []
    while len([size for size in sizes(runs) if size]) < 4 or len(seen) < 3:
        tokens += sum(event.id == running for event in engine.step())
        seen = [i for i, size in enumerate(sizes(runs)) if size]
    between = [b - a - 1 for a, b in itertools.pairwise(seen)]
    assert all(steps <= n <= steps + 1 for n in between)
    assert tokens == sizes(runs).count(0)


@pytest.mark.slow
@pytest.mark.parametrize("examples", sweep([5, 200], lambda examples: examples == 5))
def test_everybody_gets_a_turn(examples):
    """A running row gets a token in every step, and waits for one run; the oldest prompt is in every run of prompts."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        rows=st.integers(1, 5),
        chunk=st.sampled_from([None, 1, 4, 30]),
        every=st.sampled_from([1, 3, 7, 128]),
        seed=st.integers(0, 10**6),
    )
    def run(rows, chunk, every, seed):
        rng = random.Random(seed)
        engine = Engine(model("llama"), budget=CAPACITY, rows=rows, prefill_chunk=chunk, decode_every=every)
        runs, without_prompt, read = watched(engine), 0, 0
        left = 6
        while left or engine.busy:
            while left and rng.random() < 0.5:
                left -= 1
                ask(engine, rng.randint(1, 40), rng.randint(1, 12), seed=left)
            scheduler = engine._scheduler
            ready = {one.id for one in scheduler.running if one.token_ids}
            runs.clear()
            events = {event.id for event in engine.step()}
            assert ready <= events
            prompts = [one for one in runs if one.reads]
            assert len(prompts) <= 1
            without_prompt, read = (0, sum(sizes(prompts))) if prompts else (without_prompt + 1, read)
            nobody_waits = not any(one.prompt_left for one in scheduler.running)
            assert nobody_waits or without_prompt <= math.ceil(read / every) + 1
            check_run(prompts, scheduler, chunk, waited_for=bool(ready))

    run()


def check_run(prompts, scheduler, chunk, *, waited_for):
    """The oldest prompt is fed; a run that running rows wait for is as long as a chunk at most."""
    for run in prompts:
        fed = {one.id for one in run.requests}
        assert all(one.id > min(fed) for one in scheduler.running if one.prompt_left and one.id not in fed)
        total = sum(len(tokens) for batch in run.batches for tokens in batch.tokens)
        if chunk and waited_for:
            assert total <= chunk
        assert len(fed) == 1 or total <= SHARED_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 4, 16])
def test_prompts_come_first_where_all_requests_together_shall_end_soonest(chunk):
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=4, prefill_chunk=chunk, prompts_first=True)
    runs, lengths, new = watched(engine), (40, 3, 17, 9, 30, 1), (9, 4, 9, 9, 5, 7)
    numbers = [ask(engine, length, few, seed=i) for i, (length, few) in enumerate(zip(lengths, new, strict=True))]
    results, widths = {}, []
    while engine.busy:
        runs.clear()
        results |= {event.id: event.result for event in engine.step() if event.result}
        unread = any(one.prompt_left for one in engine._scheduler.running)
        assert [run.reads for run in runs] == [True] if unread else len(runs) == 1
        widths += [len(run.requests) for run in runs if not run.reads]
    assert widths[:3] == [4, 4, 4]
    for i, number in enumerate(numbers):
        assert results[number].token_ids == alone("llama", prompt_of(i, lengths[i]), new[i], "h2o", CAPACITY, chunk)


@pytest.mark.slow
def test_running_rows_close_up_while_prompts_wait_behind_them(monkeypatch):
    """Of eight rows the first ones end early. A step then computes as many rows as run, and one that begins."""
    monkeypatch.setattr(scheduler, "SHARED_TOKENS", 16)
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=8, prefill_chunk=16)
    runs = watched(engine)
    numbers = [ask(engine, 16, 3, seed=i) for i in range(8)]
    results = drain(engine)
    for run in runs:
        if not run.reads:
            assert len(run.batches[0].rows) <= len(run.requests) + 1
    for i, number in enumerate(numbers):
        assert results[number].token_ids == alone("llama", prompt_of(i, 16), 3, "h2o", CAPACITY, 16)


@pytest.mark.parametrize("wrong", [0, -3, True, 1.5, "often", 10**40])
def test_a_pace_that_is_none_is_refused(wrong, no_checked_annotations):
    with pytest.raises(BudgetError, match="decode_every"):
        Engine(model("llama"), budget=CAPACITY, rows=1, decode_every=wrong)


def test_a_run_that_fails_ends_the_prompts_that_share_it_and_nobody_else():
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=4, prefill_chunk=16)
    running = ask(engine, 3, 8)
    engine.step()
    prompts = [ask(engine, 6, 1, seed=1), ask(engine, 2, 1, seed=2)]

    def fail(module, args):
        raise MemoryError

    hook = model("llama").model.layers[1].mlp.register_forward_pre_hook(fail)
    plain, engine._runner.run = engine._runner.run, lambda run, rows: unhooked(hook, plain, run, rows)
    results = drain(engine)
    assert [results[number].finish_reason for number in prompts] == ["error", "error"]
    assert results[running].token_ids == alone("llama", prompt_of(0, 3), 8, "h2o", CAPACITY, 16)


def unhooked(hook, plain, run, rows):
    """Run the model; a hook is gone after the first run, which fails."""
    try:
        return plain(run, rows)
    finally:
        hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("padding", [scheduler.PADDING, -1])
def test_pieces_of_one_token_with_and_without_padding(padding, monkeypatch):
    monkeypatch.setattr(scheduler, "PADDING", padding)
    engine = Engine(model("llama"), policy="scissorhands", budget=CAPACITY, rows=4, prefill_chunk=1, decode_every=1)
    lengths = (1, 20, 9, 17, 3)
    numbers = [ask(engine, length, seed=i) for i, length in enumerate(lengths)]
    results = drain(engine)
    for i, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        assert results[number].token_ids == alone("llama", prompt_of(i, length), 4, "scissorhands", CAPACITY, 1)


def test_rows_that_run_one_by_one_are_paid_one_by_one():
    """Under spatten a step of two rows is two runs of the model, worth twice as many prompt tokens."""
    engine = Engine(model("llama"), policy="spatten", budget=CAPACITY, rows=3, prefill_chunk=16, decode_every=8)
    for i in range(2):
        ask(engine, 1, LONG, seed=i)
    while not all(one.token_ids for one in engine._scheduler.running) or not engine._scheduler.running:
        engine.step()
    ask(engine, 64, 1)
    runs = watched(engine)
    for _ in range(4):
        engine.step()
    assert sizes(runs) == [16, 0, 0] * 4


@pytest.mark.parametrize("policy", ["h2o", "random", "scissorhands", "snapkv:window=2,decode=score"])
def test_few_prompt_tokens_share_a_run_with_the_running_rows(policy, monkeypatch):
    monkeypatch.setattr(scheduler, "MIXED_TOKENS", {"cpu": 9})
    engine = Engine(model("llama"), policy=policy, budget=CAPACITY, rows=3)
    first = ask(engine, 4, 12)
    engine.step()
    runs = watched(engine)
    numbers = [ask(engine, 9, seed=1)]
    engine.step()
    assert [len(run.batches) for run in runs] == [2]
    numbers.append(ask(engine, 10, seed=2))  # too long to share a run
    engine.step()
    assert [len(run.batches) for run in runs] == [2, 1, 1]
    results = drain(engine)
    assert results[first].token_ids == alone("llama", prompt_of(0, 4), 12, policy, CAPACITY, None)
    for number, (seed, length) in zip(numbers, ((1, 9), (2, 10)), strict=True):
        assert results[number].token_ids == alone("llama", prompt_of(seed, length), 4, policy, CAPACITY, None)

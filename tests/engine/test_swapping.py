"""More sequences in flight than rows: they take turns, and everybody gets the tokens that they get alone."""

import random

import pytest
import torch
from sweeps import sweep
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.engine import Engine, Request, admission, swapping
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError, InputError

from .models import alone
from .session_models import engine_of
from .test_equal import POLICIES, prompt_of
from .test_sessions import HYBRIDS

BUDGET = 14
KINDS = ("h2o", "full", "random", "adakv:window=4", "spatten", "scissorhands")


@pytest.fixture(autouse=True)
def restless(monkeypatch):
    """Rows change hands after every token, whatever the copies take."""
    monkeypatch.setattr(swapping, "SHARE", 1e9)
    monkeypatch.setattr(swapping, "LEAST", 1)


def wish(n, new=7, **options):
    options["sampling"] = SamplingParams(max_new_tokens=new, **options.pop("sampling", {}))
    return Request(prompt=prompt_of(n, 5 + n % 6), **options)


def budget_of(policy):
    found = kvkeep.parse(policy)
    return BUDGET if found.evicts and not found.grows else 64


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "chunk"),
    sweep([(p, c) for p in POLICIES for c in (None, 4)], lambda case: case[0] in KINDS and case[1] is None),
)
def test_everybody_gets_the_tokens_that_they_get_alone(policy, chunk):
    if chunk and kvkeep.parse(policy).cascades:
        return
    budget = budget_of(policy)
    engine = engine_of(policy, budget, rows=2, host_rows=3, prefill_chunk=chunk)
    requests = [wish(n) for n in range(7)]
    for one, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == alone("llama", one.prompt, 7, policy, budget, chunk)
        assert (result.cached_tokens, result.error) == (0, None)
    assert engine._swapper.swaps > 7
    assert not engine.busy
    assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_other_models(name):
    engine = engine_of("h2o:recent=2", name=name, rows=1, host_rows=2)
    requests = [wish(n) for n in range(4)]
    for one, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == alone(name, one.prompt, 7, "h2o:recent=2", 10, None)
    assert engine._swapper.swaps > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"kv_bits": bits} for bits in (4, 8, "k8v4")),
        {"kv_bits": 4, "head_budget": "ada:0.2"},
        {"positions": "slot"},
        {"head_budget": "ada:0.2"},
        {"graphs": True},
    ],
)
def test_other_slots(options):
    requests = [wish(n) for n in range(4)]
    want = [one.token_ids for one in engine_of("h2o", BUDGET, rows=1, **options).generate(requests)]
    engine = engine_of("h2o", BUDGET, rows=1, host_rows=2, **options)
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert engine._swapper.swaps > 4


@pytest.mark.slow
def test_results_say_the_same():
    requests = [
        wish(0, logprobs=2, pins=[(0, 3)], policy="snapkv:window=2"),
        wish(1, sampling={"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}, sequence=4),
        wish(2, sampling={"temperature": 0.8, "top_p": 0.9}, guard=0.3, policy="h2o:recent=2"),
        wish(3, policy="tova", budget=9),
        wish(4, prompt_logprobs=1),
        wish(5, new=1),
    ]
    apart = [engine_of("h2o", BUDGET).generate([one])[0] for one in requests]
    engine = engine_of("h2o", BUDGET, rows=2, host_rows=9)
    for one, want in zip(engine.generate(requests), apart, strict=True):
        for name in ("token_ids", "finish_reason", "budget", "guarded", "cached_tokens", "prompt_tokens"):
            assert getattr(one, name) == getattr(want, name), name
        assert one.lost_mass.decode == pytest.approx(want.lost_mass.decode, abs=1e-5)
        assert [entry.value for entry in one.logprobs] == pytest.approx(
            [entry.value for entry in want.logprobs], abs=1e-4
        )
        assert one.memory_usage.full_bytes == want.memory_usage.full_bytes
        assert len(one.prompt_logprobs) == len(want.prompt_logprobs)
    assert engine._swapper.swaps > 6


@pytest.mark.slow
def test_policies_that_need_other_rows_get_their_turn():
    policies = ["h2o", "pyramidkv:window=2,decode=score", "h2o", "spatten", "tova"]
    requests = [wish(n, policy=policy) for n, policy in enumerate(policies)]
    apart = [engine_of("h2o", BUDGET).generate([one])[0].token_ids for one in requests]
    found = engine_of("h2o", BUDGET, rows=1, host_rows=2).generate(requests)
    assert [one.token_ids for one in found] == apart


@pytest.mark.slow
def test_a_first_token_for_everybody():
    def firsts(host_rows):
        engine = engine_of(rows=1, host_rows=host_rows)
        for n in range(4):
            engine.add(wish(n, new=20))
        seen = []
        while engine.busy:
            seen += [event.id for event in engine.step()]
        return [seen.index(n) for n in range(4)]

    assert firsts(0) == [0, 20, 40, 60]
    assert max(firsts(3)) < 20
    assert max(firsts(1)[:2]) < 20 < firsts(1)[2]  # two in flight; the third begins when one of them has ended


@pytest.mark.slow
@pytest.mark.parametrize("host_rows", [1, 2, 5])
def test_no_more_than_so_many_wait_in_main_memory(host_rows):
    engine = engine_of(rows=2, host_rows=host_rows)
    for n in range(9):
        engine.add(wish(n, new=12))
    most = 0
    while engine.busy:
        engine.step()
        held = [one.hosted for one in engine._scheduler.waiting if one.hosted]
        bytes_ = sum(one.contents.nbytes for one in held)
        assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes + bytes_
        assert bytes_ <= 1.1 * host_rows * engine.row_bytes  # a copy has its positions twice
        most = max(most, len(held))
    assert most == host_rows


@pytest.mark.slow
def test_sessions_prefixes_and_equal_prompts(monkeypatch):
    from kvkeep.engine import scheduler

    monkeypatch.setattr(scheduler, "SHORTEST", 4)
    prompt = prompt_of(9, 9)

    def asked(host_rows):
        engine = engine_of("h2o", BUDGET, rows=1, host_rows=host_rows, prefill_chunk=4, prefix_memory=2**20)
        memory = engine.prefix(prompt_of(8, 10))
        session = engine.session()
        requests = [Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=6)) for _ in range(3)]
        requests += [wish(1, snapshot=memory), wish(2)]
        numbers = [engine.add(one) for one in requests]
        found = {}
        talked = [session.ask(prompt_of(n, 6), SamplingParams(max_new_tokens=5)).token_ids for n in (3, 4)]
        while engine.busy:
            found |= {event.id: event.result for event in engine.step() if event.result}
        swaps = engine._swapper.swaps if host_rows else 0
        return [(found[n].token_ids, found[n].cached_tokens) for n in numbers], talked, swaps

    *want, none = asked(0)
    *found, swaps = asked(4)
    assert found == want
    assert swaps > none == 0


@pytest.mark.slow
def test_cancelled_where_they_wait():
    engine = engine_of(rows=1, host_rows=3)
    numbers = [engine.add(wish(n, new=12)) for n in range(4)]
    for _ in range(6):
        engine.step()
    (held, *_) = [one for one in engine._scheduler.waiting if one.hosted]
    result = engine.cancel(held.id)
    assert (result.finish_reason, held.hosted) == ("cancelled", None)
    assert result.token_ids == alone("llama", held.request.prompt, 12, "h2o", 10, None)[: len(result.token_ids)]
    ended = {}
    while engine.busy:
        ended |= {event.id: event.result for event in engine.step() if event.result}
    assert ended.keys() == set(numbers) - {held.id}
    assert all(one.token_ids == alone("llama", prompt_of(n, 5 + n), 12, "h2o", 10, None) for n, one in ended.items())


def test_a_closed_engine_holds_nothing():
    engine = engine_of(rows=1, host_rows=3)
    for n in range(4):
        engine.add(wish(n, new=12))
    for _ in range(6):
        engine.step()
    engine.close()
    assert engine.memory_usage().allocated_bytes == 0


def test_a_sequence_whose_memory_cannot_be_copied_keeps_its_row(monkeypatch):
    def fails(self, row):
        raise MemoryError("no room")

    requests = [wish(n) for n in range(4)]
    want = [alone("llama", one.prompt, 7, "h2o", 10, None) for one in requests]
    engine = engine_of(rows=1, host_rows=3)
    monkeypatch.setattr(KVManager, "take", fails)
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert engine._swapper.swaps == 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["begin", "end", "take"])
def test_a_swap_that_fails_harms_nobody_else(where, error, monkeypatch):
    plain, rng = getattr(KVManager, where), random.Random(5)

    def fails(self, *args, **options):
        if rng.random() < 0.1:
            raise error
        return plain(self, *args, **options)

    engine = engine_of(rows=2, host_rows=2)
    asked = {engine.add(one): one for one in [wish(n) for n in range(8)]}
    ended, broken = {}, 0
    monkeypatch.setattr(KVManager, where, fails)
    while engine.busy:
        try:
            events = engine.step()
        except (MemoryError, KeyboardInterrupt):
            events, broken = [], broken + 1
        ended |= {event.id: event.result for event in events if event.result}
    monkeypatch.undo()
    assert ended.keys() == asked.keys()
    for number, result in ended.items():
        want = alone("llama", asked[number].prompt, 7, "h2o", 10, None)
        assert result.token_ids == want[: len(result.token_ids)]
        assert (result.finish_reason == "length") == (len(result.token_ids) == 7 and result.error is None)
    assert sum(one.finish_reason == "length" for one in ended.values()) >= 2
    again = [wish(n) for n in range(3)]
    assert [r.token_ids for r in engine.generate(again)] == [
        alone("llama", o.prompt, 7, "h2o", 10, None) for o in again
    ]


def test_threads_and_leavers():
    engine = engine_of(rows=1, host_rows=2)
    streams = [engine.stream(wish(n, new=9)) for n in range(3)]
    heads = [next(stream).token_id for stream in streams]
    assert heads == [alone("llama", prompt_of(n, 5 + n), 9, "h2o", 10, None)[0] for n in range(3)]
    streams[1].close()
    for n in (0, 2):
        rest = tuple(event.token_id for event in streams[n])
        assert (heads[n], *rest) == alone("llama", prompt_of(n, 5 + n), 9, "h2o", 10, None)
    assert not engine.busy


class Clock:
    """Time that passes by steps and copies alone."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.slow
@pytest.mark.parametrize(("step", "copy"), [(0.1, 0.01), (0.1, 0.3), (0.01, 0.01), (0.5, 0.001)])
def test_copies_take_a_small_share_of_the_time(step, copy, monkeypatch):
    clock, plain = Clock(), (KVManager.take, KVManager.begin)
    monkeypatch.setattr(swapping, "SHARE", 0.05)
    monkeypatch.setattr(swapping, "time", clock)

    def later(number, by):
        def run(self, *args, **options):
            clock.now += by
            return plain[number](self, *args, **options)

        return run

    monkeypatch.setattr(KVManager, "take", later(0, copy))
    engine = engine_of(rows=1, host_rows=1)
    hook = engine.model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + step))
    try:
        engine.generate([wish(n, new=150) for n in range(2)])
    finally:
        hook.remove()
    found = engine._swapper
    assert found.copied_s <= 0.05 * found.worked_s + copy
    assert found.copied_s > 0.025 * found.worked_s or found.swaps >= 140


def test_numbers_that_are_none_and_memory_that_is_not_there(monkeypatch):
    for wrong in (-1, 2**40):
        with pytest.raises(InputError, match="host_rows"):
            engine_of(host_rows=wrong)
    row = engine_of().row_bytes
    monkeypatch.setattr(admission, "free_bytes", lambda device: 10 * row)
    engine_of(rows=2, host_rows=8)
    with pytest.raises(BudgetError, match=r"host_rows=9 takes up to .* beside 2 rows.*`host_rows=8` or less"):
        engine_of(rows=2, host_rows=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(list(HYBRIDS), lambda name: name == "lfm2"))
def test_states_go_with_their_sequences(name):
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(HYBRIDS[name]()).eval()
    options = {"policy": "h2o", "budget": 10}
    requests = [wish(n) for n in range(3)]
    want = [Engine(network, rows=1, **options).generate([one])[0].token_ids for one in requests]
    engine = Engine(network, rows=1, host_rows=2, **options)
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert engine._swapper.swaps > 4

"""Copies beside the steps: rows that change hands wait for copies within the device only, and nobody gets other tokens.

Without a GPU: the copies of `late.LateQueue` come as late as they may, and it finds whoever does not wait for them.
"""

import copy
import random

import pytest
import torch
from sweeps import sweep
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.engine import Engine, admission, host_copies, swapping
from kvkeep.engine.host_copies import CudaCopyQueue, Staging, block_bytes, bound
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError

from .late import LateQueue
from .models import alone, model
from .session_models import engine_of
from .test_equal import POLICIES, prompt_of
from .test_swapping import HYBRIDS, Clock, budget_of, wish

BUDGET = 14
KINDS = ("h2o", "full", "random", "adakv:window=4", "spatten", "scissorhands")
BY_KIND = sorted(POLICIES, key=lambda policy: policy not in KINDS[:1])
OPERATIONS = ("empty", "pinned", "copy", "half a copy", "hold", "query", "wait", "synchronize")


@pytest.fixture(autouse=True)
def restless(monkeypatch):
    """Rows change hands after every token, whatever the copies take."""
    monkeypatch.setattr(swapping, "SHARE", 1e9)
    monkeypatch.setattr(swapping, "LEAST", 1)


@pytest.fixture
def queue():
    return LateQueue()


@pytest.fixture
def made(monkeypatch):
    """Makes an engine whose rows change hands through a queue."""

    def make(queue, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr("kvkeep.engine.engine.staging_for", lambda device: Staging(queue))
            return engine_of(*args, **options)

    return make


def everything(engine, queue, requests):
    """The tokens of all requests, while every operation is watched."""
    with queue.watched():
        results = engine.generate(requests)
    assert [one.error for one in results] == [None] * len(requests)
    assert queue.counts["hold"] > 3  # sequences that were there ahead of their turn
    assert engine._swapper.swaps > 4
    return [one.token_ids for one in results]


@pytest.mark.long
@pytest.mark.parametrize("moment", ["late", "random"])
@pytest.mark.parametrize(
    ("policy", "chunk"),
    sweep([(p, c) for p in BY_KIND for c in (None, 4)], lambda case: case[0] in KINDS and case[1] is None),
)
def test_everybody_gets_the_tokens_that_they_get_alone(policy, chunk, moment, made):
    if chunk and kvkeep.parse(policy).cascades:
        return
    queue = LateQueue(random.Random(3) if moment == "random" else None)
    budget = budget_of(policy)
    engine = made(queue, policy, budget, rows=2, host_rows=3, prefill_chunk=chunk)
    requests = [wish(n) for n in range(7)]
    want = [alone("llama", one.prompt, 7, policy, budget, chunk) for one in requests]
    assert everything(engine, queue, requests) == want
    assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 8},
        {"kv_bits": 4, "head_budget": "ada:0.2"},
        {"positions": "slot"},
        {"graphs": True},
        {"head_budget": "global:0.1"},
        {"layer_budget": "pyramid:3"},
    ],
    ids=str,
)
def test_other_slots(options, queue, made):
    requests = [wish(n) for n in range(4)]
    want = [one.token_ids for one in engine_of("h2o", BUDGET, rows=1, **options).generate(requests)]
    assert everything(made(queue, "h2o", BUDGET, rows=1, host_rows=2, **options), queue, requests) == want


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(list(HYBRIDS), lambda name: name == "lfm2"))
def test_states_go_with_their_sequences(name, queue, monkeypatch):
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(HYBRIDS[name]()).eval()
    requests = [wish(n) for n in range(3)]
    want = [Engine(network, rows=1, policy="h2o", budget=10).generate([one])[0].token_ids for one in requests]
    monkeypatch.setattr("kvkeep.engine.engine.staging_for", lambda device: Staging(queue))
    engine = Engine(network, rows=1, host_rows=2, policy="h2o", budget=10)
    assert everything(engine, queue, requests) == want


@pytest.mark.slow
def test_requests_of_all_kinds(queue, made):
    """Sessions, memories, pins, other policies and budgets, sampling."""

    def asked(engine):
        memory = engine.prefix(prompt_of(8, 10))
        session = engine.session()
        requests = [wish(1, snapshot=memory), wish(2, pins=[(0, 3)], policy="tova", budget=9)]
        requests += [wish(3, sampling={"temperature": 0.8, "top_p": 0.9}, sequence=4), wish(4, policy="spatten")]
        numbers = [engine.add(one) for one in requests]
        found = {}
        talked = [session.ask(prompt_of(n, 6), SamplingParams(max_new_tokens=5)).token_ids for n in (3, 4)]
        while engine.busy:
            found |= {event.id: event.result for event in engine.step() if event.result}
        return [found[n].token_ids for n in numbers], talked

    want = asked(engine_of("h2o", BUDGET, rows=1, prefill_chunk=None))
    engine = made(queue, "h2o", BUDGET, rows=1, host_rows=4)
    with queue.watched():
        assert asked(engine) == want
    assert queue.counts["hold"] > 3


def broken(rng, name, rate=0.2):
    """What an operation of a queue raises now and then."""

    def fails(called):
        if called == name and rng.random() < rate:
            raise torch.OutOfMemoryError("no room on the device")

    return fails


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *OPERATIONS])
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_with_cancels_and_failures(seed, name, made):
    rng = random.Random(f"{seed} {name}")
    queue = LateQueue(rng if seed else None, broken(rng, name))
    bits = rng.choice((None, 8))
    engine = made(queue, "h2o", BUDGET, rows=rng.choice((1, 2)), host_rows=rng.choice((1, 2, 4)), kv_bits=bits)
    row = bound(max(engine._kv.memory_of(0).allocated_bytes, engine.row_bytes))
    asked, ended, cancelled = {}, {}, set()
    for n in range(10):
        one = wish(n, new=rng.choice((3, 8)), policy=rng.choice(("h2o", "tova", "local")), budget=rng.choice((8, 14)))
        asked[engine.add(one)] = one
    with queue.watched():
        while engine.busy:
            ended |= {event.id: event.result for event in engine.step() if event.result}
            waiting = sum(one.hosted.contents.nbytes for one in engine._scheduler.waiting if one.hosted)
            copies = engine._swapper.staging.nbytes
            assert engine.memory_usage().allocated_bytes == engine._kv.memory().allocated_bytes + waiting + copies
            if rng.random() < 0.1 and (number := rng.choice([*engine._sequences, -1])) >= 0:
                ended[number] = engine.cancel(number)
                cancelled.add(number)
    assert queue.most_bytes <= 2 * row
    assert ended.keys() == asked.keys()
    for number, result in ended.items():
        one = asked[number]
        plain = Engine(model("llama"), policy="h2o", budget=BUDGET, rows=1, kv_bits=bits)
        want = plain.generate([one])[0].token_ids
        assert result.token_ids == want[: len(result.token_ids)]
        if result.finish_reason == "error":
            assert name in ("wait", "synchronize"), result.error
        elif number not in cancelled:
            assert result.token_ids == want
    assert queue.counts.get(name, 1)
    engine.close()
    assert engine.memory_usage().allocated_bytes == 0


def test_at_most_two_copies_lie_on_the_device(queue, made):
    engine = made(queue, rows=2, host_rows=4)
    for n in range(8):
        engine.add(wish(n, new=12))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine._swapper.staging.nbytes)
    row = bound(engine.row_bytes)
    assert row < most <= queue.most_bytes <= 2 * row


def stopped(engine, requests=4):
    """An engine in the middle of its work, and the sequence that has been brought to the device."""
    for n in range(requests):
        engine.add(wish(n, new=12))
    while True:
        engine.step()
        staged = [one for one in engine._scheduler.waiting if one.hosted and one.hosted.contents.staged]
        if staged and engine._swapper.swaps > 3:
            (one,) = staged
            return one


def finish(engine, requests=4, without=()):
    ended = {}
    while engine.busy:
        ended |= {event.id: event.result for event in engine.step() if event.result}
    for n in set(range(requests)) - set(without):
        assert ended[n].token_ids == alone("llama", prompt_of(n, 5 + n % 6), 12, "h2o", 10, None)


@pytest.mark.slow
def test_the_next_one_is_cancelled(queue, made):
    engine = made(queue, rows=1, host_rows=3)
    with queue.watched():
        one = stopped(engine)
        before = engine._swapper.staging.nbytes
        assert engine.cancel(one.id).finish_reason == "cancelled"
        assert engine._swapper.staging.nbytes < before
        finish(engine, without=[one.id])


def test_a_closed_engine_holds_nothing(queue, made):
    engine = made(queue, rows=1, host_rows=3)
    stopped(engine)
    assert engine._swapper.staging._leaving is not None
    engine.close()
    assert engine.memory_usage().allocated_bytes == 0
    assert queue.device_bytes() == 0


def test_a_memory_keeps_its_packs(queue, made):
    """Layers of equal shape go into a row with one operation per tensor, wherever they come from."""
    engine = made(queue, "full", 32, rows=1, host_rows=3)
    with queue.watched():
        pinned = stopped(engine).hosted.contents
        there = pinned.load()
        pinned.staged = None
        here = pinned.load()
    for contents in (there, here):
        (pack,) = {id(one.pack): one.pack for one in contents.layers}.values()
        assert all(one.tensors is part for one, part in zip(contents.layers, pack.parts, strict=True))
        assert {x.untyped_storage().data_ptr() for x in pack.tensors.values()} == {
            x.untyped_storage().data_ptr() for one in contents.layers for x in one.tensors.values()
        }
    for one, other in zip(there.layers, here.layers, strict=True):
        assert all(torch.equal(x, other.tensors[name]) for name, x in one.tensors.items())
        assert torch.equal(one.positions, other.positions)


@pytest.mark.slow
def test_another_one_goes_first(queue, made):
    engine = made(queue, rows=1, host_rows=3)
    with queue.watched():
        one = stopped(engine)
        pinned = one.hosted.contents
        engine._scheduler.waiting.rotate(-1)
        first = engine._scheduler.next_hosted(engine._kv.takes)
        assert first is not one
        assert not engine._swapper.staging.prefetch(first.hosted.contents)
        assert pinned.staged is None
        assert first.hosted.contents.staged is None  # the other one is still on its way
        queue.until(queue.asked)
        assert engine._swapper.staging.prefetch(first.hosted.contents)
        assert first.hosted.contents.staged
        finish(engine)
    assert queue.most_bytes <= 2 * bound(engine.row_bytes)


@pytest.mark.slow
def test_a_row_becomes_free_before_the_turn(queue, made):
    engine = made(queue, rows=1, host_rows=3)
    with queue.watched():
        one = stopped(engine)
        (running,) = engine._scheduler.running
        engine.cancel(running.id)
        holds = queue.counts["hold"]
        engine.step()
        assert (one.row, one.hosted, queue.counts["hold"]) == (0, None, holds + 1)
        finish(engine, without=[running.id])


@pytest.mark.slow
def test_rows_are_replaced(queue, made):
    """Rows of another policy get the memory of what was brought for the rows before."""
    policies = ["h2o", "h2o", "pyramidkv:window=2,decode=score", "h2o", "spatten", "tova"]
    requests = [wish(n, policy=policy) for n, policy in enumerate(policies)]
    apart = [engine_of("h2o", BUDGET).generate([one])[0].token_ids for one in requests]
    assert everything(made(queue, "h2o", BUDGET, rows=1, host_rows=2), queue, requests) == apart


def test_without_room_rows_change_hands_as_ever(queue, made):
    engine = made(queue, rows=1, host_rows=3)
    engine._swapper.staging.most_bytes = 0
    requests = [wish(n) for n in range(4)]
    want = [alone("llama", one.prompt, 7, "h2o", 10, None) for one in requests]
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert queue.counts.keys() == {"synchronize"}
    assert engine._swapper.swaps > 4


@pytest.mark.long
def test_a_copy_that_does_not_fit_is_not_tried_again(made):
    def fails(name):
        if name == "empty":
            raise torch.OutOfMemoryError("no room")

    queue = LateQueue(fails=fails)
    engine = made(queue, rows=1, host_rows=3)
    requests = [wish(n, new=12) for n in range(3)]
    want = [alone("llama", one.prompt, 12, "h2o", 10, None) for one in requests]
    with queue.watched():
        assert [one.token_ids for one in engine.generate(requests)] == want
    assert queue.counts["empty"] <= engine._swapper.swaps
    assert "hold" not in queue.counts


def test_layers_on_several_devices_wait_for_their_copies(queue, made):
    queue.device = torch.device("cuda:7")
    requests = [wish(n) for n in range(4)]
    engine = made(queue, rows=1, host_rows=2)
    want = [alone("llama", one.prompt, 7, "h2o", 10, None) for one in requests]
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert "copy" not in queue.counts


def test_on_a_cpu_there_is_none():
    assert host_copies.staging_for(torch.device("cpu")) is None
    assert engine_of(host_rows=2)._swapper.staging is None


@pytest.mark.long
def test_copies_have_what_rows_leave_of_a_limit(queue, made):
    row = engine_of().row_bytes
    engine = made(queue, rows=2, kv_memory=10 * row, host_rows=2)
    assert engine._swapper.staging.most_bytes == 2 * bound(row)
    assert engine._kv._most_bytes == 10 * row - 2 * bound(row)
    engine = made(queue, rows=None, kv_memory=4 * row, host_rows=2)  # all rows that fit
    assert (engine.rows, engine._swapper.staging.most_bytes) == (4, 0)
    engine = made(queue, rows=2, kv_memory=10 * row, host_rows=2)
    requests = [wish(n, policy=policy) for n, policy in enumerate(("h2o", "spatten", "h2o", "tova", "h2o"))]
    apart = [engine_of().generate([one])[0].token_ids for one in requests]
    assert [one.token_ids for one in engine.generate(requests)] == apart
    assert queue.counts["hold"] > 1
    assert queue.most_bytes <= 2 * bound(row)


def test_blocks_of_pinned_memory_are_powers_of_two_and_full():
    for n in (1, 4096, 5000, 70_000, 2**20 + 1, 134_217_728 + 16_384):
        size = block_bytes(n)
        blocks = -(-n // size)
        assert size & (size - 1) == 0
        assert blocks < 32
        assert blocks * size - n < max(4096, n / 15)


def test_main_memory_for_whole_blocks(queue, made, monkeypatch):
    row = engine_of().row_bytes
    each = -(-row // block_bytes(row)) * block_bytes(row)
    monkeypatch.setattr(admission, "free_bytes", lambda device: 2 * row + 8 * each)
    made(queue, rows=2, host_rows=8)
    with pytest.raises(BudgetError, match=r"host_rows=9 takes up to .* beside 2 rows.*`host_rows=8` or less"):
        made(queue, rows=2, host_rows=9)


def test_what_steps_wait_for_is_measured(queue, made, monkeypatch):
    """The device goes on when Python does: its work before a swap is no copy, and the copies of a swap are."""
    clock, behind = Clock(), [0.0]
    monkeypatch.setattr(swapping, "time", clock)

    def waits():
        clock.now += behind[0]
        behind[0] = 0.0

    def later(plain, seconds):
        def run(self, *args, **options):
            behind[0] += seconds
            return plain(self, *args, **options)

        return run

    monkeypatch.setattr(queue, "synchronize", waits)
    monkeypatch.setattr(KVManager, "take", later(KVManager.take, 0.5))
    monkeypatch.setattr(KVManager, "begin", later(KVManager.begin, 0.25))
    monkeypatch.setattr(queue, "empty", lambda n, plain=queue.empty: setattr(clock, "now", clock.now + 2) or plain(n))
    engine = made(queue, rows=1, host_rows=1)
    for n in range(2):
        engine.add(wish(n, new=20))
    turns = engine._swapper
    while engine.busy and turns.swaps < 6:
        behind[0] += 10.0  # what the device has not done yet of earlier steps
        engine.step()
    copies = 0.75 * turns.swaps + 2 * queue.counts["empty"]
    assert turns.swaps == 6
    assert turns.copied_s == pytest.approx(copies)
    assert turns.worked_s == pytest.approx(clock.now - copies)
    assert turns._cost_s == pytest.approx(2.75)


class Recorded:
    """Streams and tensors that note what they are asked for, in order."""

    def __init__(self, name, calls):
        self.name, self._calls = name, calls

    def __getattr__(self, called):
        def note(*args, **options):
            self._calls.append((self.name, called, *[getattr(one, "name", one) for one in args], *options.values()))
            return RecordedEvent("event", self._calls)

        return note


class RecordedEvent(Recorded):
    def query(self):
        raise AssertionError

    def synchronize(self):
        raise AssertionError


def test_what_is_asked_of_cuda(monkeypatch, no_checked_annotations):
    calls = []
    side, steps = Recorded("side", calls), Recorded("steps", calls)

    class Use:
        def __init__(self, stream):
            self.name = stream.name

        def __enter__(self):
            calls.append(("enter", self.name))

        def __exit__(self, *error):
            calls.append(("leave", self.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", Use)
    pinned, there = Recorded("pinned", calls), Recorded("there", calls)
    pinned.is_cuda, there.is_cuda = False, True
    queue = CudaCopyQueue(torch.device("cuda:1"))
    event = queue.copy([(pinned, there)])
    queue.hold(event)
    queue.synchronize()
    assert calls == [
        ("side", "wait_stream", "steps"),
        ("enter", "side"),
        ("there", "record_stream", "side"),
        ("there", "copy_", "pinned", True),
        ("side", "record_event"),
        ("leave", "side"),
        ("steps", "wait_event", "event"),
        ("steps", "synchronize"),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"head_budget": "ada:0.2"}, {"graphs": False}], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "tova", "spatten"])
def test_on_a_gpu(policy, options):
    if policy == "spatten" and "head_budget" in options:
        return
    network = copy.deepcopy(model("llama")).to("cuda")
    requests = [wish(n, new=24) for n in range(6)]
    given = {"policy": policy, "budget": BUDGET, "rows": 2, **options}
    want = [one.token_ids for one in Engine(network, **given).generate(requests)]
    for most_bytes in (None, 0):
        engine = Engine(network, host_rows=3, **given)
        engine._swapper.staging.most_bytes = most_bytes
        assert [one.token_ids for one in engine.generate(requests)] == want
        assert engine._swapper.swaps > 12
        assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes
        engine.close()

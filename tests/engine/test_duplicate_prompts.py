"""Equal prompts are read once, and every answer is the one that its request gets alone."""

import pytest
from sweeps import sweep

import kvkeep
from kvkeep.engine import Request, scheduler
from kvkeep.engine.sampling_params import SamplingParams

from .models import alone, model
from .session_models import engine_of
from .test_conversations import CONTROL, MORE, QUESTION, anew, ask, left_out_of, no_control, talk_engine, told
from .test_conversations import wish as turn
from .test_equal import POLICIES, prompt_of

PROMPT = prompt_of(3, 13)
KINDS = ("h2o", "full", "random", "adakv:window=4", "spatten", "scissorhands")


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(scheduler, "SHORTEST", 4)


def wish(prompt=PROMPT, new=6, **options):
    return Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=new, **options.pop("sampling", {})), **options)


@pytest.fixture
def read():
    """The number of tokens of each run of the model."""
    counted = []

    def count(module, args, given):
        counted.append(given["input_ids"].shape[1])

    hook = model("llama").register_forward_pre_hook(count, with_kwargs=True)
    yield counted
    hook.remove()


@pytest.mark.parametrize(
    ("policy", "chunk"),
    sweep([(p, c) for p in POLICIES for c in (None, 4)], lambda case: case[0] in KINDS and case[1] is None),
)
def test_equal_prompts_are_read_once(policy, chunk, read):
    if chunk and kvkeep.parse(policy).cascades:
        return
    budget = 14 if kvkeep.parse(policy).evicts and not kvkeep.parse(policy).grows else 64
    engine = engine_of(policy, budget, rows=3, prefill_chunk=chunk)
    want = alone("llama", PROMPT, 8, policy, budget, chunk)
    read.clear()
    found = engine.generate([wish(new=n) for n in (6, 1, 8, 3, 6)])
    assert [result.token_ids for result in found] == [want[:n] for n in (6, 1, 8, 3, 6)]
    assert [result.cached_tokens for result in found] == [0, 13, 13, 13, 13]
    assert [n for n in read if n > 1] == ([4, 4, 4] if chunk else [13])
    assert not engine.busy
    assert all(result.ttft_s >= 0 <= result.prefill_s for result in found)


def test_each_draws_its_own_tokens_as_alone():
    requests = [
        wish(sequence=n, sampling={"temperature": 1.0, "repetition_penalty": 1.3}, logprobs=2) for n in range(5)
    ]
    found = engine_of(rows=3).generate(requests)
    apart = [engine_of().generate([request])[0] for request in requests]
    assert [one.token_ids for one in found] == [one.token_ids for one in apart]
    assert len({one.token_ids for one in found}) == 5
    assert [[entry.token_id for entry in one.logprobs] for one in found] == [list(one.token_ids) for one in apart]


def test_only_equal_settings_share():
    engine = engine_of("h2o", 14, rows=8)
    ways = [{}, {"policy": "tova"}, {"budget": 9}, {"sequence": 4}]
    found = engine.generate([wish(**way) for way in ways])
    assert [result.cached_tokens for result in found] == [0, 0, 0, 13]
    found = engine.generate([wish(policy="random", sequence=n) for n in (0, 1, 1)])
    assert [result.cached_tokens for result in found] == [0, 0, 13]
    assert engine.generate([wish(prompt_of(1, 3))] * 2)[1].cached_tokens == 0  # too short to wait for


def test_questions_to_one_memory_share_their_prompts():
    engine = engine_of()
    prefix = engine.prefix(prompt_of(8, 20))
    found = engine.generate([wish(snapshot=prefix)] * 3)
    assert len({result.token_ids for result in found}) == 1
    assert [result.cached_tokens for result in found] == [20, 33, 33]
    assert {result.prompt_tokens for result in found} == {33}


def test_nobody_waits_for_a_reader_whose_left_out_messages_were_recalled_once_it_has_read(monkeypatch):
    with talk_engine(monkeypatch) as engine:
        _, shorter, _ = left_out_of(engine)
        assert ask(engine, shorter).dropped_tokens == 31
        engine.add(turn(shorter))
        results = [event.result for _ in range(20) for event in engine.step() if event.result]
        assert [result.finish_reason for result in results] == ["length"]
        assert not engine.busy


def test_who_waits_gets_the_prompt_in_which_left_out_messages_were_recalled(monkeypatch):
    with talk_engine(monkeypatch) as engine:
        whole, shorter, gone = left_out_of(engine)
        for request in [turn(shorter) for _ in range(3)]:
            engine.add(request)
        events = [event for _ in range(20) for event in engine.step()]
        found = [event.result for event in events if event.result]
        assert len({(result.token_ids, result.prompt_tokens, result.dropped_tokens) for result in found}) == 1
        assert {(result.prompt_tokens, result.skipped_tokens) for result in found} == {(len(shorter), 31)}
        assert [result.cached_tokens for result in found[1:]] == [len(shorter)] * 2
        assert all(event.read_tokens >= 0 and event.prompt_tokens == len(shorter) for event in events if event.text)
        # each is kept with its own tokens, and goes on
        rest = [*found[0].token_ids, *told(no_control(QUESTION)), CONTROL]
        more = ask(engine, [*shorter, *rest])
        read = len(whole) - len(told(MORE)) - 3
        assert more.token_ids == anew([*whole, *rest], policy="full", budget=200, drops=[(read, [gone])])


def test_who_has_no_room_for_the_recalled_messages_reads_its_own_prompt(monkeypatch):
    """The reader's prompt has become longer, and with this one's answer longer than the model was trained for."""
    with talk_engine(monkeypatch) as engine:
        whole, shorter, _ = left_out_of(engine)
        monkeypatch.setattr(
            engine._admission, "fits", lambda tokens, sampling: tokens < len(whole) or sampling.max_new_tokens < 9
        )
        for request in (turn(shorter), turn(shorter, new=9)):
            engine.add(request)
        found = [event.result for _ in range(40) for event in engine.step() if event.result]
        assert [(result.dropped_tokens, len(result.token_ids)) for result in found] == [(31, 5), (0, 9)]
        assert found[1].token_ids == anew(shorter, policy="full", budget=200, new=9)
        assert not engine.busy


def test_a_request_that_comes_after_the_prompt_was_read_reads_it_itself():
    engine = engine_of(rows=4)
    first = engine.add(wish(new=20))
    engine.step()
    second = engine.add(wish())
    results = {}
    while engine.busy:
        results.update((event.id, event.result) for event in engine.step() if event.result)
    assert results[first].cached_tokens == results[second].cached_tokens == 0
    assert results[second].token_ids == results[first].token_ids[:6]


def test_a_guard_that_chooses_a_smaller_budget_keeps_no_later_request_waiting():
    options = {"policy": "h2o:recent=2", "budget": 16, "rows": 2}
    engine, request = engine_of(**options), wish(prompt_of(1, 40), guard=1.0)
    (alone_,) = engine_of(**options).generate([wish(prompt_of(1, 40), budget=4)])
    for _ in range(2):
        numbers, results = [engine.add(request) for _ in range(3)], {}
        for _ in range(60):
            results.update((event.id, event.result) for event in engine.step() if event.result)
        assert [(results[n].token_ids, results[n].budget, results[n].guarded) for n in numbers] == [
            (alone_.token_ids, 4, True)
        ] * 3
        assert not engine._duplicates._readers


def test_one_that_ends_with_its_first_token_says_what_its_prompt_took_and_lost():
    options = {"policy": "h2o:recent=2", "budget": 16}
    requests = [wish(prompt_of(1, 40), n, guard=1.0) for n in (5, 1, 4, 1)]
    found, apart = engine_of(**options).generate(requests), [engine_of(**options).generate(one)[0] for one in requests]
    for one, other in zip(found, apart, strict=True):
        assert (one.budget, one.guarded, one.memory_usage) == (4, True, other.memory_usage)
        assert one.lost_mass.prompt == pytest.approx(other.lost_mass.prompt)
        assert (one.lost_mass.decode is None) == (len(one.token_ids) == 1)
    engine = engine_of(**options)
    numbers = [engine.add(one) for one in [wish(prompt_of(1, 40), 9)] * 3]
    engine.step()
    assert engine.cancel(numbers[2]).memory_usage.allocated_bytes == 0


@pytest.mark.parametrize("when", ["waiting", "reading"])
def test_the_reader_leaves_and_another_one_reads(when):
    engine = engine_of(rows=2, prefill_chunk=4)
    numbers = [engine.add(wish()) for _ in range(4)]
    if when == "reading":
        engine.step()
    engine.cancel(numbers[0])
    engine.cancel(numbers[2])
    results = {}
    while engine.busy:
        results.update((event.id, event.result) for event in engine.step() if event.result)
    want = alone("llama", PROMPT, 6, "h2o", 10, 4)
    assert [results[numbers[i]].token_ids for i in (1, 3)] == [want] * 2
    assert [results[numbers[i]].cached_tokens for i in (1, 3)] == [0, 13]
    assert not len(engine._duplicates)
    assert not engine._duplicates._readers


def test_a_reader_that_fails_harms_no_other():
    engine = engine_of(rows=2, prefill_chunk=4)
    numbers = [engine.add(wish()) for _ in range(3)]
    engine.step()

    def fail(*args):
        hook.remove()
        raise RuntimeError("once")

    hook = model("llama").register_forward_pre_hook(fail)
    results = {}
    while engine.busy:
        results.update((event.id, event.result) for event in engine.step() if event.result)
    assert [results[number].finish_reason for number in numbers] == ["error", "length", "length"]
    assert results[numbers[2]].token_ids == alone("llama", PROMPT, 6, "h2o", 10, 4)


def test_closing_ends_those_that_wait():
    engine = engine_of()
    numbers = [engine.add(wish()) for _ in range(5)]
    engine.close()
    assert not engine._sequences
    assert not len(engine._duplicates)
    assert numbers == list(range(5))


def test_requests_are_not_taken_without_end_while_twins_wait(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST", 5)
    engine, taken = engine_of(rows=2), []

    def source():
        for n in range(50):
            taken.append(n)
            yield wish(new=2)

    done = 0
    for _ in engine.run(source()):
        assert len(taken) <= done + 2 + 2 + 5 + 1
        done += 1
    assert done == 50

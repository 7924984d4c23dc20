"""Common beginnings of prompts are read once, and change no token."""

import pytest
from sweeps import sweep

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError

from .models import alone, model
from .test_equal import POLICIES, prompt_of

CHUNK = 4
BUDGET = 10
PLENTY = 10**9
COMMON = prompt_of(1, 11)
KINDS = ("h2o", "full", "random", "nacl", "adakv:window=4", "blend")
CHUNKED = [policy for policy in POLICIES if not kvkeep.parse(policy).cascades]


def engine_of(policy="h2o", budget=BUDGET, memory=PLENTY, **options):
    options = {"rows": 2, "prefill_chunk": CHUNK, **options}
    return Engine(model("llama"), policy=policy, budget=budget, prefix_memory=memory, **options)


def wish(prompt, new=5, **options):
    return Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=new), **options)


def run(engine, *requests):
    return [engine.generate([request])[0] for request in requests]


@pytest.mark.long
@pytest.mark.parametrize("policy", sweep(CHUNKED, KINDS.__contains__))
def test_a_common_beginning_is_read_once_and_changes_no_token(policy):
    budget = BUDGET + 4 if kvkeep.parse(policy).evicts else 64
    prompts = [COMMON, COMMON + prompt_of(2, 6), COMMON[:9] + prompt_of(3, 3), COMMON[:8], prompt_of(4, 9)]
    found = run(engine_of(policy, budget), *map(wish, prompts))
    assert [result.cached_tokens for result in found] == [0, 8, 8, 4, 0]
    for prompt, result in zip(prompts, found, strict=True):
        assert result.token_ids == alone("llama", prompt, 5, policy, budget, CHUNK)
        assert result.prompt_tokens == len(prompt)


@pytest.mark.slow
def test_requests_that_run_at_once_share_what_is_there_when_they_begin():
    engine = engine_of(rows=1)
    prompts = [COMMON + prompt_of(i, 3) for i in range(4)]
    found = engine.generate(list(map(wish, prompts)))
    assert [result.cached_tokens for result in found] == [0, 8, 8, 8]
    for prompt, result in zip(prompts, found, strict=True):
        assert result.token_ids == alone("llama", prompt, 5, "h2o", BUDGET, CHUNK)


@pytest.mark.slow
def test_other_policies_and_budgets_share_nothing():
    engine = engine_of()
    ways = [{}, {"policy": "tova"}, {"budget": 9}, {"policy": "h2o:recent=3"}, {"policy": "h2o"}]
    found = run(engine, *(wish(COMMON, **way) for way in ways))
    assert [result.cached_tokens for result in found] == [0, 0, 0, 0, 8]
    for way, result in zip(ways, found, strict=True):
        want = alone("llama", COMMON, 5, way.get("policy", "h2o"), way.get("budget", BUDGET), CHUNK)
        assert result.token_ids == want


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "shared"), [("random", 0), ("h2o", 8)])
def test_random_policies_share_within_one_sequence_only(policy, shared):
    engine = engine_of(policy)
    first, other, again = run(engine, *(wish(COMMON, sequence=n) for n in (0, 1, 1)))
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, shared, 8)
    plain = engine_of(policy, memory=0)
    assert [one.token_ids for one in (first, other)] == [
        plain.generate([wish(COMMON, sequence=n)])[0].token_ids for n in (0, 1)
    ]
    assert again.token_ids == other.token_ids


def test_least_recently_used_memories_go_first():
    engine = engine_of()
    run(engine, wish(prompt_of(9, 5), 1))
    one = engine._prefix_cache.held_bytes  # a single border
    engine = engine_of(memory=int(2.5 * one))
    a, b, c = (prompt_of(i, 5) for i in range(3))
    found = run(engine, *(wish(prompt, 1) for prompt in (a, b, a, c, a, b)))
    assert [result.cached_tokens for result in found] == [0, 0, 4, 0, 4, 0]
    assert len(engine._prefix_cache) == 2
    assert 0 < engine._prefix_cache.held_bytes <= 2.5 * one


def test_memory_that_holds_not_one_border_keeps_none():
    engine = engine_of(memory=10)
    assert [result.cached_tokens for result in run(engine, wish(COMMON), wish(COMMON))] == [0, 0]
    assert engine._prefix_cache.held_bytes == 0


def test_without_prefix_memory_nothing_is_kept():
    engine = Engine(model("llama"), policy="h2o", budget=BUDGET, prefill_chunk=CHUNK)
    assert [result.cached_tokens for result in run(engine, wish(COMMON), wish(COMMON))] == [0, 0]


def test_a_closed_engine_gives_the_memory_back():
    engine = engine_of()
    run(engine, wish(COMMON))
    engine.close()
    assert len(engine._prefix_cache) == engine._prefix_cache.held_bytes == 0


@pytest.mark.parametrize(
    ("memory", "chunk", "match"),
    [(1000, None, "prefill_chunk"), (-1, 4, "outside"), (1.5, 4, "whole"), ("1G", 4, "whole"), (True, 4, "whole")],
)
def test_numbers_that_make_no_sense_are_refused(memory, chunk, match, no_checked_annotations):
    with pytest.raises(InputError, match=match):
        engine_of(memory=memory, prefill_chunk=chunk)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_other_architectures(name):
    engine = Engine(model(name), policy="h2o", budget=BUDGET, prefill_chunk=CHUNK, prefix_memory=PLENTY)
    prompts = [COMMON, COMMON[:9] + prompt_of(5, 4)]
    found = run(engine, *map(wish, prompts))
    assert [result.cached_tokens for result in found] == [0, 8]
    for prompt, result in zip(prompts, found, strict=True):
        assert result.token_ids == alone(name, prompt, 5, "h2o", BUDGET, CHUNK)

"""Many requests through eight rows: nothing leaks, nothing is lost, the memory stays what it was."""

import contextlib
import random
import re
from dataclasses import dataclass

import pytest
import torch
from sweeps import sweep
from transformers import Gemma3TextConfig

from kvkeep import BudgetError, CapacityError, InputError, PolicyError
from kvkeep.cache.layer_layout import Layout
from kvkeep.engine import Engine, Request, admission
from kvkeep.engine.admission import _limits, free_bytes
from kvkeep.engine.kv_blocks import Blocks
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import show_bytes
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse

from .models import CONFIGS, VOCABULARY, alone, model


def storage(engine):
    return [tensor.data_ptr() for block in engine._kv._blocks for tensor in block.store.per_row().values()]


@pytest.mark.slow
@pytest.mark.parametrize("n", sweep([250, 1000], lambda n: n == 250))
def test_many_requests_with_random_cancels(n):
    rng = random.Random(7)
    engine = Engine(model("qwen3"), policy="h2o", budget=8, rows=8, prefill_chunk=6)
    before, places = engine.memory_usage().allocated_bytes, storage(engine)
    results, cancelled, added = {}, set(), {}
    while len(results) < n:
        while len(added) < n and len(added) - len(results) < 20:
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((2, 5, 9, 20))))
            new = rng.randint(1, 4)
            added[engine.add(Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=new)))] = (prompt, new)
        for event in engine.step():
            if event.result:
                assert event.id not in results
                results[event.id] = event.result
        for number in [n for n in added if n not in results and rng.random() < 0.03]:
            results[number] = engine.cancel(number)
            cancelled.add(number)
            assert engine.cancel(number) is None
        assert engine.memory_usage().allocated_bytes == before
    assert not engine.busy
    assert not engine._scheduler.running
    assert engine._scheduler._rows == [None] * 8
    assert not any(block.store.positions.ge(0).any() for block in engine._kv._blocks)
    assert results.keys() == added.keys()
    assert len(cancelled) > 20
    assert storage(engine) == places
    for number, result in results.items():
        if number in cancelled:
            assert result.finish_reason == "cancelled"
        else:
            assert len(result.token_ids) == added[number][1]
    for number in rng.sample(sorted(results.keys() - cancelled), 40):
        assert results[number].token_ids == alone("qwen3", *added[number], "h2o", 8, 6)


def test_memory_follows_from_the_rows():
    one = Engine(model("llama"), policy="h2o", budget=20, rows=1)
    many = Engine(model("llama"), policy="h2o", budget=20, rows=9)
    assert many.memory_usage().allocated_bytes == 9 * one.memory_usage().allocated_bytes == 9 * many.row_bytes
    fitted = Engine(model("llama"), policy="h2o", budget=20, kv_memory=5 * one.row_bytes + 7)
    assert fitted.rows == 5
    assert fitted.memory_usage().allocated_bytes <= 5 * one.row_bytes + 7
    with pytest.raises(BudgetError, match=r"Not one row fits.* or a budget of 19 or less"):
        Engine(model("llama"), budget=20, kv_memory=one.row_bytes - 1)


def fits(policy, budget, memory):
    with contextlib.suppress(BudgetError):
        return bool(Engine(model("llama"), policy=policy, budget=budget, kv_memory=memory))
    return False


@pytest.mark.long
@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "ahakv:recent=3", "streaming_llm:sinks=4"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.0])
@pytest.mark.parametrize("tried", sweep(["around it", "all"], lambda tried: tried == "around it"))
def test_the_budget_that_is_advised_is_the_largest_that_fits(policy, share, tried):
    memory = int(Engine(model("llama"), policy=policy, budget=40, rows=1).row_bytes * share) + 1
    with pytest.raises(BudgetError, match="Not one row fits") as refused:
        Engine(model("llama"), policy=policy, budget=40, kv_memory=memory)
    found = re.search(r"a budget of (\d+) or less", str(refused.value))
    advised = int(found[1]) if found else 0
    budgets = range(1, 40) if tried == "all" else {max(1, advised), advised + 1, advised + 2, 39}
    assert max((budget for budget in budgets if fits(policy, budget, memory)), default=0) == advised


def test_rows_that_no_memory_holds_are_refused_before_they_are_made():
    if free_bytes(torch.device("cpu")) is None:
        pytest.skip("this system does not say how much memory is free")
    for options in ({"rows": 1}, {}, {"kv_memory": 2**49}, {"kv_memory": 2**20}):
        with pytest.raises(BudgetError, match=r"Out of memory|Not one row fits"):
            Engine(model("llama"), policy="full", budget=2**31 - 1, **options)


@dataclass(frozen=True, kw_only=True)
class Half(Policy):
    """Protects half of its budget and ten tokens more, which `least` does not know of."""

    def protected(self, budget):
        return 0, budget // 2 + 10 if budget else 0

    def score(self, view, state):
        return view.positions.float()


def test_no_budget_is_advised_where_the_policy_refuses_small_ones():
    with pytest.raises(BudgetError, match=r"Not one row fits.* Give more memory\.$"):
        Engine(model("llama"), policy=Half(), budget=40, kv_memory=1000)


def test_a_device_that_reports_exhaustion_itself_is_not_asked():
    assert free_bytes(torch.device("meta")) is None


def test_a_limit_on_the_process_counts(tmp_path):
    """As containers have one; also one on a group around it."""
    groups = tmp_path / "groups"
    groups.write_text("1:name=systemd:/x\n0::/a/b\n")
    for place, (limits, expected) in enumerate(
        [
            ({}, []),
            ({"a/b": "max"}, []),
            ({"a/b": "1000"}, [1000 - 300 + 120]),
            ({"a/b": "1000", "a": "800", "": "max"}, [820, 620]),
            ({"a/b": "200"}, [20]),
            ({"": "5000"}, [4820]),
            ({"a/b": "many"}, []),
        ]
    ):
        root = tmp_path / str(place)
        for name in ("", "a", "a/b"):
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / "memory.current").write_text("300\n")
            (root / name / "memory.stat").write_text("anon 100\ninactive_file 120\nactive_file 80\n")
        for name, limit in limits.items():
            (root / name / "memory.max").write_text(f"{limit}\n")
        assert list(_limits(root, groups)) == expected


def test_layouts_of_many_policies_are_forgotten(monkeypatch):
    monkeypatch.setattr(admission, "MOST_POLICIES", 2)
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=1)
    for recent in range(5):
        policy = parse(f"h2o:recent={recent}")
        engine.cancel(engine.add(Request(prompt=(1, 2, 3), policy=policy)))
        assert policy in engine._admission._layouts
        assert len(engine._admission._layouts) <= 2


def test_a_stop_token_beyond_the_vocabulary_is_refused():
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=1)
    with pytest.raises(InputError, match=f"stop_token_ids={VOCABULARY} is no token: .* vocabulary has {VOCABULARY}"):
        engine.add(Request(prompt=(1, 2), stop_token_ids=[3, VOCABULARY]))
    asked = Request(prompt=(1, 2), stop_token_ids=range(VOCABULARY), sampling=SamplingParams(min_new_tokens=1))
    with pytest.raises(InputError, match="has all tokens, so none is left for min_new_tokens"):
        engine.add(asked)
    assert not engine.busy


def test_layers_that_are_all_sliding_windows_have_room_for_every_text():
    slides, looks_back = (
        Gemma3TextConfig(
            **{name: getattr(CONFIGS["gemma3"], name) for name in ("num_hidden_layers", "head_dim", "sliding_window")},
            layer_types=["sliding_attention"] * 4 + [last],
        )
        for last in ("sliding_attention", "full_attention")
    )
    assert Layout.of(slides, parse("full")).room(8) is None
    admission.check_room(Layout.of(slides, parse("full")), 8, 1000, 1000)
    with pytest.raises(CapacityError, match="1000 tokens of the prompt and 1000 new ones need 1999 slots"):
        admission.check_room(Layout.of(looks_back, parse("full")), 8, 1000, 1000)


def test_without_such_a_limit_the_memory_of_the_machine_counts(tmp_path):
    groups = tmp_path / "groups"
    assert list(_limits(tmp_path / "cgroup", groups)) == []
    for content in ("", "1:memory:/docker\n", "0::/gone\n", "0::/../..\n"):
        groups.write_text(content)
        assert list(_limits(tmp_path / "cgroup", groups)) == []


def test_rows_that_could_not_be_allocated_are_none(monkeypatch):
    rows = Engine(model("llama"), policy="pyramidkv:window=4", budget=20, rows=2)._kv  # a block for each layer
    made, block = [], Blocks._block

    def fail(self, *args):
        if made:
            raise MemoryError
        made.append(block(self, *args))
        return made[0]

    with monkeypatch.context() as patched:
        patched.setattr(Blocks, "_block", fail)
        with pytest.raises(MemoryError):
            rows.allocate(3)
    assert rows.count == 0
    rows.allocate(3)
    assert rows.count == 3


def test_free_memory_bounds_the_rows(monkeypatch):
    one = Engine(model("llama"), policy="h2o", budget=20, rows=1).row_bytes
    monkeypatch.setattr("kvkeep.engine.admission.free_bytes", lambda device: 3 * one)
    assert Engine(model("llama"), policy="h2o", budget=20, rows=3).rows == 3
    sizes = f"{show_bytes(one)} per row, and 4 of them do not fit into the {show_bytes(3 * one)}"
    with pytest.raises(BudgetError, match=rf"h2o .* {sizes} that are free"):
        Engine(model("llama"), policy="h2o", budget=20, rows=4)
    with pytest.raises(BudgetError, match="16 of them"):
        Engine(model("llama"), policy="h2o", budget=20)
    assert Engine(model("llama"), policy="h2o", budget=20, kv_memory=2 * one).rows == 2


def test_a_policy_whose_rows_no_memory_holds_any_more_ends_those_who_need_it(monkeypatch):
    engine = Engine(model("llama"), policy="local", budget=20, rows=2)
    asked = [
        Request(prompt=(1, 2), sampling=SamplingParams(max_new_tokens=2), policy=p) for p in ("adakv:window=4", None)
    ]
    monkeypatch.setattr("kvkeep.engine.admission.free_bytes", lambda device: 100)
    found = engine.generate(asked)
    assert [result.finish_reason for result in found] == ["error", "length"]
    assert "Out of memory" in found[0].error


@pytest.mark.parametrize("policy", ["h2o", "adakv:window=4", "spatten", "scissorhands", "streaming_llm"])
def test_a_row_is_measured_as_it_is_made(policy):
    for options in ({}, {"layer_budget": "ramp:0.3"}):
        engine = Engine(model("llama"), policy=policy, budget=24, rows=3, prefill_chunk=None, **options)
        assert engine.memory_usage().allocated_bytes == 3 * engine.row_bytes


@pytest.mark.parametrize(("length", "chunk"), [(16, 8), (17, 8), (17, None), (16, 1)])
def test_a_chunk_of_one_token_is_prompt(length, chunk):
    engine = Engine(model("llama"), policy="snapkv:window=4,decode=grow", budget=14, rows=1, prefill_chunk=chunk)
    (result,) = engine.generate([Request(prompt=(1,) * length, sampling=SamplingParams(max_new_tokens=1))])
    assert (result.finish_reason, len(result.token_ids)) == ("length", 1)


def test_a_policy_whose_row_does_not_fit_is_refused_at_the_door():
    small = Engine(model("llama"), policy="local", budget=20, rows=1)
    engine = Engine(model("llama"), policy="local", budget=20, kv_memory=small.row_bytes + 3)
    wish = SamplingParams(max_new_tokens=2)
    engine.add(Request(prompt=(1, 2), sampling=wish))
    with pytest.raises(BudgetError, match="Not one row fits: topk"):
        engine.add(Request(prompt=(1, 2), sampling=wish, policy="topk"))  # it has two numbers more for each slot
    engine.add(Request(prompt=(1, 2), sampling=wish, policy="knorm"))
    assert sum(event.result is not None for _ in range(9) if engine.busy for event in engine.step()) == 2
    assert not engine.busy


@pytest.mark.parametrize("spare", [0, 10_000])
def test_state_of_another_policy_is_made_when_there_is_memory_for_it(spare):
    one = Engine(model("llama"), policy="local", budget=20, rows=1).row_bytes
    two = Engine(model("llama"), policy="ahakv:recent=4", budget=20, rows=1).row_bytes
    assert two > one
    engine = Engine(model("llama"), policy="local", budget=20, rows=3, kv_memory=3 * one + spare)
    before = storage(engine)
    asked = SamplingParams(max_new_tokens=8)
    wishes = [Request(prompt=(1, 2, i), sampling=asked, policy=p) for i, p in enumerate(("local", "ahakv:recent=4"))]
    local = engine.add(wishes[0])
    aha = engine.add(wishes[1])
    steps, results = [], {}
    while engine.busy:
        events = engine.step()
        steps.append({event.id for event in events})
        results |= {event.id: event.result for event in events if event.result}
        assert engine.memory_usage().allocated_bytes <= 3 * one + spare
    assert ({local, aha} in steps) == (spare > 0)
    assert (storage(engine) == before) == (spare > 0)
    for number, wish in ((local, wishes[0]), (aha, wishes[1])):
        assert results[number].token_ids == alone("llama", wish.prompt, 8, wish.policy, 20, 512)


def test_a_finished_row_is_free_at_the_next_step():
    engine = Engine(model("llama"), budget=8, rows=1, prefill_chunk=None)
    first = engine.add(Request(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=1)))
    second = engine.add(Request(prompt=(4, 5), sampling=SamplingParams(max_new_tokens=2)))
    assert [(e.id, e.result is not None) for e in engine.step()] == [(first, True)]
    assert [e.id for e in engine.step()] == [second]
    assert [(e.id, e.result is not None) for e in engine.step()] == [(second, True)]


def test_running_rows_wait_for_one_chunk_only():
    engine = Engine(model("llama"), budget=8, rows=2, prefill_chunk=4)
    short = engine.add(Request(prompt=(1,), sampling=SamplingParams(max_new_tokens=30)))
    engine.step()
    engine.add(Request(prompt=tuple(range(20)), sampling=SamplingParams(max_new_tokens=2)))
    for _ in range(4):  # four of five chunks of the long prompt
        assert [e.id for e in engine.step()] == [short]


def test_rows_close_up_when_nobody_waits():
    engine = Engine(model("llama"), budget=8, rows=4)
    numbers = [
        engine.add(Request(prompt=(i + 1, 2), sampling=SamplingParams(max_new_tokens=n)))
        for i, n in enumerate((2, 3, 2, 20))
    ]
    results, widths = {}, []
    while engine.busy:
        widths.append(max((one.row for one in engine._scheduler.running), default=-1) + 1)
        results |= {e.id: e.result for e in engine.step() if e.result}
    assert 4 in widths
    assert widths[-1] == 1  # the longest sequence, which began in the last row, ends in the first
    assert results[numbers[3]].token_ids == alone("llama", (4, 2), 20, "h2o", 8, 512)


def test_bad_requests_are_refused_and_do_no_harm():
    engine = Engine(model("gpt2"), budget=8, rows=2)
    few, outside = SamplingParams(max_new_tokens=7), "outside of the model's vocabulary of 61"
    for error, said, request in [
        (BudgetError, "more than the engine's 8", Request(prompt=(1,), budget=9)),
        (BudgetError, "protects", Request(prompt=(1,), policy="h2o:recent=9")),
        (PolicyError, "Unknown policy 'h20'", Request(prompt=(1,), policy="h20")),
        (CapacityError, "need 9 slots", Request(prompt=(1, 2, 3), policy="full", sampling=few)),
        (CapacityError, "does not evict", Request(prompt=(1,) * 9, policy="snapkv:window=2,decode=grow")),
        (InputError, outside, Request(prompt=(VOCABULARY,), sampling=few)),
        (InputError, outside, Request(prompt=(-1,), sampling=few)),
        (InputError, "128 tokens; the request needs 129", Request(prompt=(1,) * 123, sampling=few)),
        (InputError, "Stop texts need a tokenizer", Request(prompt=(1,), stop=("end",), sampling=few)),
    ]:
        with pytest.raises(error, match=said):
            engine.add(request)
    with pytest.raises(InputError):
        Request(prompt=())
    with pytest.raises(InputError):
        Request(prompt=(1,), stop=("",))
    with pytest.raises(InputError):
        Request(prompt=(1,), logprobs=-1)
    with pytest.raises(BudgetError):
        Engine(model("gpt2"), rows=0)
    assert not engine.busy
    longest = Request(prompt=(1, 2, 3), policy="full", sampling=SamplingParams(max_new_tokens=6))
    assert engine.generate([longest])[0].token_ids == alone("gpt2", (1, 2, 3), 6, "full", 8, 512)


def test_an_engine_made_in_inference_mode_runs_outside_of_it():
    with torch.inference_mode():
        engine = Engine(model("llama"), policy="h2o", budget=8, rows=2)
        engine.add(Request(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=9), budget=6))
        engine.step()
    asked = SamplingParams(max_new_tokens=4)
    while engine.busy:
        engine.step()
    for budget in (8, 7):
        (result,) = engine.generate([Request(prompt=(4, 5, 6), sampling=asked, budget=budget)])
        assert result.token_ids == alone("llama", (4, 5, 6), 4, "h2o", budget, 512)


def test_a_stream_that_is_left_frees_its_row():
    engine = Engine(model("llama"), budget=8, rows=2)
    stream = engine.stream(Request(prompt=(1, 2), sampling=SamplingParams(max_new_tokens=9)))
    next(stream)
    stream.close()  # whoever stops listening frees the row
    assert not engine.busy

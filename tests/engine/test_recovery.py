"""One failure at a time, each where it once did harm."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.errors import BrokenCacheError, CapacityError
from kvkeep.models.rows import Rows
from kvkeep.models.text import Sampling
from kvkeep.policies.base import Policy

from .models import CONFIGS, alone, model
from .test_equal import prompt_of


def new(n):
    return Sampling(max_new_tokens=n)


def drain(engine):
    found = {}
    while engine.busy:
        found |= {event.id: event.result for event in engine.step() if event.result}
    return found


class Unregistered(Policy):
    """Keeps what is new."""

    def score(self, view, state):
        return view.positions.float()


def test_a_policy_without_a_name_can_be_shown_run_and_refused():
    policy = Unregistered()
    cache = kvkeep.BoundedCache(model("llama").config, policy, 8)
    assert "Unregistered" in repr(cache)
    engine = Engine(model("llama"), policy=policy, budget=8, rows=2, graphs=True)
    (result,) = engine.generate([Request(prompt=prompt_of(1, 12), sampling=new(4))])
    assert result.token_ids == alone("llama", prompt_of(1, 12), 4, "local", 8, 512)


class UnregisteredFull(Unregistered):
    evicts = False


def test_a_policy_without_a_name_that_runs_out_of_slots_is_refused_by_its_class():
    engine = Engine(model("llama"), policy=UnregisteredFull(), budget=8, rows=1, graphs=True)
    with pytest.raises(CapacityError, match="UnregisteredFull"):
        engine.add(Request(prompt=(1,) * 6, sampling=new(9)))
    assert len(engine.generate([Request(prompt=(1, 2), sampling=new(4))])[0].token_ids) == 4


def test_rows_that_are_given_up_are_free():
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=2)
    engine.generate([Request(prompt=(1, 2, 3), sampling=new(3))])
    held = [weakref.ref(tensor) for block in engine._rows._blocks for tensor in block.store.per_row().values()]
    engine._rows.allocate(0)
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert engine.memory() == kvkeep.Memory()


def test_what_is_remembered_of_requests_is_bounded():
    engine = Engine(model("llama"), policy="local", budget=1000, rows=1)
    for i in range(80):
        engine.add(Request(prompt=(1,), sampling=new(1), budget=i + 300, policy=f"streaming_llm:sinks={i}"))
    drain(engine)
    sizes = [
        len(value)
        for part in (engine, engine._rows, engine._admission)
        for value in vars(part).values()
        if isinstance(value, dict | set | list)
    ]
    assert max(sizes) <= 64


def test_checking_a_request_makes_no_cache(monkeypatch):
    engine = Engine(model("llama"), policy="h2o", budget=20, rows=1)
    monkeypatch.setattr("kvkeep.cache.BoundedCache.__init__", None)
    for budget in range(4, 20):
        engine.check(Request(prompt=(1, 2), budget=budget, policy="snapkv:window=2"))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_cache_in_which_a_step_failed_refuses_to_go_on(layer):
    network = kvkeep.attach(AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval())
    cache = kvkeep.BoundedCache(network.config, "h2o", 8)
    ids = torch.tensor([prompt_of(1, 12)])

    def fail(*args):
        raise MemoryError

    with torch.inference_mode():
        want = network(input_ids=ids, past_key_values=cache).logits
        hook = network.model.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            network(input_ids=ids[:, :1], past_key_values=cache)
        hook.remove()
        if layer < 2:  # after the last one every layer has seen the token
            with pytest.raises(BrokenCacheError, match=r"reset\(\)"):
                network(input_ids=ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(network(input_ids=ids, past_key_values=cache).logits, want)


def test_a_layer_in_which_a_step_failed_refuses_to_go_on(monkeypatch):
    network = kvkeep.attach(AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval())
    cache = kvkeep.BoundedCache(network.config, "h2o", 8)
    last = cache.bounded_layers()[2]

    def fail(*args):
        raise MemoryError

    with torch.inference_mode(), monkeypatch.context() as patched:
        patched.setattr(last, "_observe", fail)
        with pytest.raises(MemoryError):
            network(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    with torch.inference_mode(), pytest.raises(BrokenCacheError):
        network(input_ids=torch.tensor([[4]]), past_key_values=cache)


def test_a_neighbour_with_another_budget_does_not_disturb_a_cascade():
    engine = Engine(model("llama"), policy="spatten", budget=12, rows=2, prefill_chunk=None)
    long = Request(prompt=prompt_of(1, 20), sampling=new(16))
    first = engine.add(long)
    for _ in range(6):
        engine.step()
    second = engine.add(Request(prompt=prompt_of(2, 14), sampling=new(6), budget=10))
    found = drain(engine)
    assert found[first].token_ids == alone("llama", long.prompt, 16, "spatten", 12, None)
    assert found[second].token_ids == alone("llama", prompt_of(2, 14), 6, "spatten", 10, None)


def test_many_rows_do_not_disturb_cascades():
    engine = Engine(model("llama"), policy="spatten", budget=12, rows=66, prefill_chunk=None)
    asked = [Request(prompt=prompt_of(i % 7, 14), sampling=new(6)) for i in range(66)]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone("llama", request.prompt, 6, "spatten", 12, None)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_own_request_alone(number, monkeypatch):
    network = model("llama")
    engine = Engine(network, policy="h2o", budget=8, rows=2)
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(5), logprobs=2) for i in (1, 2)]
    numbers = [engine.add(request) for request in asked]
    engine.step()
    engine.step()

    def spoil(module, args, out):
        out = out.clone()
        out[1, -1, 7] = number
        return out

    hook = network.lm_head.register_forward_hook(spoil)
    (event,) = (event for event in engine.step() if event.result)
    hook.remove()
    assert event.id == numbers[1]
    assert event.token_id is None
    assert event.result.finish_reason == "error"
    assert "NaN or infinite" in event.result.error
    want = [alone("llama", request.prompt, 5, "h2o", 8, 512) for request in asked]
    assert event.result.token_ids == want[1][: len(event.result.token_ids)]
    assert len(event.result.logprobs) == len(event.result.token_ids)
    assert drain(engine)[numbers[0]].token_ids == want[0]


def test_a_change_of_policy_that_fails_ends_those_who_need_it_and_nobody_else(monkeypatch):
    engine = Engine(model("llama"), policy="local", budget=12, rows=2)
    bytes_before = engine.memory().allocated_bytes
    plain = Rows.allocate

    def allocate(rows, count, **options):
        if rows.policy == kvkeep.parse("adakv:window=4") and count > 1:
            raise MemoryError("no memory for so many rows")
        plain(rows, count, **options)

    monkeypatch.setattr(Rows, "allocate", allocate)
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(4), policy=p) for i, p in enumerate((None, "adakv:window=4"))]
    found = engine.generate([asked[1], asked[0], asked[1], asked[0]])
    assert [result.finish_reason for result in found] == ["error", "length", "error", "length"]
    assert found[0].error == "MemoryError: no memory for so many rows"
    assert found[1].token_ids == alone("llama", asked[0].prompt, 4, "local", 12, 512)
    assert engine.memory().allocated_bytes == bytes_before
    assert engine.rows == 2


def test_a_change_of_policy_that_fails_both_ways_leaves_an_engine_that_ends(monkeypatch):
    engine = Engine(model("llama"), policy="local", budget=12, rows=2)
    with monkeypatch.context() as patched:
        plain = Rows.allocate
        patched.setattr(
            Rows,
            "allocate",
            lambda rows, count, **o: plain(rows, count, **o) if count == 0 else (_ for _ in ()).throw(MemoryError()),
        )
        asked = [Request(prompt=(1, 2), sampling=new(2), policy=p) for p in ("adakv:window=4", None)]
        assert [r.finish_reason for r in engine.generate(asked)] == ["error", "error"]
        assert engine.memory() == kvkeep.Memory()
    assert engine.generate(asked)[1].token_ids == alone("llama", (1, 2), 2, "local", 12, 512)


def test_an_interrupt_leaves_the_engine_usable():
    network = model("llama")
    engine = Engine(network, policy="h2o", budget=8, rows=2)
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(5)) for i in (1, 2)]

    def interrupt(*args):
        raise KeyboardInterrupt

    for layer in (0, 2):
        hook = network.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(asked)
        hook.remove()
        assert not engine.busy
    numbers = [engine.add(request) for request in asked]
    engine.step()
    hook = network.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    hook.remove()
    assert engine.busy  # what has ended is still to be told
    found = drain(engine)
    assert found.keys() == set(numbers)
    assert {found[n].finish_reason for n in numbers} <= {"error", "length"}
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone("llama", request.prompt, 5, "h2o", 8, 512)


@pytest.mark.parametrize("n", range(27))
def test_a_request_is_checked_when_it_is_made(n, unchecked):
    case, error, message = unchecked["wrong"][n]
    assert error in ("InputError", "BudgetError"), f"{case}: {message}"
    assert len(message) < 200


def test_token_ids_come_in_many_kinds(unchecked):
    assert unchecked["right"] == [[[3, 4], 2, ["end"]]] * 5


@pytest.fixture(scope="module")
def unchecked():
    """What becomes of requests in a process in which types are not checked on the way, as in a user's."""
    done = subprocess.run([sys.executable, Path(__file__).parent / "wishes.py"], capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["ramp:0.5", "pyramid:3"])
@pytest.mark.parametrize("policy", ["full", "topk_dynamic", "snapkv:window=4,decode=grow"])
def test_the_smallest_layer_decides_what_is_taken(policy, how):
    engine = Engine(model("llama"), policy=policy, budget=24, rows=1, layer_budget=how, prefill_chunk=None)
    taken = 0
    for n in range(1, 30):
        try:
            number = engine.add(Request(prompt=(1, 2, 3), sampling=new(n)))
        except CapacityError as error:
            why = str(error)
            break
        result = drain(engine)[number]
        assert result.finish_reason == "length", result.error
        taken = n
    assert 2 < taken < 24
    assert "gives some layer only" in why


def test_times_are_counted_from_arrival():
    engine = Engine(model("llama"), budget=8, rows=1)
    first, second = engine.generate([Request(prompt=(1, 2), sampling=new(9))] * 2)
    for result in (first, second):
        assert result.ttft_s == pytest.approx(result.queued_s + result.prefill_s)
    assert second.queued_s > first.prefill_s
    assert second.ttft_s > second.prefill_s

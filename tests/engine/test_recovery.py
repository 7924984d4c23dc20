"""One failure at a time, each where it once did harm."""

import gc
import itertools
import signal
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import kvkeep
from kvkeep.engine import Engine, Request, sequence
from kvkeep.engine.dispatcher import ThreadBox, Uninterrupted
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.tensor_parallel import EngineAgreement
from kvkeep.errors import (
    BrokenCacheError,
    BudgetError,
    CapacityError,
    InputError,
    PolicyError,
    UnsupportedModelError,
)
from kvkeep.head_sharding import Heads
from kvkeep.policies.base import Policy

from .models import CONFIGS, DEVICE, alone, model
from .test_equal import prompt_of


def new(n):
    return SamplingParams(max_new_tokens=n)


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


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.slow
def test_rows_that_are_given_up_are_free():
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=2)
    engine.generate([Request(prompt=(1, 2, 3), sampling=new(3))])
    held = [weakref.ref(tensor) for block in engine._kv._blocks for tensor in block.store.per_row().values()]
    engine._kv.allocate(0)
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert engine.memory_usage() == kvkeep.MemoryUsage()


@pytest.mark.slow
def test_what_is_remembered_of_requests_is_bounded():
    engine = Engine(model("llama"), policy="local", budget=1000, rows=1)
    for i in range(80):
        engine.add(Request(prompt=(1,), sampling=new(1), budget=i + 300, policy=f"streaming_llm:sinks={i}"))
    drain(engine)
    sizes = [
        len(value)
        for part in (engine, engine._kv, engine._admission)
        for value in vars(part).values()
        if isinstance(value, dict | set | list)
    ]
    assert max(sizes) <= 64


def test_layouts_of_the_policies_that_rows_met_are_forgotten_in_time():
    engine = Engine(model("llama"), policy="local", budget=1000, rows=2)
    for sinks in range(80):
        assert engine._kv.takes(kvkeep.parse(f"streaming_llm:sinks={sinks}"))
        assert len(engine._kv._layouts) <= 64


class Ill(Unregistered):
    """Cannot be compared with another policy."""

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = Policy.__hash__


def test_a_policy_that_fails_when_it_is_compared_is_refused():
    with pytest.raises(PolicyError, match="Policies of Ill cannot be told apart by their options"):
        Engine(model("llama"), policy=Ill(), budget=8)


class Wordless:
    """A tokenizer that breaks down in the middle of a text."""

    name_or_path = "wordless"

    def decode(self, token_ids, **options):
        if len(token_ids) > 2:
            raise RuntimeError("no words left")
        return "\ufffd" * len(token_ids)


def test_a_tokenizer_that_fails_ends_the_request_with_the_text_so_far(no_checked_annotations):
    engine = Engine(model("llama"), Wordless(), policy="local", budget=8, rows=1)
    (result,) = engine.generate([Request(prompt=(1, 2), sampling=new(5))])
    assert result.finish_reason == "error"
    assert "no words left" in result.error
    assert result.text == ""


class NoPositions(LlamaForCausalLM):
    """Decides itself where tokens are, as models with ALiBi do."""

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, **options):
        return super().forward(
            input_ids=input_ids, past_key_values=past_key_values, attention_mask=attention_mask, **options
        )


def test_a_model_that_takes_no_positions_is_refused():
    made = kvkeep.attach(NoPositions(CONFIGS["llama"]).eval())
    with pytest.raises(UnsupportedModelError, match=r"NoPositions takes no position_ids.* model.generate"):
        Engine(made, policy="local", budget=8)


def test_a_listener_that_leaves_while_its_request_is_checked_adds_nothing(monkeypatch):
    engine = Engine(model("llama"), policy="local", budget=8, rows=1)
    box, check = ThreadBox(), engine._admission.check

    def leave(request, number):
        box.left = True
        return check(request, number)

    monkeypatch.setattr(engine._admission, "check", leave)
    engine._add(Request(prompt=(1, 2), sampling=new(5)), None, box)
    assert not engine.busy
    assert not box.open


def test_checking_a_request_makes_no_cache(monkeypatch):
    engine = Engine(model("llama"), policy="h2o", budget=20, rows=1)
    monkeypatch.setattr("kvkeep.cache.bounded_cache.BoundedCache.__init__", None)
    for budget in range(4, 20):
        engine.check(Request(prompt=(1, 2), budget=budget, policy="snapkv:window=2"))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_cache_in_which_a_step_failed_refuses_to_go_on(layer):
    network = kvkeep.attach(AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval().to(DEVICE))
    cache = kvkeep.BoundedCache(network.config, "h2o", 8)
    ids = torch.tensor([prompt_of(1, 12)], device=DEVICE)

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

    def fail(*args, **options):
        raise MemoryError

    with torch.inference_mode(), monkeypatch.context() as patched:
        patched.setattr(last, "_view", fail)
        with pytest.raises(MemoryError):
            network(input_ids=torch.tensor([[1, 2, 3]], device=DEVICE), past_key_values=cache)
    with torch.inference_mode(), pytest.raises(BrokenCacheError):
        network(input_ids=torch.tensor([[4]], device=DEVICE), past_key_values=cache)


@pytest.mark.long
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


@pytest.mark.slow
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
    bytes_before = engine.memory_usage().allocated_bytes
    plain = KVManager.allocate

    def allocate(rows, count, **options):
        if rows.policy == kvkeep.parse("adakv:window=4") and count > 1:
            raise MemoryError("no memory for so many rows")
        plain(rows, count, **options)

    monkeypatch.setattr(KVManager, "allocate", allocate)
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(4), policy=p) for i, p in enumerate((None, "adakv:window=4"))]
    found = engine.generate([asked[1], asked[0], asked[1], asked[0]])
    assert [result.finish_reason for result in found] == ["error", "length", "error", "length"]
    assert found[0].error.startswith("MemoryError: no memory for so many rows. Use fewer rows, a smaller budget")
    assert found[1].token_ids == alone("llama", asked[0].prompt, 4, "local", 12, 512)
    assert engine.memory_usage().allocated_bytes == bytes_before
    assert engine.rows == 2


def test_a_change_of_policy_that_fails_both_ways_leaves_an_engine_that_ends(monkeypatch):
    engine = Engine(model("llama"), policy="local", budget=12, rows=2)
    with monkeypatch.context() as patched:
        plain = KVManager.allocate
        patched.setattr(
            KVManager,
            "allocate",
            lambda rows, count, **o: plain(rows, count, **o) if count == 0 else (_ for _ in ()).throw(MemoryError()),
        )
        asked = [Request(prompt=(1, 2), sampling=new(2), policy=p) for p in ("adakv:window=4", None)]
        assert [r.finish_reason for r in engine.generate(asked)] == ["error", "error"]
        assert engine.memory_usage() == kvkeep.MemoryUsage()
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


WRONG = [
    {"prompt": (1.5, 2.0)},
    {"prompt": "  "},
    {"prompt": b"bytes"},
    {"prompt": ("a", "b")},
    {"prompt": (True, False)},
    {"prompt": 7},
    {"prompt": None},
    {"prompt": [[1, 2]]},
    {"prompt": (1, None)},
    {"prompt": torch.zeros((1, 2), dtype=torch.long)},
    {"prompt": torch.tensor([1.0])},
    {"prompt": {}},
    {"stop": (1,)},
    {"stop": 3},
    {"stop": ("",)},
    {"logprobs": 2.5},
    {"logprobs": True},
    {"logprobs": "3"},
    {"logprobs": 101},
    {"budget": 2.5},
    {"budget": "8"},
    {"budget": 0},
    {"budget": [4, 4]},
    {"budget": 10**5000},
    {"prompt": np.array([[1, 2, 3]])},
    {"prompt": [torch.tensor([1, 2])]},
    {"sequence": torch.tensor([1, 2])},
    {"logprobs": np.array([1, 2])},
    {"policy": 3},
    {"sampling": {"temperature": 1}},
    {"ignore_end": "no"},
    {"sequence": 1.5},
    {"sequence": 2**64},
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_a_request_is_checked_when_it_is_made(wrong, no_checked_annotations):
    with pytest.raises((InputError, BudgetError)) as found:
        Request(**{"prompt": (1, 2), **wrong})
    assert len(str(found.value)) < 200


@pytest.mark.parametrize("name", ["snapkv:window=2", "adakv:window=2", "topk_dynamic:share=0.5"])
def test_a_policy_is_taken_again_after_its_first_use(name):
    policy = kvkeep.parse(name)
    engine = Engine(model("llama"), policy=policy, budget=8, rows=1, prefill_chunk=None)
    for _ in range(2):
        engine.add(Request(prompt=(1, 2, 3), sampling=new(2), policy=policy))
        drain(engine)
    Engine(model("llama"), policy=policy, budget=8, rows=1, prefill_chunk=None)


@pytest.mark.parametrize("prompt", [[3, 4], torch.tensor([3, 4]), np.array([3, 4]), range(3, 5), iter((3, 4))])
def test_token_ids_come_in_many_kinds(prompt, no_checked_annotations):
    request = Request(prompt=prompt, logprobs=np.int64(2), stop="end")
    assert (request.prompt, request.logprobs, request.stop) == ((3, 4), 2, ("end",))


@pytest.mark.slow
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


def test_times_are_counted_from_arrival(monkeypatch):
    # a clock of events, since on a machine under load a token may take as long as a prompt
    monkeypatch.setattr(sequence, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    engine = Engine(model("llama"), budget=8, rows=1)
    numbers = [engine.add(Request(prompt=prompt, sampling=new(9))) for prompt in ((1, 2), (2, 1))]
    first, second = map(drain(engine).get, numbers)
    for result in (first, second):
        assert result.ttft_s == pytest.approx(result.queued_s + result.prefill_s)
    assert second.queued_s > first.prefill_s
    assert second.ttft_s > second.prefill_s


# ------------------------------------------------------------------ Ctrl-C, as the terminal sends it


@pytest.fixture
def ctrl_c():
    """Has Ctrl-C raise KeyboardInterrupt, as in a terminal: a process in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_waits_for_the_end_of_a_step_and_loses_nothing(ctrl_c):
    """Signals at every place of a step: what the engine calls is made to raise them, one call after the other."""
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(n)) for i, n in ((1, 2), (2, 9), (3, 3))]
    want = [alone("llama", request.prompt, request.sampling.max_new_tokens, "h2o", 8, 512) for request in asked]
    places = [
        *((Scheduler, name) for name in ("admit", "plan", "gap", "move", "leave")),
        *((KVManager, name) for name in ("begin", "end", "move", "part")),
        *((Sequence, name) for name in ("take", "finish", "result")),
    ]
    for owner, name in places:
        engine, plain, interrupts = Engine(model("llama"), policy="h2o", budget=8, rows=2), getattr(owner, name), 0
        presses = []

        def run(*args, plain=plain, presses=presses, **options):
            if not presses:  # once a step
                presses.append(1)
                signal.raise_signal(signal.SIGINT)
            return plain(*args, **options)

        numbers, found = [engine.add(request) for request in asked], {}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, run)
            while engine.busy:
                presses.clear()
                try:
                    events = engine.step()
                except KeyboardInterrupt:
                    interrupts, events = interrupts + 1, engine._unreported[:]
                    engine._unreported.clear()
                found |= {event.id: event.result.token_ids for event in events if event.result}
        assert [found[number] for number in numbers] == want, name
        assert interrupts, name


def test_a_second_ctrl_c_comes_through_at_once(ctrl_c):
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=2)
    layer, calls = model("llama").model.layers[1].mlp, []

    def press(*args):
        calls.append(1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    engine.add(Request(prompt=prompt_of(1, 9), sampling=new(4)))
    hook = layer.register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    hook.remove()
    assert len(calls) == 1
    assert [result.finish_reason for result in drain(engine).values()] == ["error"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (result,) = engine.generate([Request(prompt=prompt_of(1, 9), sampling=new(4))])
    assert result.token_ids == alone("llama", prompt_of(1, 9), 4, "h2o", 8, 512)


def test_a_step_can_be_given_up_where_it_says_so(ctrl_c):
    """A step that reads a long prompt takes a minute; its caller may have it end between two layers."""
    engine, layers, seen = Engine(model("llama"), policy="h2o", budget=8, rows=2), model("llama").model.layers, []
    session = engine.session()
    session.read(prompt_of(2, 9))
    before = session.snapshot()

    def press(layer, *args):
        seen.append(layer)
        Uninterrupted.interrupt_here()  # nothing is held back
        signal.raise_signal(signal.SIGINT)

    hooks = [
        layers[0].register_forward_pre_hook(press),
        layers[0].register_forward_hook(lambda *args: Uninterrupted.interrupt_here()),
        layers[1].register_forward_pre_hook(lambda layer, *args: seen.append(layer)),
    ]
    with pytest.raises(KeyboardInterrupt):
        list(session.send(Request(prompt=prompt_of(1, 9), sampling=new(4))))
    for hook in hooks:
        hook.remove()
    assert seen == [layers[0]]
    assert session.snapshot().tokens.tolist() == before.tokens.tolist()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Uninterrupted.interrupt_here()  # it was taken up
    (result,) = engine.generate([Request(prompt=prompt_of(1, 9), sampling=new(4))])
    assert result.token_ids == alone("llama", prompt_of(1, 9), 4, "h2o", 8, 512)


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.slow
@pytest.mark.parametrize("error", [UnspeakableError, RuntimeError])
def test_an_error_that_cannot_be_told_or_logged_harms_nobody_else(error, monkeypatch):
    engine = Engine(model("llama"), policy="h2o", budget=8, rows=2)
    asked = [Request(prompt=prompt_of(i, 9), sampling=new(8)) for i in (1, 2)]
    for request in asked:
        engine.add(request)
    engine.step()
    if error is RuntimeError:  # somebody's handler of the log fails
        monkeypatch.setattr("kvkeep.engine.engine._log.debug", lambda *args, **options: 1 / 0)

    def fail(*args):
        raise error

    hook = model("llama").model.layers[1].mlp.register_forward_pre_hook(fail)
    ended = [event.result for event in engine.step() if event.result]
    hook.remove()
    assert ended
    assert all(result.finish_reason == "error" and result.error for result in ended)
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone("llama", request.prompt, 8, "h2o", 8, 512)


def test_a_penalty_does_not_mind_in_which_mode_steps_are_taken():
    engine = Engine(model("llama"), budget=8, rows=2)
    engine.add(Request(prompt=prompt_of(1, 9), sampling=SamplingParams(max_new_tokens=6, repetition_penalty=1.3)))
    with torch.inference_mode():
        engine.step()
        engine.step()
    assert [result.finish_reason for result in drain(engine).values()] == ["length"]


def test_what_is_no_request_leaves_the_engine_idle(no_checked_annotations):
    engine = Engine(model("llama"), budget=8, rows=2)
    results = engine.run(Request(prompt=prompt_of(i, 5), sampling=new(3)) for i in range(4))
    next(results)
    assert len(list(results)) == 3
    for wrong in ([Request(prompt=(1,)), None], 7, [1]):
        with pytest.raises(InputError, match=r"no kvkeep\.Request|no list of requests"):
            engine.generate(wrong)
    assert len(engine.generate([])) == 0
    assert not engine.busy


@dataclass(frozen=True, kw_only=True)
class Boosted(Policy):
    """Prefers some positions that a tensor names: two of them cannot be compared."""

    which: torch.Tensor = field(default_factory=lambda: torch.arange(3))

    def __post_init__(self):
        pass

    def score(self, view, state):
        return torch.isin(view.positions, self.which).float()


class Undecorated(Policy):
    def __init__(self, sign):
        object.__setattr__(self, "sign", sign)

    def score(self, view, state):
        return view.positions.float() * self.sign


class Never(Unregistered):
    def __eq__(self, other):
        return False

    __hash__ = Unregistered.__hash__


def test_policies_that_cannot_be_told_apart(no_checked_annotations):
    engine = Engine(model("llama"), policy="local", budget=8, rows=2)
    for wrong in (Undecorated(1), Never(), 3, "nothing"):
        with pytest.raises(PolicyError):
            engine.add(Request(prompt=(1,), policy=wrong)) if wrong != 3 else Engine(model("llama"), policy=wrong)
    asked = [Request(prompt=(1, 2), sampling=new(3), policy=policy) for policy in (Boosted(), Boosted(), None)]
    found = engine.generate(asked)  # comparing them raises: it costs those who named them, at most
    assert found[2].finish_reason == "length"
    assert len(found) == 3


def test_a_selection_of_rows_that_is_cut_between_layers_is_noticed():
    network = model("llama")
    cache = kvkeep.BoundedCache(network.config, "h2o", 8)
    ids = torch.tensor([prompt_of(1, 9), prompt_of(2, 9)], device=DEVICE)
    with torch.inference_mode():
        network(input_ids=ids, past_key_values=cache)
        cache.layers[0].reorder_cache(torch.tensor([1, 0], device=DEVICE))
        with pytest.raises(BrokenCacheError, match="selection of rows"):
            network(input_ids=ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    "options", [{"rows": [2]}, {"kv_memory": [10**6]}, {"prefill_chunk": [5]}, {"budget": 10**30}, {"rows": 10**30}]
)
def test_numbers_of_an_engine_are_numbers(options, no_checked_annotations):
    with pytest.raises(BudgetError):
        Engine(model("llama"), **{"policy": "local", "budget": 8, **options})


def test_a_failure_in_one_of_several_processes_is_raised_as_it_is(monkeypatch):
    """The others may not have failed, and would wait for ever; alone, an engine ends the request with the error."""

    def fail(*args):
        raise RuntimeError("the model fails")

    engine, asked = Engine(model("llama"), policy="h2o", budget=8, rows=1), Request(prompt=(1, 2, 3), sampling=new(2))
    hook = model("llama").register_forward_pre_hook(fail)
    try:
        assert engine.generate(asked)[0].error == "RuntimeError: the model fails"
        engine._agreement = EngineAgreement(Heads(0, 2), DEVICE, {})
        monkeypatch.setattr(Heads, "alike", lambda self, number, device: True)
        with pytest.raises(RuntimeError, match="the model fails"):
            engine.generate(asked)
    finally:
        hook.remove()

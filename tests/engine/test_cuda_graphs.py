"""Decode steps that are recorded: nothing in them waits for the device, and they change no token."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from sweeps import sweep
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import _disable_current_modes

import kvkeep
from kvkeep import backends
from kvkeep.backends import torch as plain
from kvkeep.backends.torch import TorchBackend
from kvkeep.backends.triton import launch
from kvkeep.engine import Engine, Request, cuda_graphs
from kvkeep.engine.cuda_graphs import Graphs, NoWaiting, WaitError, _Step, bucket, refusal
from kvkeep.engine.kv_manager import Owner
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.pooled_store import PooledStore

from .models import CONFIGS, DEVICE, alone, model
from .test_equal import CAPACITY, POLICIES, prompt_of

REFUSED = {name for name in kvkeep.available_policies() if refusal(kvkeep.parse(name))}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Torch does the work, and nobody asks for a number: what is held, is finite, or set."""
    monkeypatch.setenv(backends.SWITCH, "torch")
    monkeypatch.setattr(TorchBackend, "is_over", lambda self, positions, limit: True)
    monkeypatch.setattr(plain, "_is_finite", lambda x: False)
    monkeypatch.setattr(PooledStore, "capacity", property(lambda store: store.widest))
    monkeypatch.setattr("kvkeep.policies._bursts._are_set", lambda words: [True] * words.shape[1])


def requests(*lengths):
    return [
        Request(prompt=prompt_of(i, length), sampling=SamplingParams(max_new_tokens=new))
        for i, (length, new) in enumerate(lengths)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_recorded_or_refused_with_a_reason(policy):
    evicts = kvkeep.parse(policy).evicts
    engine = Engine(model("llama"), policy=policy, budget=CAPACITY if evicts else 64, rows=2, graphs=True)
    engine.generate(requests((17, 3)))
    refused = engine._runner.graphs.refused
    assert bool(refused) == (policy.partition(":")[0] in REFUSED), refused
    assert all(reason == refusal(kvkeep.parse(policy)) for reason in refused.values())
    assert bool(engine._runner.graphs._steps) == (not refused)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["h2o:decay=0.9", "scissorhands"])
def test_tokens_are_those_of_a_request_alone(policy):
    engine = Engine(model("llama"), policy=policy, budget=CAPACITY, rows=3, prefill_chunk=5, graphs=True)
    asked = requests((1, 5), (17, 6), (4, 8))
    for request, result in zip(asked, engine.generate(asked), strict=True):
        new = request.sampling.max_new_tokens
        assert result.token_ids == alone("llama", request.prompt, new, policy, CAPACITY, 5)
    assert engine._runner.graphs.refused == {}


def test_who_is_refused():
    assert sorted(REFUSED) == ["full", "spatten", "topk_dynamic"]
    assert "room" in refusal(kvkeep.parse("snapkv:decode=grow"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
def test_other_architectures(name):
    asked = requests((3, 5), (18, 5), (7, 5))
    engine = Engine(model(name), policy="h2o", budget=CAPACITY, rows=3, prefill_chunk=6, graphs=True)
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone(name, request.prompt, 5, "h2o", CAPACITY, 6)
    assert engine._runner.graphs.refused == {}


@pytest.fixture
def kernels(monkeypatch):
    """Triton's interpreter does the work; what itself does with tensors is none of the step's business."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not launch.interprets():
        pytest.skip("kernels run compiled here, not interpreted")
    run = interpreter.GridExecutor.__call__

    def unwatched(executor, *arguments, **options):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return run(executor, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched)
    monkeypatch.setenv(backends.SWITCH, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("policy", sweep(["h2o", "tova", "scissorhands"], "h2o".__eq__))
def test_steps_in_kernels_do_not_wait_either(policy, kernels):
    engine = Engine(model("llama"), policy=policy, budget=CAPACITY, rows=2, graphs=True)
    (request,) = requests((16, 3))
    (result,) = engine.generate([request])
    assert engine._runner.graphs.refused == {}
    assert engine._runner.graphs._steps
    assert result.token_ids == alone("llama", request.prompt, 3, policy, CAPACITY, None)


def test_slot_positions():
    engine = Engine(model("llama"), policy="streaming_llm", budget=CAPACITY, rows=2, positions="slot", graphs=True)
    engine.generate(requests((20, 6)))
    assert engine._runner.graphs.refused == {}
    assert engine._runner.graphs._steps


def test_numbers_of_rows():
    assert [bucket(n, 100) for n in (1, 2, 3, 5, 7, 9, 13, 17, 33, 49, 65, 97)] == [
        *(1, 2, 4, 6, 8, 12, 16, 24, 48, 64, 96, 100)
    ]


def test_one_step_for_each_number_of_rows():
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=7, graphs=True)
    engine.generate(requests(*((4, 3 + 2 * i) for i in range(7))))
    sizes = {size for _, size in engine._runner.graphs._steps}
    assert sizes == {1, 2, 4, 6, 7}


def test_what_was_recorded_goes_with_the_rows():
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=2, graphs=True)
    engine.generate(requests((4, 3)))
    (before,) = engine._runner.graphs._steps.values()
    engine.generate([Request(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4), budget=9)])  # budgets by row
    (after,) = engine._runner.graphs._steps.values()
    assert after is not before
    engine.generate([Request(prompt=(1, 2), sampling=SamplingParams(max_new_tokens=1), policy="local")])
    assert not engine._runner.graphs._steps


def test_steps_of_several_policies_run_as_they_are_and_those_of_one_are_recorded_again():
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=2, graphs=True)
    short, long = requests((4, 3), (5, 9))
    mixed = [replace(short, policy="tova"), long]
    for request, result in zip(mixed, engine.generate(mixed), strict=True):
        new = request.sampling.max_new_tokens
        assert result.token_ids == alone("llama", request.prompt, new, request.policy or "h2o", CAPACITY, 512)
    assert engine._runner.graphs.refused == {}
    assert engine._runner.graphs._steps.keys() == {(Owner(engine.policy), 1)}  # when the other one had gone


def test_by_default_only_where_there_is_cuda():
    graphs = Engine(model("llama"), budget=CAPACITY)._runner.graphs
    assert (graphs is not None) == (DEVICE.type == "cuda")


WAITING = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "written mask": lambda x: x.clone().__setitem__(x > 0, torch.ones(2)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1])),
    "number": lambda x: torch.tensor(3, device=x.device),
    "numbers": lambda x: torch.as_tensor([3, 4], device=x.device),
    "equal": lambda x: x.equal(x),
}


@pytest.mark.parametrize("operation", WAITING)
def test_what_waits_is_found(operation):
    x = torch.tensor([-1.0, 2.0, 3.0])
    WAITING[operation](x)
    with NoWaiting(), pytest.raises(WaitError, match="waits for the device in"):
        WAITING[operation](x)


def test_what_does_not_wait_is_let_through():
    x = torch.tensor([-1.0, 2.0, 3.0])
    index = torch.tensor([0, 2])
    with NoWaiting():
        y = torch.where(x > 0, x, 0.0) + x.masked_fill(x > 0, 1.0) + x[index].sum() + x.to(torch.float64)
        y = y.sort().values.cumsum(0) + torch.full((), 3.0) + x.new_zeros(3)
    assert y.shape == (3,)


def test_a_policy_that_waits_is_run_without(caplog, monkeypatch):
    def score(self, view, state):
        return view.positions.float() * float(view.seen.sum())

    monkeypatch.setattr(kvkeep.parse("local").__class__, "score", score)
    engine = Engine(model("llama"), policy="local", budget=CAPACITY, rows=2, prefill_chunk=6, graphs=True)
    engine.generate(requests((17, 6), (4, 8)))
    (reason,) = engine._runner.graphs.refused.values()
    assert "waits for the device in aten::_local_scalar_dense, test_cuda_graphs.py:" in reason
    assert reason in caplog.text
    assert len(caplog.records) == 1


def test_refused_policies_are_forgotten_in_time():
    graphs = Graphs(model("llama"), {})
    for sinks in range(cuda_graphs.MOST_REFUSED + 1):
        graphs._refuse(kvkeep.parse(f"streaming_llm:sinks={sinks}"), "it waits")
    assert [policy.sinks for policy in graphs.refused] == [cuda_graphs.MOST_REFUSED]


def test_a_watch_that_cannot_begin_leaves_nothing_behind(monkeypatch):
    def fail():
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_graphs, "_Methods", fail)
    with pytest.raises(KeyboardInterrupt), NoWaiting():
        pass
    assert torch.ones(1).sum().item() == 1.0
    assert eval_frame._stance.stance == "default"


def test_one_number_of_rows_that_is_refused_lets_go_of_the_others(monkeypatch):
    record = Graphs._record

    def only_one(graphs, policy, size, rows):
        if size > 1:
            raise WaitError("out of memory")
        return record(graphs, policy, size, rows)

    monkeypatch.setattr(Graphs, "_record", only_one)
    engine = Engine(model("llama"), policy="h2o", budget=CAPACITY, rows=2, graphs=True)
    engine.add(requests((4, 9))[0])
    for _ in range(3):
        engine.step()
    assert engine._runner.graphs._steps.keys() == {(Owner(engine.policy), 1)}
    engine.add(requests((4, 3))[0])
    engine.step()
    engine.step()
    assert not engine._runner.graphs._steps


class Stream:
    """Of a device that is not there."""

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_runs_on_its_own_stream_and_leaves_it_even_if_it_fails(fails, monkeypatch):
    main = Stream()
    current, runs = [main], []

    @contextmanager
    def use(stream):
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    class Capture:
        def __init__(self, graph, *, pool, stream, capture_error_mode):
            self.stream = stream

        def __enter__(self):
            current[0] = self.stream

        def __exit__(self, *error):
            if fails:  # like torch's, before it is back on its stream
                raise RuntimeError("operation not permitted when stream is capturing")
            current[0] = main

    class Graph:
        def replay(self):
            runs.append("replay")

    for name, fake in {"Stream": Stream, "stream": use, "graph": Capture, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    step = _Step(model("llama"), {}, 1, cache=None)
    monkeypatch.setattr(step, "forward", lambda: runs.append(current[0]) or torch.ones(1))
    if fails:
        with pytest.raises(RuntimeError, match="not permitted"):
            step.capture(None)
    else:
        step.capture(None)
        assert step._replay().equal(torch.ones(1))
        assert runs.pop() == "replay"
    assert current == [main]
    assert len(set(runs)) == 1
    assert main not in runs

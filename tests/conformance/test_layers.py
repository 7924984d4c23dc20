"""Whole layers hold the same tokens on every backend, under every kind of policy."""

import functools
import itertools

import pytest
import torch
from phases import phase_of

import kvkeep
from kvkeep import backends
from kvkeep.backends.triton import prefill_ops
from kvkeep.policies._head_budgets import under
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Phase

from .cases import BACKENDS, SLOW, backend_of, device_of

STEPS, FEW = 30, 5
ROTATION = Rotation(1.0 / 100 ** (torch.arange(0, 12, 2) / 12), scaling=1.1)
POLICIES = ["local", "full", "streaming_llm", "h2o", "h2o:recent=0,decay=0.5", "h2o:sinks=2,recent=3", "h2o_avg",
            "h2o:graduate=replace,sinks=2", "tova", "ahakv:recent=3", "scissorhands", "snapkv:window=4",
            "snapkv:window=4,decode=score", "adakv:window=4", "random", "knorm", "h2o:sinks=2,recent=3+ada:0.1",
            "snapkv:window=4,decode=score+ada:0.1", "knorm+ada:0.1"]  # fmt: skip


def run(name, policy, budget, *, window=None, steps=STEPS, equal=False, rotation=None):
    """A ragged prompt and single tokens, one of them padding; with `equal` all keys are alike, so all masses tie."""
    g, device = torch.Generator().manual_seed(3), device_of(name)
    asked, _, rule = policy.partition("+")
    layer = kvkeep.Layer(under(kvkeep.parse(asked), rule or None), budget, window=window, rotation=rotation)
    options = AttentionOptions(scaling=0.5, window=window)
    for step in range(steps):
        T = 1 if step else 31
        q, k, v = (torch.randn(2, heads, T, 16, generator=g).to(device) for heads in (6, 2, 2))
        real = torch.ones(2, T, dtype=torch.bool, device=device)
        real[1, : 9 if step == 0 else int(step == 3)] = False
        mask = None if step > 4 else real
        out = layer.step(q, k * 0 if equal else k, v, options=options, phase=phase_of(q), real=mask)
        positions, order = layer.store.positions.sort(dim=-1)  # slots have no order
        state = {name: held.gather(-1, order).masked_fill(positions < 0, 0.0) for name, held in layer.state.items()}
        yield out[0].cpu(), positions.cpu(), {name: held.cpu() for name, held in state.items()}


@functools.cache
def reference(policy, budget, **given):
    """What the definition does."""
    return list(run("reference", policy, budget, **given))


def check(name, monkeypatch, policy, budget, **given):
    backend_of(name)
    monkeypatch.setitem(backends.KINDS, name, BACKENDS[name])
    monkeypatch.setenv(backends.SWITCH, "reference")
    wanted = reference(policy, budget, **given)
    monkeypatch.setenv(backends.SWITCH, name)
    found = list(run(name, policy, budget, **given, steps=FEW if name in SLOW else STEPS))
    for (out, positions, state), (want, want_positions, want_state) in zip(found, wanted, strict=False):
        assert torch.equal(positions, want_positions)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        for one in state:
            torch.testing.assert_close(state[one], want_state[one], rtol=1e-4, atol=1e-6)
    return found


JUDGED = [name for name in BACKENDS if name != "reference"]


FAST = [name for name in JUDGED if name not in SLOW]
ASKED = [
    *itertools.product(FAST, POLICIES, [None, 14]),
    *itertools.product(sorted(SLOW), ["local", "h2o:sinks=2,recent=3", "ahakv:recent=3", "tova"], [None]),
    *itertools.product(sorted(SLOW), ["h2o", "scissorhands"], [14]),
    *itertools.product(sorted(SLOW), ["h2o:sinks=2,recent=3+ada:0.1"], [None]),
]


@pytest.fixture(autouse=True)
def prompts_by_torch(monkeypatch):
    """Interpreted kernels read prompts slowly; `test_backends` asks them."""
    monkeypatch.setattr(prefill_ops, "attend", lambda *arguments, **others: None)


@pytest.mark.parametrize(("name", "policy", "window"), ASKED)
def test_a_layer_holds_the_tokens_of_the_definition(name, policy, window, monkeypatch):
    check(name, monkeypatch, policy, 70 if policy == "full" else 20, window=window)


@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize(
    "policy",
    [
        *("local", "streaming_llm", "h2o:recent=0,decay=0.5", "scissorhands", "tova", "knorm"),
        *("h2o:sinks=2,recent=3+ada:0.1", "knorm+ada:0.1"),
    ],
)
@pytest.mark.parametrize("name", FAST)
def test_a_stream_under_slot_positions(name, policy, window, monkeypatch):
    check(name, monkeypatch, policy, 20, window=window, rotation=ROTATION)


@pytest.mark.parametrize("name", JUDGED)
def test_budgets_of_rows(name, monkeypatch):
    check(name, monkeypatch, "h2o:recent=2", (20, 12), window=16)


@pytest.mark.parametrize("name", JUDGED)
def test_no_score_is_worked_out_while_there_is_room(name, monkeypatch):
    kind, evicted, device = type(backend_of(name)), [], device_of(name)
    if device.type == "cuda":
        pytest.skip("the host would have to wait to know it")
    monkeypatch.setitem(backends.KINDS, name, kind)
    monkeypatch.setenv(backends.SWITCH, name)
    monkeypatch.setattr(kind, "evict", lambda *arguments: evicted.append(1))
    layer = kvkeep.Layer(kvkeep.parse("knorm"), 8)  # its score is not at hand, so it is asked for only when needed
    for _ in range(8):
        layer.step(*(torch.randn(1, 2, 1, 16) for _ in range(3)), options=AttentionOptions(0.2), phase=Phase.DECODE)
    assert evicted == []


@pytest.mark.parametrize("name", JUDGED)
def test_ties_go_by_position(name, monkeypatch):
    """All keys are zero: every visible token receives exactly the same, in whatever slot it stands."""
    _, positions, state = check(name, monkeypatch, "h2o:recent=0,decay=0", 6, equal=True)[-1]
    assert len(state["mass"][positions >= 0].unique()) == 1

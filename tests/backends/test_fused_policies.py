"""Policies that say what their sums are, so that a backend can fuse their decode step."""

import copy
import pickle
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch
from conformance.dummy_backend import DummyBackend
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import SWITCH, SlotLimits
from kvkeep.backends.native import NativeBackend, native
from kvkeep.cache import decode_replay
from kvkeep.cache.decode_replay import CachedStatistic, DecodePath, why_not_fused
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv import ranking
from kvkeep.policies import registry
from kvkeep.policies._mass import HeavyHitters
from kvkeep.policies.base import MassSums
from kvkeep.types import AttentionOptions, Phase, Report, View


def told():
    """Every policy that says what its sums are, with the options under which they are so."""
    for name in registry.available():
        sums = kvkeep.parse(name).sums
        if sums is not None:
            options = ",".join(f"{option}={value}" for option, value in sums.only.items())
            yield kvkeep.parse(f"{name}:{options}" if options else name)
    for name in ("snapkv", "pyramidkv", "adakv"):
        yield kvkeep.parse(f"{name}:decode=score")
    yield kvkeep.parse("h2o:decay=0.75,recent=3")


@pytest.mark.parametrize("policy", list(told()), ids=str)
def test_what_a_policy_says_of_its_sums_is_what_it_does(policy):
    g = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(111, generator=g)[:37] for _ in range(8)]).view(4, 2, 37).int()
    positions = positions.masked_fill(torch.rand(positions.shape, generator=g) < 0.3, -1)
    view = View(
        positions=positions,
        keys=torch.zeros(4, 2, 37, 1),
        values=torch.zeros(4, 2, 37, 1),
        seen=torch.full((4,), 111),
        budget=30,
        new=torch.tensor([1, 0, 1, 1]),
        prompt=torch.full((4,), 90),
        phase=Phase.DECODE,
        layer=0,
        sequences=torch.zeros(4, dtype=torch.int64),
    )
    wanted = policy.wants(view)
    adds = (view.new > 0)[:, None, None] * float(not isinstance(wanted, Nothing))
    mass = torch.rand(4, 2, 37, generator=g) * adds
    state = {name: torch.rand(4, 2, 37, generator=g) for name in policy.slots}
    state |= {name: torch.rand(4, 2) for name in policy.summaries}
    fade = (getattr(wanted, "decay", 1.0) ** view.new)[:, None, None]
    after = policy.observe(state, view, Report({"mass": mass}))
    assert after.keys() == state.keys()
    assert all(after[name] is state.pop(name) for name in policy.summaries)
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor * fade + mass)
    want = positions.float() if policy.sums.score is None else after[policy.sums.score]
    if policy.sums.slides:
        limits = SlotLimits(view.seen, *policy.protected(view.budget), prompt=view.prompt)
        want = ranking.chosen_last(want, positions, limits.prompt[:, None] - limits.recent)
    assert torch.equal(policy.score(view, after), want)
    assert set(policy.slots.values()) <= {0.0}
    assert why_not_fused(policy, DummyBackend()) is None


def test_a_policy_that_changes_a_method_is_asked_again():
    class Contrary(type(kvkeep.parse("local"))):
        def score(self, view, state):
            return -view.positions.float()

    assert why_not_fused(kvkeep.parse("local"), DummyBackend()) is None
    assert why_not_fused(Contrary(), DummyBackend())


@dataclass(frozen=True, kw_only=True)
class Plain(HeavyHitters):
    sums: ClassVar[MassSums | None] = MassSums("mass")

    def score(self, view, state):
        return state["mass"]


def test_a_report_that_follows_from_the_slots_is_asked_for_with_the_new_token_among_them():
    class Sparing(Plain):
        def wants(self, view):
            return Mass(rows=(view.positions[:, 0] >= 0).sum(dim=-1) % 2)

    assert why_not_fused(Plain(), DummyBackend()) is None
    assert why_not_fused(Sparing(), DummyBackend())


@pytest.mark.parametrize(
    "attributes",
    [
        {"cascades": True},
        {"slots": {"mass": 1.0}},
        {"slots": {"mass": 0.0, "bonus": 0.5}},
        {"sums": MassSums("attention")},
        {"sums": MassSums("mass"), "slots": {}},
    ],
    ids=["heads that decide together", "a start above 0", "another start above 0", "another name", "no state"],
)
def test_a_policy_with_more_than_the_kernel_does_is_asked_itself(attributes):
    assert why_not_fused(type("More", (Plain,), attributes)(), DummyBackend())


STEPS = 180
FUSED = {
    "scissorhands": {},
    "scissorhands:threshold=live,literal_ties=true": {},
    "scissorhands:drop=1,window=1": {},
    "scissorhands:window=30,drop=31,theta=0.7": {"budget": (62, 40, 70)},
    "scissorhands:window=110,drop=110": {"budget": 120},
    "ahakv:recent=5": {"budget": (20, 12, 9)},
    "scissorhands:recent=3": {"budget": 40},
    "ahakv:sinks=2,recent=3": {"window": 17},
    "ahakv:sg_softmax=false,recent=3": {},
}
"""Policies and options of a layer."""


def walk(policy, *, budget=21, window=None, dtype=torch.float32, fuse):
    """What a layer gives and holds while rows read and write, some of them padding now and then, with two prompts."""
    g = torch.Generator().manual_seed(5)
    layer = kvkeep.Layer(kvkeep.parse(policy), budget, window=window)
    options = AttentionOptions(scaling=0.4, window=window)
    for step in range(STEPS):
        T = {0: 40, 150: 30}.get(step, 1)
        q, k, v = (torch.randn(3, heads, T, 16, generator=g).to(dtype) for heads in (6, 2, 2))
        real = torch.rand(3, T, generator=g) > (0.1 if T == 1 else 0.4)
        real[:, -1] |= T > 1
        phase = Phase.DECODE if T == 1 else Phase.PREFILL
        if not fuse and layer.allocated:
            layer.paths._not_fused = "not to be tried"
        out = layer.step(q, k, v, options=options, phase=phase, real=None if step % 3 else real)
        holds = {**layer.state, "keys": layer.store.keys[..., 0], "positions": layer.store.positions}
        holds["lost"] = layer.block.lost
        yield (
            layer.paths.why_not_fused(layer.block) is None,
            out,
            {name: tensor.clone() for name, tensor in holds.items()},
        )


@pytest.mark.slow
@pytest.mark.skipif(native().library is None, reason=native().detail)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        *((policy, torch.float32) for policy in FUSED),
        ("scissorhands", torch.bfloat16),
        ("ahakv:recent=5", torch.float16),
    ],
    ids=str,
)
def test_a_fused_layer_holds_the_same_to_the_last_bit(policy, dtype, monkeypatch):
    """All slots, bits and sums after each of many steps, through bursts, budgets of rows and a second prompt."""
    monkeypatch.setenv(SWITCH, "native")
    walks = (walk(policy, **FUSED[policy], dtype=dtype, fuse=fuse) for fuse in (True, False))
    for (fuses_one, out, one), (_, other_out, other) in zip(*walks, strict=True):
        assert fuses_one
        assert out.equal(other_out)
        torch.testing.assert_close(one.pop("lost"), other["lost"], rtol=1e-5, atol=1e-5)  # another order of sums
        assert all(tensor.equal(other[name]) for name, tensor in one.items())
    assert (other["lost"][..., 3] > 0).all()


@pytest.mark.skipif(native().library is None, reason=native().detail)
@pytest.mark.parametrize("policy", ["scissorhands", "ahakv:recent=5", "h2o"])
def test_steps_are_fused_until_a_row_has_pins(policy, monkeypatch):
    taken, step = [], NativeBackend.step

    def counted(self, given):
        taken.append(step(self, given) is not None)
        return None if not taken[-1] else torch.zeros_like(given.query)

    monkeypatch.setenv(SWITCH, "native")
    monkeypatch.setattr(NativeBackend, "step", counted)
    monkeypatch.setattr(NativeBackend, "repeat", lambda *_, **__: None)
    for pins, wanted in (((), [True] * 30), ([((2, 5),), ()], [])):
        taken.clear()
        layer = kvkeep.Layer(kvkeep.parse(policy), 21, pins=pins)
        for T in (40, *[1] * 30):
            given = (torch.randn(2, heads, T, 16) for heads in (4, 2, 2))
            layer.step(*given, options=AttentionOptions(0.3), phase=Phase.PREFILL if T > 1 else Phase.DECODE)
        assert taken == wanted
    assert {2, 3, 4} <= set(layer.store.positions[0, 0].tolist())


@pytest.mark.skipif(native().library is None, reason=native().detail)
@pytest.mark.parametrize(
    ("policy", "options", "paths", "why"),
    [
        ("h2o", {}, [DecodePath.FUSED, DecodePath.REPLAY, DecodePath.REPLAY], ""),
        ("scissorhands", {}, [DecodePath.FUSED] * 3, "no recorded step"),
        ("tova", {}, [DecodePath.PLAIN] * 3, "no sum of attention mass"),
        ("h2o", {"pins": [((2, 5),), ()]}, [DecodePath.PLAIN] * 3, "pins"),
    ],
)
def test_a_layer_says_which_path_a_step_has_taken_and_why(policy, options, paths, why, monkeypatch):
    monkeypatch.setenv(SWITCH, "native")
    layer, taken = kvkeep.Layer(kvkeep.parse(policy), 21, **options), []
    with torch.no_grad():
        for T in (40, 1, 1, 1):
            given = (torch.randn(2, heads, T, 16) for heads in (4, 2, 2))
            layer.step(*given, options=AttentionOptions(0.3), phase=Phase.PREFILL if T > 1 else Phase.DECODE)
            taken.append(layer.paths.path)
    assert taken == [None, *paths]
    assert why in layer.paths.why
    assert bool(why) == bool(layer.paths.why)


@pytest.mark.skipif(native().library is None, reason=native().detail)
def test_a_step_in_autograd_is_not_replayed_and_says_so(monkeypatch):
    monkeypatch.setenv(SWITCH, "native")
    layer = kvkeep.Layer(kvkeep.parse("h2o"), 21)
    for T in (40, 1, 1):
        given = (torch.randn(2, heads, T, 16) for heads in (4, 2, 2))
        layer.step(*given, options=AttentionOptions(0.3), phase=Phase.PREFILL if T > 1 else Phase.DECODE)
    assert layer.paths.path is DecodePath.FUSED
    assert "autograd" in layer.paths.why


def test_a_window_in_which_heads_hold_more_and_fewer_tokens_is_not_tallied():
    backend = NativeBackend()
    assert why_not_fused(kvkeep.parse("scissorhands"), backend) is None
    assert why_not_fused(kvkeep.parse("scissorhands"), backend, window=30)
    assert why_not_fused(kvkeep.parse("h2o"), backend, window=30) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("observe", lambda self, state, view, report: state), ("bursts", None), ("slots", {"low0": 0.0, "mass": 1.0})],
)
def test_a_tally_that_is_told_otherwise_is_not_taken(name, value):
    kind = type(kvkeep.parse("scissorhands"))
    assert why_not_fused(type("Other", (kind,), {name: value})(), NativeBackend())


def test_a_backend_without_tallies_is_not_given_one():
    assert why_not_fused(kvkeep.parse("scissorhands"), DummyBackend())


class Counting(type(kvkeep.parse("ahakv"))):
    asked: ClassVar[list[int]] = []

    def wants(self, view):
        self.asked.append(1)
        return super().wants(view)


def steps(layer, *lengths):
    """The number of times that a policy is asked what it wants."""
    Counting.asked.clear()
    for T in lengths:
        given = (torch.randn(2, 2, T, 16) for _ in range(3))
        layer.step(*given, options=AttentionOptions(0.3), phase=Phase.PREFILL if T > 1 else Phase.DECODE)
    return len(Counting.asked)


@pytest.mark.parametrize("budget", [40, (40, 50)])
def test_a_steady_statistic_is_asked_for_once_after_each_prompt(budget):
    def layer():
        made = kvkeep.Layer(Counting(), budget)
        made.paths.statistic._steady = True  # as `sums` of the class says, whose `wants` is overridden here to count
        return made

    one = layer()
    assert steps(one, 60) == 1
    asked = one.paths.statistic
    first = asked.by(one._view(one.store.slots(), new=torch.ones(2).long(), phase=Phase.DECODE))
    again = asked.by(one._view(one.store.slots(), new=torch.ones(2).long(), phase=Phase.DECODE))
    assert first is again
    for change in (
        lambda: steps(one, 50),
        lambda: one.block.move_row(0, 1),
        lambda: one.block.clear_row(1),
        lambda: one.select_rows(torch.tensor([1, 0])),
        lambda: one.block.part(1, 2).prompt.add_(3),
        one.block.clear,
    ):
        change()
        view = one._view(one.store.slots(), new=torch.ones(2).long(), phase=Phase.DECODE)
        found = asked.by(view)
        assert found is not first
        assert torch.equal(found.gain, one.policy.wants(view).gain)
        first = found


def test_tensors_that_do_not_count_writes_are_looked_at_in_each_step():
    with torch.inference_mode():
        prompt, budget = torch.tensor([40, 50]), torch.tensor([[33], [43]])
    layer = kvkeep.Layer(kvkeep.parse("ahakv"), 33)
    steps(layer, 40)
    for field in ({"prompt": prompt}, {"budget": budget}):
        view = layer._view(layer.store.slots(), new=torch.ones(2).long(), phase=Phase.DECODE)
        asked, view = CachedStatistic(layer.policy), replace(view, **field)
        assert asked.by(view) is not asked.by(view)


def test_a_copy_of_a_layer_asks_anew():
    """The counters of writes into tensors begin anew in copies, so what was remembered may seem to be the same."""
    asked = CachedStatistic(kvkeep.parse("ahakv"))
    layer = kvkeep.Layer(kvkeep.parse("ahakv"), 33)
    steps(layer, 40)
    asked.by(layer._view(layer.store.slots(), new=torch.ones(2).long(), phase=Phase.DECODE))
    for other in (copy.copy(asked), copy.deepcopy(asked), pickle.loads(pickle.dumps(asked))):
        assert other._last is None
    assert copy.deepcopy(layer).paths.statistic._last is None


@pytest.mark.slow
@pytest.mark.skipif(native().library is None, reason=native().detail)
def test_an_engine_generates_the_same_with_fused_steps(monkeypatch):
    """Ragged requests under several policies, one of them with pins, share rows, whose state changes hands."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = kvkeep.attach(LlamaForCausalLM(config).eval())
    for layer in model.model.layers:  # uneven attention
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(linear.weight, std=0.5)

    def texts():
        policies = ("scissorhands", "ahakv:recent=4", "scissorhands:window=3,drop=4", "h2o")
        engine = Engine(model, policy="scissorhands", budget=16, rows=3, prefill_chunk=10)
        asked = [
            Request(
                prompt=[(7 * i + j) % 97 for j in range(5 + 9 * i)],
                sampling=SamplingParams(max_new_tokens=20 + 5 * i),
                ignore_end=True,
                policy=policies[i % 4],
                pins=[(1, 3)] if i == 4 else [],
            )
            for i in range(6)
        ]
        results = list(engine.generate(asked))
        return [result.token_ids for result in results], [result.lost_mass for result in results]

    fused, lost = texts()
    monkeypatch.setattr(decode_replay, "why_not_fused", lambda *given, **others: "not to be tried")
    unfused, wanted = texts()
    assert fused == unfused
    assert all(one.decode > 0 for one in lost)
    for one, other in zip(lost, wanted, strict=True):
        assert asdict(one) == pytest.approx(asdict(other), rel=1e-4)

"""What only Triton's kernels of a decode step have: tiles and splits, what they leave to torch, and fused policies."""

import pytest
import torch
from conformance.bounds import check
from conformance.cases import NOW, WINDOW, device_of, on, token
from phases import phase_of

import kvkeep
from kvkeep import registry
from kvkeep.backends import SWITCH, Added, Limits, reference
from kvkeep.backends.torch import TorchBackend
from kvkeep.backends.triton import TritonBackend, gpu, ops, prefill_ops
from kvkeep.eviction import fuses
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Mass, Nothing
from kvkeep.types import AttentionOptions, Phase, Report, Slots, Top, View

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux alone")

DEVICE = device_of("triton")
PLAIN = AttentionOptions(scaling=0.2)
SINKS = torch.tensor([0.3, -1.0, 2.0, 60.0, -torch.inf, 0.0])
ALL = AttentionOptions(scaling=0.5, window=WINDOW, softcap=2.0, sinks=SINKS)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    """Kernels run on a CPU too, and there in large tiles: each operation costs the same, whatever its size."""
    if DEVICE.type not in gpu.kernels().devices:
        pytest.skip(gpu.kernels().detail)
    if DEVICE.type == "cpu":
        monkeypatch.setitem(gpu.DECODE, "", {1024: gpu.Decode(128, 128, 4, 1)})
    gpu.notice.cache_clear()


@pytest.mark.parametrize(("S", "splits"), [(48, 1), (49, 2), (70, 2), (80, 2), (81, 3)])
def test_small_tiles_and_many_splits(monkeypatch, S, splits):
    monkeypatch.setitem(gpu.DECODE, "", {1024: gpu.Decode(16, 32, 4, 1)})
    query, slots, now = token(S, 40, 3, torch.bfloat16, E=24)
    slots.positions[2, :, :-1], slots.positions[2, :, -1] = -1, NOW  # all that a row holds is in the last slot
    slots.keys[2, :, -1], slots.values[2, :, -1] = 0.5, 2.0
    check(TritonBackend(), *on("triton", (query, slots, now), Mass(gain=2.0), ALL))
    assert ops.Scratch(*on("triton", query, slots, now, ALL), keeps=False).splits == splits


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 79])
def test_a_new_token_enters_any_split(monkeypatch, place):
    monkeypatch.setitem(gpu.DECODE, "", {1024: gpu.Decode(16, 32, 4, 1)})
    (q, (k, v, _), now), B = on("triton", token(80, 40, 3, Hk=1))[0], 6
    others = torch.arange(79, dtype=torch.int32, device=DEVICE)
    positions = torch.cat([others[:place], others.new_full((1,), -1), others[place:]]).repeat(B, 1, 1)
    k, v = k.nan_to_num(0.1), v.nan_to_num(0.1)
    new, now = (k[:, :, :1] + 1, v[:, :, :1] + 1), torch.full_like(now, 79)
    after = positions.clone()
    after[:, :, place] = 79
    full = [
        torch.cat([old[:, :, :place], one, old[:, :, place + 1 :]], dim=2) for old, one in zip((k, v), new, strict=True)
    ]
    out = ops.step(
        q, Slots(k, v, positions), new, now,
        options=PLAIN, wanted=None, added=Added((), is_score=False), limits=Limits(seen=now[:, 0] + 1),
    )  # fmt: skip
    torch.testing.assert_close((k, v), tuple(full), rtol=0, atol=0)
    assert torch.equal(positions, after)
    want, _ = reference.attend(q, Slots(*full, after), now, statistic=Nothing(), options=PLAIN)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.5)], ids=["mass", "gain"])
def test_a_sink_that_takes_nearly_all(statistic):
    """The report of a gain follows from the logits, so it does not underflow with the probabilities."""
    check(TritonBackend(), *on("triton", token(40, 24, 6, Hk=1, E=40), statistic, AttentionOptions(0.2, sinks=SINKS)))


def test_a_query_that_sees_nothing_gives_zeros():
    query, slots, now = on("triton", token(20, 16, 2))[0]
    slots.positions.fill_(-1)
    out, report = TritonBackend().attend(query, slots, torch.full_like(now, 7), statistic=Mass(), options=PLAIN)
    assert (out == 0).all()
    assert (report.mass == 0).all()


@pytest.mark.parametrize(
    ("given", "statistic", "options", "reason"),
    [
        (token(20, 16, 2), LastHit(), PLAIN, "LastHit"),
        (token(20, 16, 2), Mass(noise=Gumbel(1, 1, torch.arange(6))), PLAIN, "Mass"),
        (token(20, 16, 2), Nothing(), AttentionOptions(0.2, top=Top(torch.ones(6).long(), True)), "largest"),
        (token(20, 16, 2, torch.float64), Mass(), PLAIN, "float64"),
        (token(20, 272, 2), Mass(), PLAIN, "head dim of 272"),
        (token(20, 16, 65), Mass(), PLAIN, "65 query heads"),
    ],
    ids=["last hit", "noise", "top", "float64", "long heads", "many heads"],
)
def test_torch_does_what_no_kernel_knows_and_says_so_once(given, statistic, options, reason, caplog):
    given, statistic, options = on("triton", given, statistic, options)
    for _ in range(2):
        found, _ = TritonBackend().attend(*given, statistic=statistic, options=options)
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert torch.equal(found, TorchBackend().attend(*given, statistic=statistic, options=options)[0])


def test_where_kernels_run(monkeypatch):
    try:
        for interprets, devices in (("1", {"cuda", "cpu"}), ("0", {"cuda"})):
            monkeypatch.setenv(gpu.INTERPRET, interprets)
            gpu.kernels.cache_clear()
            assert gpu.kernels().devices == devices
    finally:
        gpu.kernels.cache_clear()


def test_tensors_that_are_differentiated_or_spread_are_left_to_torch():
    q, (k, _, _), _ = on("triton", token(20, 16, 2))[0]
    assert gpu.runs(q, k)
    assert not gpu.runs(q, k.mT.contiguous().mT)
    assert not gpu.runs(q, torch.nn.Parameter(k))
    with torch.no_grad():
        assert gpu.runs(q, k.clone().requires_grad_())


@pytest.mark.parametrize(("policy", "fused"), [("h2o", 2), ("local", 2), ("h2o:graduate=replace", 0), ("tova", 0)])
def test_a_layer_takes_the_fused_step_where_its_policy_can_be_told(policy, fused, monkeypatch):
    calls, honest = [], ops.step
    monkeypatch.setenv(SWITCH, "triton")
    monkeypatch.setattr(ops, "step", lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs))
    monkeypatch.setattr(prefill_ops, "attend", lambda *args, **kwargs: None)  # torch reads the prompt
    layer = kvkeep.Layer(kvkeep.parse(policy), 4)
    for T in (6, 1, 1):
        new = [torch.randn(1, heads, T, 16, device=DEVICE) for heads in (2, 1, 1)]
        layer.step(*new, options=PLAIN, phase=phase_of(new[0]))
    assert len(calls) == fused


def told():
    """Every policy that says what its sums are, with the options under which they are so."""
    for name in registry.available():
        sums = kvkeep.parse(name).sums
        if sums is not None:
            options = ",".join(f"{option}={value}" for option, value in sums.only.items())
            yield kvkeep.parse(f"{name}:{options}" if options else name)
    yield kvkeep.parse("h2o:decay=0.75,recent=3")


@pytest.mark.parametrize("policy", list(told()), ids=str)
def test_what_a_policy_says_of_its_sums_is_what_it_does(policy):
    g = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(111, generator=g)[:37] for _ in range(8)]).view(4, 2, 37).int()
    positions = positions.masked_fill(torch.rand(positions.shape, generator=g) < 0.3, -1).to(DEVICE)
    view = View(
        positions=positions,
        keys=torch.zeros(4, 2, 37, 1, device=DEVICE),
        values=torch.zeros(4, 2, 37, 1, device=DEVICE),
        seen=torch.full((4,), 111, device=DEVICE),
        budget=30,
        new=torch.tensor([1, 0, 1, 1], device=DEVICE),
        prompt=torch.full((4,), 90, device=DEVICE),
        phase=Phase.DECODE,
        layer=0,
        sequences=torch.zeros(4, dtype=torch.int64, device=DEVICE),
        past=torch.zeros(4, 0, device=DEVICE),
        alive=torch.zeros(4, 0, dtype=torch.bool, device=DEVICE),
    )
    mass = torch.rand(4, 2, 37, generator=g).to(DEVICE) * (view.new > 0)[:, None, None]
    state = {name: torch.rand(4, 2, 37, generator=g).to(DEVICE) for name in policy.slots}
    fade = (getattr(policy.wants(view), "decay", 1.0) ** view.new)[:, None, None]
    after = policy.observe(state, view, Report({"mass": mass}))
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor * fade + mass)
    want = positions.float() if policy.sums.score is None else after[policy.sums.score]
    assert torch.equal(policy.score(view, after), want)
    assert set(policy.slots.values()) <= {0.0}
    assert fuses(policy, TritonBackend())


def test_a_policy_that_changes_a_method_is_asked_again():
    class Contrary(type(kvkeep.parse("local"))):
        def score(self, view, state):
            return -view.positions.float()

    assert fuses(kvkeep.parse("local"), TritonBackend())
    assert not fuses(Contrary(), TritonBackend())

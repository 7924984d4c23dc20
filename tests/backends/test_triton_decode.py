"""What only Triton's kernels of a decode step have: where they run, what they leave to torch, and fused steps."""

import dataclasses

import pytest
import torch
from conformance.bounds import check
from conformance.cases import device_of, on, token
from phases import phase_of

import kvkeep
from kvkeep.attention_stats import LastHit, Low, Mass, Nothing
from kvkeep.backends import SWITCH, AttentionInputs
from kvkeep.backends.base import Added, FusedStep, SlotLimits
from kvkeep.backends.torch import TorchBackend
from kvkeep.backends.triton import TritonBackend, launch, ops, prefill_ops
from kvkeep.errors import pip_install
from kvkeep.kv.slot_codec import CodedSlots, blank
from kvkeep.noise import Gumbel
from kvkeep.types import AttentionOptions, Slots, Top

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux alone")

DEVICE = device_of("triton")
PLAIN = AttentionOptions(scaling=0.2)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    """Kernels run on a CPU too, and there in large tiles: each operation costs the same, whatever its size."""
    if DEVICE.type not in launch.kernels().devices:
        pytest.skip(launch.kernels().detail)
    if DEVICE.type == "cpu":
        monkeypatch.setitem(launch.DECODE, "", {1024: launch.Decode(128, 128, 4, 1)})
    launch.notice.cache_clear()


UNKNOWN = {
    "LastHit": (token(20, 16, 2), LastHit(), PLAIN),
    "Mass": (token(20, 16, 2), Mass(noise=Gumbel(1, 1, torch.arange(6))), PLAIN),
    "largest": (token(20, 16, 2), Nothing(), AttentionOptions(0.2, top=Top(torch.ones(6).long(), True))),
    "float64": (token(20, 16, 2, torch.float64), Mass(), PLAIN),
    "head dim of 272": (token(20, 272, 2), Mass(), PLAIN),
    "65 query heads": (token(20, 16, 65), Mass(), PLAIN),
}


def test_torch_does_what_no_kernel_knows_and_says_so_once(caplog):
    for reason, asked in UNKNOWN.items():
        given, statistic, options = on("triton", *asked)
        caplog.clear()
        for _ in range(2):
            found, _ = TritonBackend().attend(AttentionInputs(*given, statistic=statistic, options=options))
        (record,) = caplog.records
        assert reason in record.getMessage()
        want, _ = TorchBackend().attend(AttentionInputs(*given, statistic=statistic, options=options))
        assert torch.equal(found, want)


def test_a_few_slots_of_one_head_with_every_option_and_numbers_of_each_row():
    query, slots, now = token(5, 16, 2, Hk=1)
    given = query[:1], Slots(*(part[:1] for part in slots)), now[:1]
    options = AttentionOptions(0.5, window=4000, softcap=2.0, sinks=torch.tensor([0.3, -1.0]))
    for statistic in (Low(rows=torch.tensor([1]), theta=0.7, live=True), Mass(gain=torch.tensor([1.5]))):
        check(TritonBackend(), *on("triton", given, statistic, options))


def test_slots_that_a_window_has_passed_are_emptied_by_a_kernel(monkeypatch):
    monkeypatch.setattr(TorchBackend, "expire", None)
    positions = torch.tensor([[[4, 7, -1, 3, 5]]], dtype=torch.int32, device=DEVICE)
    TritonBackend().expire(positions, torch.tensor([8], device=DEVICE), 4)
    assert positions.tolist() == [[[-1, 7, -1, -1, 5]]]


def test_steps_and_codes_of_a_type_that_no_kernel_takes_are_left_to_torch():
    query, slots, now = on("triton", token(20, 16, 2, torch.float64))[0]
    new = slots.keys[:, :, :1].nan_to_num(), slots.values[:, :, :1].nan_to_num()
    coded = CodedSlots.of(blank(slots.keys, 20, 8), blank(slots.values, 20, 8), slots.positions, torch.float64)
    before = slots.positions.clone()
    for held, asked in ((slots, query), (coded, query), (coded, query.float())):
        limits, added = SlotLimits(now[:, 0].int() + 1), Added((), is_score=False)
        assert TritonBackend().step(FusedStep(asked, held, new, now, Nothing(), PLAIN, added, limits)) is None
    assert ops.attend(query, coded, now, options=PLAIN, wanted=None) is None
    assert ops.write(coded, new, now) is None
    assert torch.equal(slots.positions, before)


def test_where_kernels_run(monkeypatch):
    try:
        for interprets, devices in (("1", {"cuda", "cpu"}), ("0", {"cuda"})):
            monkeypatch.setenv(launch.INTERPRET, interprets)
            launch.kernels.cache_clear()
            assert launch.kernels().devices == devices
    finally:
        launch.kernels.cache_clear()


def test_without_triton_there_are_no_kernels_and_a_remedy(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    found = launch.kernels.__wrapped__()
    assert found.devices == set()
    assert found.detail == f"Triton is not installed: {pip_install('gpu')}"


@pytest.mark.parametrize(
    ("capability", "roomy"),
    [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 6), False),
        ((8, 7), True),
        ((8, 9), False),
        ((9, 0), True),
        ((12, 0), False),
    ],
    ids=str,
)
def test_large_tiles_are_for_gpus_with_much_shared_memory(monkeypatch, capability, roomy):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch._is_roomy.__wrapped__(torch.device("cuda")) is roomy


def test_slots_that_no_kernel_takes_are_evicted_by_torch():
    """Positions of a view that is not dense, which the kernels do not read."""
    positions = torch.arange(24, dtype=torch.int32).view(2, 2, 6)
    seen, score = torch.tensor([6, 24]), torch.rand(2, 2, 6)
    for do in (
        lambda backend, slots: backend.expire(slots, seen, 4),
        lambda backend, slots: backend.evict(slots, score, SlotLimits(seen, 1, 1, 3)),
    ):
        spread, plain = positions.mT.contiguous().mT, positions.clone()
        do(TritonBackend(), spread)
        do(TorchBackend(), plain)
        assert torch.equal(spread, plain)
        assert (plain < 0).any()


def test_whether_a_budget_is_exceeded_is_torchs_answer():
    positions = torch.tensor([[[0, 1, -1]]], dtype=torch.int32)
    assert [TritonBackend().is_over(positions, limit) for limit in (1, 2, 3)] == [True, False, False]


def test_tensors_that_are_differentiated_or_spread_are_left_to_torch():
    q, (k, _, _), _ = on("triton", token(20, 16, 2))[0]
    assert launch.runs(q, k)
    assert not launch.runs(q, k.mT.contiguous().mT)
    assert not launch.runs(q, torch.nn.Parameter(k))
    assert not launch.runs(q, k.clone().requires_grad_())
    assert not launch.runs(q.to("meta"))
    with torch.no_grad():
        assert launch.runs(q, k.clone().requires_grad_())


def test_attention_that_is_differentiated_is_torchs():
    query, slots, now = on("triton", token(20, 16, 2))[0]
    query.requires_grad_()
    found, want = (
        backend.attend(AttentionInputs(query, slots, now, statistic=Nothing(), options=PLAIN))[0]
        for backend in (TritonBackend(), TorchBackend())
    )
    assert torch.equal(found, want)
    assert found.requires_grad


@pytest.mark.parametrize(
    ("statistic", "changes", "window", "gradient"),
    [
        (LastHit(), {}, None, False),
        (Mass(), {}, None, True),
        (Nothing(), {"top": Top(torch.ones(6).long(), True)}, None, False),
        (Mass(), {"window": 5}, None, False),
        (Mass(), {}, 5, False),
    ],
    ids=["last hit", "gradient", "top", "a window for attention alone", "a window for slots alone"],
)
def test_a_step_that_no_kernel_knows_is_not_fused_and_changes_nothing(statistic, changes, window, gradient):
    query, slots, now = on("triton", token(20, 16, 2))[0]
    before = slots.positions.clone()
    new = slots.keys[:, :, :1].clone().requires_grad_(gradient), slots.values[:, :, :1]
    more = {"added": Added((), is_score=False), "limits": SlotLimits(now[:, 0].int() + 1, window=window)}
    options = dataclasses.replace(PLAIN, **changes)
    assert TritonBackend().step(FusedStep(query, slots, new, now, statistic, options, **more)) is None
    assert torch.equal(slots.positions, before)


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


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("policy", ["h2o:recent=1", "h2o:recent=1,decay=0.5", "snapkv:window=1,decode=score", "local"])
def test_a_fused_step_counts_the_mass_of_its_victims(policy, window, monkeypatch):
    monkeypatch.setattr(prefill_ops, "attend", lambda *args, **kwargs: None)  # torch reads the prompt
    options, lost = AttentionOptions(scaling=0.2, window=window), []
    for backend in ("triton", "torch"):
        monkeypatch.setenv(SWITCH, backend)
        torch.manual_seed(0)
        layer = kvkeep.Layer(kvkeep.parse(policy), 4, window=window)
        for T in (6, 1, 1, 1):
            new = [torch.randn(2, heads, T, 16) for heads in (4, 2, 2)]
            layer.step(*(x.to(DEVICE) for x in new), options=options, phase=phase_of(new[0]))
        lost.append(layer.block.lost.cpu())
    torch.testing.assert_close(lost[0], lost[1], rtol=1e-4, atol=1e-5)
    if window is None:
        assert (lost[0][..., 2] > 0).all() == (policy != "local")


@pytest.mark.long
def test_a_fused_step_protects_the_recent_tokens_of_each_head():
    query, slots, now = token(24, 16, 2)
    slots = slots._replace(keys=slots.keys.nan_to_num(), values=slots.values.nan_to_num())
    slots.positions[:, :, 5] = -1  # every head has an empty slot
    new, scores = (torch.randn(6, 2, 1, 16), torch.randn(6, 2, 1, 16)), torch.rand(6, 2, 24)
    recent = torch.tensor([0, 4500]).expand(6, 2).contiguous()  # nearly all tokens of the second head
    found = []
    for name, limited in (("triton", recent), ("parts", recent), ("parts", recent[:, :1])):
        given = query, slots._replace(positions=slots.positions.clone()), new, now, scores.clone(), limited
        query_, held, pair, at, sums, newest = on("triton", *given)
        limits, backend = SlotLimits(at[:, 0] + 1, 0, newest, 10), TorchBackend()
        asked = {"statistic": Mass(), "options": PLAIN}
        if name == "triton":
            added = Added((sums,), is_score=True)
            assert (
                TritonBackend().step(FusedStep(query_, held, pair, at, **asked, added=added, limits=limits)) is not None
            )
        else:
            slot = backend.append(held, *pair, at)
            mass = backend.attend(AttentionInputs(query_, held, at, **asked))[1].mass
            backend.evict(held.positions, sums.scatter(-1, slot, 0.0) + mass, limits)
        found.append(held.positions.cpu())
    real = now[:, 0] >= 0
    assert torch.equal(found[0][real], found[1][real])
    assert not torch.equal(found[1][real], found[2][real])  # the row's first number would evict others

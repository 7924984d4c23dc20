"""What only the native kernel has: threads, exact roundings, and what it leaves to torch."""

from dataclasses import replace

import model_folders
import pytest
import torch
from conformance.cases import GREAT_SINK_AND_ALL, token

from kvkeep.attention_stats import LastHit, Mass, Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends.native import NativeBackend, native, ops
from kvkeep.backends.torch import TorchBackend
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.layer import Layer
from kvkeep.models.load import load
from kvkeep.noise import Gumbel
from kvkeep.policies.registry import parse
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Phase, Slots, Top

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

HALVES = [torch.bfloat16, torch.float16]
PLAIN = AttentionOptions(scaling=0.2)
ROTATION = Rotation(1.0 / 100 ** (torch.arange(0, 64, 2) / 64))


def by_kernel(query, slots, now, *, options=PLAIN):
    """The output, from the kernel or not at all."""
    found = ops.attend(query, slots.keys, slots.values, now, slots.positions, options=options, wanted=None)
    return None if found is None else found[0]


@pytest.mark.parametrize("backend", [NativeBackend(), NativeBackend().at_ranks(ROTATION)], ids=["true", "slot"])
def test_the_number_of_threads_changes_nothing(backend):
    arguments = token(1024, 64, 3)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            out, report = backend.attend(
                AttentionInputs(*arguments, statistic=Mass(gain=1.5), options=GREAT_SINK_AND_ALL)
            )
        finally:
            torch.set_num_threads(1)
        found.append((out, report.mass))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_the_kernel_writes_to_the_device_of_its_inputs_whatever_torchs_default_is():
    found, (model, _) = [], load(model_folders.folder())
    for device in ("cpu", "meta"):
        cache = BoundedCache(model.config, "h2o:recent=2", budget=8)
        with torch.device(device), torch.inference_mode():
            parts = torch.tensor([[5, 9, 17, 40, 3, 8, 22, 6, 7]], device="cpu"), torch.tensor([[7]], device="cpu")
            found.append([model(input_ids=part, past_key_values=cache).logits for part in parts])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_is_widened_and_rounded_exactly(dtype):
    """All 65 536 numbers of a half-precision type, as values of one slot each that is seen alone."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 1, 64)
    zeros = torch.zeros_like(numbers)
    now = torch.zeros(len(numbers), 1, dtype=torch.int64)
    out = by_kernel(zeros, Slots(zeros, numbers, now[..., None].int()), now)
    assert torch.equal(out.isnan(), numbers.isnan())
    assert torch.equal(out.nan_to_num(), numbers.nan_to_num())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_mean_of_two_halves_is_rounded_to_even(dtype):
    values = torch.randn(1000, 1, 2, 64, generator=torch.Generator().manual_seed(0)).mul(30.0).exp2().to(dtype)
    zeros, now = torch.zeros_like(values), torch.ones(1000, 1, dtype=torch.int64)
    positions = torch.tensor([0, 1], dtype=torch.int32).expand(1000, 1, 2)
    out = by_kernel(zeros[:, :, :1], Slots(zeros, values, positions), now)
    assert torch.equal(out[:, :, 0], values.float().mean(dim=2).to(dtype))


@pytest.mark.parametrize(
    ("statistic", "options"),
    [
        (LastHit(), PLAIN),
        (Mass(noise=Gumbel(1, 1, torch.arange(6))), PLAIN),
        (Nothing(), replace(PLAIN, top=Top(torch.ones(6, dtype=torch.int64), renormalise=True))),
    ],
    ids=["last hit", "noise", "top"],
)
def test_what_the_kernel_does_not_know_is_left_to_torch(statistic, options, monkeypatch):
    asked, honest = [], TorchBackend.attend
    monkeypatch.setattr(TorchBackend, "attend", lambda *one, **more: asked.append(1) or honest(*one, **more))
    NativeBackend().attend(AttentionInputs(*token(40, 32, 2), statistic=Mass(), options=PLAIN))
    assert asked == []
    NativeBackend().attend(AttentionInputs(*token(40, 32, 2), statistic=statistic, options=options))
    assert asked == [1]


def test_tensors_that_the_kernel_does_not_take():
    q, (k, v, positions), now = token(40, 32, 2)

    def taken(q, k, v):
        return by_kernel(q, Slots(k, v, positions), now) is not None

    assert taken(q, k, v)
    assert not taken(q.double(), k.double(), v.double())
    assert not taken(q, k, v.bfloat16())
    assert not taken(q, k.mT.contiguous().mT, v)
    assert not taken(q, k, v.clone().requires_grad_())
    assert not taken(q, torch.nn.Parameter(k), v)
    with torch.no_grad():
        assert taken(q, k, v.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "tova"])
def test_a_decode_step_under_slot_positions_rotates_no_copy_of_the_keys(policy, dtype, monkeypatch):
    def tokens(T):
        return (torch.randn(2, heads, T, 64, dtype=dtype) for heads in (4, 2, 2))

    layer = Layer(parse(policy), 8, rotation=ROTATION)
    layer.step(*tokens(20), options=PLAIN, phase=Phase.PREFILL)
    monkeypatch.delattr(Rotation, "at_ranks")
    for _ in range(12):
        assert layer.step(*tokens(1), options=PLAIN, phase=Phase.DECODE).isfinite().all()


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_rows_that_change_places_under_slot_positions(policy):
    """The kernel remembers nothing between steps: rows may be swapped, repeated and forgotten."""
    g = torch.Generator().manual_seed(0)
    prompt = [torch.randn(3, heads, 20, 64, generator=g) for heads in (4, 2, 2)]
    later = [[torch.randn(3, heads, 1, 64, generator=g) for heads in (4, 2, 2)] for _ in range(20)]
    index = torch.tensor([2, 0, 2, 1])

    def run(rows, moves):
        layer = Layer(parse(policy), 8, rotation=ROTATION)
        layer.step(*(x[rows] for x in prompt), options=PLAIN, phase=Phase.PREFILL)
        for step, tokens in enumerate(later):
            if step == 10 and moves:
                layer.select_rows(index)
                rows = rows[index]
            out = layer.step(*(x[rows] for x in tokens), options=PLAIN, phase=Phase.DECODE)
        return out

    assert torch.equal(run(torch.arange(3), moves=True), run(index, moves=False))

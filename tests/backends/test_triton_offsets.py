"""Tensors of more than 2^31 elements: offsets must not wrap. Most of their memory is promised, and never used."""

import mmap

import pytest
import torch

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import AttentionInputs, reference
from kvkeep.types import AttentionOptions, Slots

pytest.importorskip("triton")
from triton.runtime import interpreter

from kvkeep.backends.triton import launch, prefill_ops

if not launch.interprets():
    pytest.skip("kernels run compiled here, not interpreted", allow_module_level=True)

STEP = 2**30
"""Elements from one line to the next: the third is 2^31 away, the first number that int32 does not have."""

DTYPE, BYTES = torch.float16, 2
D = 16
OPTIONS = AttentionOptions(scaling=0.5)


@pytest.fixture
def far(monkeypatch):
    """Turns a tensor of at most three lines into one with lines `STEP` apart; an offset that wraps hits zeros."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    held = []

    def spread(tensor, axis):
        try:
            held.append(mmap.mmap(-1, 4 * STEP * BYTES + mmap.PAGESIZE * 64, flags=flags))
        except OSError as error:
            pytest.skip(f"the system promises no such memory: {error}")
        ground = torch.frombuffer(held[-1], dtype=DTYPE)
        strides = list(tensor.stride())
        strides[axis] = STEP
        view = ground.as_strided(tensor.shape, strides, 2 * STEP)
        view.copy_(tensor)
        return view

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)  # would copy all of it
    return spread


def problem(G):
    """Three rows of three query heads, each far from the next in memory if asked to be."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 3, D, generator=g).to(DTYPE)
    k, v = (torch.randn(1, 3 // G, 3, D, generator=g).to(DTYPE) for _ in range(2))
    now = torch.arange(3)[None]
    return [q, k, v, now, now[:, None].to(torch.int32).expand(1, 3 // G, 3)]


@pytest.mark.parametrize("statistic", [Mass(), Low(), Mass(rows=2, gain=1.5)], ids=["mass", "low", "gain"])
@pytest.mark.parametrize(("which", "axis", "G"), [(0, 2, 1), (1, 2, 1), (2, 2, 1), (0, 1, 3)])
def test_lines_far_apart(which, axis, G, statistic, far):
    tensors = query, keys, values, now, positions = problem(G)
    slots = Slots(keys, values, positions)
    want, report = reference.attend(AttentionInputs(query, slots, now, statistic=statistic, options=OPTIONS))
    tensors[which] = far(tensors[which], axis)
    query, keys, values, now, positions = tensors
    out, found = prefill_ops.attend(
        AttentionInputs(query, Slots(keys, values, positions), now, statistic=statistic, options=OPTIONS)
    )
    torch.testing.assert_close(out.double(), want, rtol=4e-3, atol=4e-3)
    for name, sums in report.sums.items():
        torch.testing.assert_close(found.sums[name].double(), sums, rtol=1e-4, atol=1e-5)

"""The fast attention against the reference in float64, on unordered slots with holes."""

import pytest
import torch

from kvkeep.backends import cpu, reference
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Low, LowRows, Mass, Nothing
from kvkeep.types import AttentionOptions


def problem(B=2, Hk=2, G=2, T=5, S=17, D=8, E=None, seed=0, pads=0):
    """Shuffled slots with holes for T == 1; slots and then the chunk's own keys for T > 1."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hk * G, T, D, generator=g)
    k = torch.randn(B, Hk, S, D, generator=g)
    v = torch.randn(B, Hk, S, E or D, generator=g)
    held = S - T if T > 1 else S
    past = torch.stack([torch.randperm(40, generator=g)[:held] for _ in range(B * Hk)]).view(B, Hk, held)
    past = past.masked_fill(torch.rand(past.shape, generator=g) < 0.3, -1)
    now = torch.arange(40, 40 + T).expand(B, T)
    if T == 1:
        past[..., 3] = 40
        return q, k, v, now, past
    now = now.clone()
    now[1:, :pads] = -1
    return q, k, v, now, torch.cat([past, now[:, None].expand(B, Hk, T)], dim=-1)


OPTIONS = {
    "plain": AttentionOptions(scaling=0.5),
    "softcap": AttentionOptions(scaling=2.0, softcap=1.5),
    "window": AttentionOptions(scaling=0.5, window=9),
    "sinks": AttentionOptions(scaling=0.5, sinks=torch.tensor([0.3, -1.0, 2.0, 5.0])),
    "all": AttentionOptions(scaling=1.0, window=7, softcap=2.0, sinks=torch.tensor([0.3, -1.0, 2.0, 5.0])),
}

STATISTICS = {
    "nothing": Nothing(),
    "mass": Mass(),
    "last": Mass(rows=1),
    "three": Mass(rows=3),
    "ragged": Mass(rows=torch.tensor([2, 4])),
    "gain": Mass(gain=torch.tensor([1.5, 0.0])),
    "noise": Mass(gain=0.7, noise=Gumbel(5, 1, torch.tensor([3, 4]))),
    "decay": Mass(decay=0.9, last=torch.tensor([20, 20])),
    "low": Low(rows=4),
    "live": Low(live=True, theta=0.7),
    "rows": LowRows(rows=torch.tensor([4, 30]), words=2, last=torch.tensor([44, 40]), due=torch.tensor([2, 0])),
    "hit": LastHit(rows=4, quantile=0.6),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS.keys())
@pytest.mark.parametrize("shape", [{"T": 1}, {"T": 5, "pads": 2}, {"T": 17}, {"T": 1, "E": 4}], ids=str)
def test_equals_the_reference(shape, statistic, options, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 2 * 4 * 4 * 17 * 3)  # three rows a block
    q, k, v, now, positions = problem(**shape)
    out, report = cpu.attend(q, k, v, now, positions, statistic=statistic, options=options)
    want, want_report = reference.attend(q, k, v, now, positions, statistic=statistic, options=options)
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real].double(), want[real], rtol=1e-5, atol=1e-6)
    assert report.sums.keys() == want_report.sums.keys() == set(statistic.fields)
    for name, found in report.sums.items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), want_report.sums[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 6])
def test_half_precision_is_widened_exactly(dtype, T, monkeypatch):
    # half-precision inputs are exact in float32, so only the final rounding of the output may differ
    monkeypatch.setattr(cpu, "WIDEN_SLOTS", 4)
    q, k, v, now, positions = problem(T=T)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    options = AttentionOptions(scaling=0.5)
    out, report = cpu.attend(q, k, v, now, positions, statistic=Mass(), options=options)
    want, want_report = reference.attend(q, k, v, now, positions, statistic=Mass(), options=options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    torch.testing.assert_close(report.mass.double(), want_report.mass, rtol=1e-5, atol=1e-6)


def test_mass_of_all_rows_adds_up_to_the_number_of_rows():
    q, k, v, now, positions = problem(T=5, pads=2)
    _, report = cpu.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    torch.testing.assert_close(report.mass.sum(-1), torch.tensor([[5.0, 5.0], [3.0, 3.0]]))
    assert (report.mass[positions < 0] == 0).all()


def test_no_block_is_larger_than_asked(monkeypatch):
    limit = 2**16
    monkeypatch.setattr(cpu, "BLOCK_BYTES", limit)
    sizes = []
    honest = cpu._softmax

    def spy(logits, hidden, sinks):
        sizes.append(logits.numel() * 4)
        return honest(logits, hidden, sinks)

    monkeypatch.setattr(cpu, "_softmax", spy)
    q, k, v, now, positions = problem(B=1, T=300, S=300)
    cpu.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    assert max(sizes) <= limit
    assert len(sizes) > 10


@pytest.mark.parametrize(("statistic", "rows"), [(Nothing(), 0), (Mass(rows=3), 3), (Mass(), 17)])
def test_only_rows_that_count_have_their_probabilities_made(statistic, rows, monkeypatch):
    made = []
    honest = cpu._softmax
    monkeypatch.setattr(cpu, "_softmax", lambda logits, *rest: made.append(logits.shape[3]) or honest(logits, *rest))
    q, k, v, now, positions = problem(B=1, T=17)
    cpu.attend(q, k, v, now, positions, statistic=statistic, options=OPTIONS["plain"])
    assert sum(made) == rows


@pytest.mark.parametrize("same", [False, True])
def test_heads_that_hold_the_same_share_one_mask(same, monkeypatch):
    masks = []
    honest = cpu.scaled_dot_product_attention
    monkeypatch.setattr(
        cpu, "scaled_dot_product_attention", lambda q, k, v, mask, **o: masks.append(mask) or honest(q, k, v, mask, **o)
    )
    q, k, v, now, positions = problem(T=9, S=21)
    positions = positions[:, :1].expand_as(positions).contiguous() if same else positions
    cpu.attend(q, k, v, now, positions, statistic=Nothing(), options=OPTIONS["plain"])
    assert {mask.shape[1] for mask in masks} == {1 if same else 4}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 2**20])
def test_fused_blocks_of_any_size_equal_the_reference(limit, shared, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_BYTES", limit)
    q, k, v, now, positions = problem(T=9, S=21, E=4, pads=3)
    positions = positions[:, :1] if shared else positions
    arguments = {"statistic": Mass(rows=2), "options": OPTIONS["window"]}
    out, report = cpu.attend(q, k, v, now, positions, **arguments)
    want, expected = reference.attend(q, k, v, now, positions.expand(-1, 2, -1), **arguments)
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real].double(), want[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(report.mass.double(), expected.mass, atol=1e-5, rtol=1e-5)
    assert out.isfinite().all()


def test_a_row_that_sees_nothing_is_finite_and_counts_for_nothing():
    q, k, v, now, positions = problem(T=1)
    out, report = cpu.attend(
        q, k, v, torch.full_like(now, -1), torch.full_like(positions, -1), statistic=Mass(), options=OPTIONS["plain"]
    )
    assert out.isfinite().all()
    assert (report.mass == 0).all()

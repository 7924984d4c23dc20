"""What only the backend in plain torch has: blocks of rows, and torch's own attention for rows that no one counts."""

import pytest
import torch
from conformance.cases import chunk

from kvkeep.backends import reference
from kvkeep.backends import torch as plain
from kvkeep.backends.torch import TorchBackend
from kvkeep.statistic import Mass, Nothing
from kvkeep.types import AttentionOptions

PLAIN = AttentionOptions(scaling=0.5)


def attend(given, statistic, options=PLAIN):
    query, slots, now = given
    return TorchBackend().attend(query, slots, now, statistic=statistic, options=options)


def test_no_block_is_larger_than_asked(monkeypatch):
    limit = 2**16
    monkeypatch.setattr(plain, "BLOCK_BYTES", limit)
    sizes = []
    honest = plain._softmax

    def spy(logits, hidden, sinks):
        sizes.append(logits.numel() * 4)
        return honest(logits, hidden, sinks)

    monkeypatch.setattr(plain, "_softmax", spy)
    attend(chunk(B=1, T=300, S=0), Mass())
    assert max(sizes) <= limit
    assert len(sizes) > 10


@pytest.mark.parametrize(("statistic", "rows"), [(Nothing(), 0), (Mass(rows=3), 3), (Mass(), 17)])
def test_only_rows_that_count_have_their_probabilities_made(statistic, rows, monkeypatch):
    made = []
    honest = plain._softmax
    monkeypatch.setattr(plain, "_softmax", lambda logits, *rest: made.append(logits.shape[3]) or honest(logits, *rest))
    attend(chunk(B=1, T=17, S=0), statistic)
    assert sum(made) == rows


@pytest.mark.parametrize("same", [False, True])
def test_heads_that_hold_the_same_share_one_mask(same, monkeypatch):
    masks = []
    honest = plain.scaled_dot_product_attention
    monkeypatch.setattr(
        plain,
        "scaled_dot_product_attention",
        lambda q, k, v, mask, **o: masks.append(mask) or honest(q, k, v, mask, **o),
    )
    query, slots, now = chunk(T=9, S=12)
    positions = slots.positions[:, :1].expand_as(slots.positions).contiguous() if same else slots.positions
    attend((query, slots._replace(positions=positions), now), Nothing())
    assert {mask.shape[1] for mask in masks} == {1 if same else 4}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 2**20])
def test_fused_blocks_of_any_size_equal_the_reference(limit, shared, monkeypatch):
    monkeypatch.setattr(plain, "BLOCK_BYTES", limit)
    query, slots, now = given = chunk(T=9, S=12, E=4, pads=3, shared=shared)
    statistic, options = Mass(rows=2), AttentionOptions(scaling=0.5, window=9)
    out, report = attend(given, statistic, options)
    want, expected = reference.attend(query, slots, now, statistic=statistic, options=options)
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real].double(), want[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(report.mass.double(), expected.mass, atol=1e-5, rtol=1e-5)
    assert out.isfinite().all()

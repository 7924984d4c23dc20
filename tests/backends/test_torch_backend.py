"""What only the backend in plain torch has: blocks of rows, and torch's own attention for rows that no one counts."""

import pytest
from conformance.cases import chunk

from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends import torch as plain
from kvkeep.backends.torch import TorchBackend
from kvkeep.types import AttentionOptions

PLAIN = AttentionOptions(scaling=0.5)


def attend(given, statistic, options=PLAIN):
    query, slots, now = given
    return TorchBackend().attend(AttentionInputs(query, slots, now, statistic=statistic, options=options))


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

"""Co-occurrence: the count by brute force, and correlations of attention that was made to follow it, or not."""

import random

import pytest
import torch
from constructed import Axes, context, show

from kvkeep_lab.analysis.groups import cooccurrence
from kvkeep_lab.analysis.groups.cooccurrence import Cooccurrence, cooccurrences


def test_the_count_against_plain_loops():
    rng = random.Random(0)
    tokens = [rng.randrange(12) for _ in range(70)]
    windows = [tokens[i : i + 16] for i in range(0, 70, 16)]
    expected = [sum(1 for window in windows if v in window for u in set(window) if u != v) for v in sorted(set(tokens))]
    assert cooccurrences(torch.tensor(tokens), 16).tolist() == expected


def made(monkeypatch, exponent, *, noise=0.2, frequency=1.0):
    """A text of windows with few or many kinds; every token receives C(v)^exponent · count^frequency, shared out."""
    monkeypatch.setattr(cooccurrence, "WINDOW", 16)
    rng = random.Random(1)
    tokens = []
    for _ in range(60):
        pool = rng.sample(range(60), rng.choice([3, 6, 12, 16]))
        tokens += [rng.choice(pool) for _ in range(16)]
    n = len(tokens)
    counts = torch.bincount(torch.tensor(tokens))
    C = torch.zeros(len(counts), dtype=torch.float64)
    C[sorted(set(tokens))] = cooccurrences(torch.tensor(tokens), 16)
    draw = torch.Generator().manual_seed(2)
    wanted = C.clamp(min=1) ** exponent * counts.clamp(min=1) ** frequency
    wanted = wanted * (noise * torch.randn(len(counts), generator=draw, dtype=torch.float64)).exp()
    each = (wanted / counts.clamp(min=1))[torch.tensor(tokens)]
    rows = torch.zeros(1, 1, 2 * n, 2 * n, dtype=torch.float64)
    rows[0, 0, n:, :n] = each / each.sum()
    text = [*tokens, *range(1000, 1000 + n)]  # the second half looks back and is never looked at
    return show(Cooccurrence(context(text)), rows, block=n).result()


def test_attention_that_follows_co_occurrence(monkeypatch):
    result = made(monkeypatch, 2.0)
    assert result["spearman"] > 0.8
    assert result["given_count_and_place"] > 0.5
    assert result["interval"][0] > 0
    assert Cooccurrence.reading(result).verdict == "agree"


def test_attention_that_follows_frequency_alone_correlates_trivially(monkeypatch):
    result = made(monkeypatch, 0.0)
    assert result["spearman"] > 0.5  # the trivial part
    low, high = result["interval"]
    assert low < 0 < high
    assert Cooccurrence.reading(result).verdict == "cannot tell"


def test_attention_against_co_occurrence(monkeypatch):
    result = made(monkeypatch, -2.0, frequency=0.0)
    assert result["spearman"] < 0
    assert Cooccurrence.reading(result).verdict == "differ"


def test_rare_kinds_do_not_count(monkeypatch):
    result = made(monkeypatch, 1.0)
    assert result["n_kinds"] <= 60  # none of the 960 that occur once
    assert min(result["points"]["count"]) >= 5


def test_few_kinds_tell_nothing():
    n = 256
    rows = torch.tril(torch.ones(1, 1, n, n))
    result = show(Cooccurrence(context([i % 7 for i in range(n)])), rows / rows.sum(-1, keepdim=True)).result()
    assert result["n_kinds"] == 7
    assert Cooccurrence.reading(result).verdict == "cannot tell"
    axes = Axes()
    Cooccurrence.draw(result, axes)
    assert {"set_xlabel", "set_ylabel"} <= {name for name, _, _ in axes.calls}


def test_layers_are_added_up_and_reported_alone():
    n = 300
    tokens = [i % 10 for i in range(n)]
    rows = torch.zeros(2, 1, n, n)
    rows[0, 0, :, 0] = 1.0
    rows[1, 0, range(n), range(n)] = 1.0
    result = show(Cooccurrence(context(tokens, layers=2)), rows).result()
    assert len(result["by_layer"]) == 2
    assert sum(
        m * c for m, c in zip(result["points"]["mass"], result["points"]["count"], strict=True)
    ) == pytest.approx(2 * n, rel=1e-4)

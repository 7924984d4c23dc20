"""Ranks, shares and correlations against closed forms."""

import math

import pytest
import torch

from kvkeep_lab.analysis.groups import _ranks as stats


def test_ranks_share_the_mean_of_ties():
    found = stats.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0]))
    assert found.tolist() == [4.0, 1.0, 4.0, 2.0, 4.0]


def test_spearman_sees_order_alone():
    x = torch.arange(1.0, 9.0)
    assert stats.spearman(x, x.exp()) == pytest.approx(1.0)
    assert stats.spearman(x, -(x**3)) == pytest.approx(-1.0)
    # d² of the ranks (1 2 3 4) and (2 1 4 3) is 4: 1 - 6·4 / (4·15)
    assert stats.spearman(torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 1, 4, 3])) == pytest.approx(0.6)


def test_what_does_not_vary_has_no_correlation():
    assert stats.pearson(torch.ones(5), torch.arange(5.0)) is None
    assert stats.pearson(torch.arange(2.0), torch.arange(2.0)) is None


def test_partial_correlation_is_the_textbook_formula():
    draw = torch.Generator().manual_seed(1)
    z = torch.randn(200, generator=draw)
    x, y = z + torch.randn(200, generator=draw), 2 * z + torch.randn(200, generator=draw)
    xy, xz, yz = stats.pearson(x, y), stats.pearson(x, z), stats.pearson(y, z)
    expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    assert stats.partial(x, y, z[:, None]) == pytest.approx(expected, abs=1e-6)
    assert abs(expected) < 0.15 < xy  # nothing but z connects them


def test_partial_correlation_of_what_the_control_explains_fully_has_no_value():
    z = torch.linspace(0.0, 1.0, 20)
    assert stats.partial(3 * z + 1, torch.sin(40 * z), z[:, None]) is None


def test_partial_correlation_needs_more_values_than_controls():
    draw = torch.Generator().manual_seed(1)
    x, y, z = torch.randn(3, 4, generator=draw)
    assert stats.partial(x[:3], y[:3], z[:3, None]) is None
    assert stats.partial(x, y, z[:, None]) is not None


def test_interval_by_fisher():
    low, high = stats.interval(0.5, 28)
    assert math.atanh(high) - math.atanh(0.5) == pytest.approx(1.96 / 5)
    assert math.atanh(0.5) - math.atanh(low) == pytest.approx(1.96 / 5)
    assert stats.interval(0.5, 29, controls=1) == [low, high]
    assert stats.interval(0.5, 3) is None
    assert stats.interval(None, 30) is None


def test_power_law_finds_the_exponent_whatever_the_order():
    values = 7.0 * torch.arange(1.0, 501.0, dtype=torch.float64) ** -1.3
    shuffled = values[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    fit = stats.power_law(torch.cat([shuffled, torch.zeros(20, dtype=torch.float64)]))
    assert fit.slope == pytest.approx(-1.3)
    assert fit.r2 == pytest.approx(1.0)
    assert (fit.first, fit.last) == (10, 500)
    assert stats.power_law(values[:11]) is None


def test_an_exponential_is_no_straight_line():
    fit = stats.power_law(torch.exp(-torch.arange(300.0, dtype=torch.float64) / 5))
    assert fit.r2 < 0.9


def test_hill_on_a_power_law_has_a_closed_form():
    s, k = 0.8, 40
    values = torch.arange(1.0, 401.0, dtype=torch.float64) ** -s
    mean_excess = s * (math.log(k + 1) - math.lgamma(k + 1) / k)
    assert stats.hill(values) == pytest.approx(1 / mean_excess)
    assert stats.hill(torch.ones(50)) is None


def test_top_share_counts_whole_values():
    rows = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert stats.top_share(rows, 0.4).tolist() == pytest.approx([0.7, 0.4])
    assert stats.top_share(rows, 0.01).tolist() == pytest.approx([0.4, 0.2])  # at least one


def test_uniform_mass_is_that_of_rows_which_look_at_all_they_see():
    n, windows = 50, [None, 1, 7, 49, 50, 1000]
    for window, found in zip(windows, stats.uniform_mass(n, windows), strict=True):
        rows = torch.tril(torch.ones(n, n, dtype=torch.float64)).triu(1 - (window or n))
        assert torch.allclose(found, (rows / rows.sum(dim=1, keepdim=True)).sum(dim=0))
    # the first fifth of the keys has 0.2 (1 + ln 5) of it when n is large
    assert float(stats.top_share(stats.uniform_mass(20_000, [None]), 0.2)) == pytest.approx(
        0.2 * (1 + math.log(5)), abs=1e-4
    )


def test_jaccard_of_masks_and_its_chance_level():
    one = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    other = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert stats.jaccard(one, other).tolist() == pytest.approx([1 / 3, 1.0])
    draw = torch.Generator().manual_seed(0)
    n, k = 400, 80
    sets = torch.rand(200, n, generator=draw).argsort(dim=1) < k
    assert float(stats.jaccard(sets[:100], sets[100:]).mean()) == pytest.approx(stats.chance_jaccard(n, k), abs=0.005)


def test_log_places_and_histogram():
    places = stats.log_places(1000)
    assert places[0] == 1
    assert places[-1] == 1000
    assert len(places) <= 60
    assert stats.log_places(1) == [1]
    assert stats.histogram(torch.tensor([0, 1, 5, 9]), 10, 2) == [0.5, 0.5]

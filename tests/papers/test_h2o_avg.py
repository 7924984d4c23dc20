"""H2O with position-averaged scores: two explicit buffers here, one sum and the positions in the package."""

import math

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, Layer, parse

from .cases import DECODE, Case, family, variant
from .lockstep import compare

CASES = [
    *family("h2o_avg"),
    *variant("h2o_avg:recent=0", budgets=(1, 5, 16)),
    *variant("h2o_avg:recent=1,sinks=2", budgets=(3, 16)),
    *(
        Case("h2o_avg:recent=2", budget, (24, *DECODE), inputs=inputs)
        for budget, inputs in ((5, "twins"), (16, "twins"), (7, "constant"), (15, "constant"), (6, "sink"), (8, "hard"))
    ),
    Case("h2o_avg", 8, (24, *(1,) * 200), heads=1, group=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_the_largest_averages(case):
    compare(case)


def test_averages_still_favour_the_first_tokens():
    """policies.md §4.8: under constant attention the average is (H_n - H_{j-1}) / (n - j + 1), decreasing in j."""
    n, budget = 20, 6
    averages = [math.fsum(1 / i for i in range(j, n + 1)) / (n - j + 1) for j in range(1, n + 1)]
    assert averages == sorted(averages, reverse=True)
    layer = Layer(parse("h2o_avg:recent=0"), budget)
    ones = torch.ones(1, 1, n, 4)
    layer.step(0 * ones, ones, ones, options=AttentionOptions(scaling=0.5), phase=phase_of(ones))
    assert sorted(layer.store.positions[0, 0, :budget].tolist()) == list(range(budget))

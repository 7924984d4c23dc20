import pytest
import torch

import kvkeep
from kvkeep import budget


@pytest.mark.parametrize(
    ("ratio", "tokens", "want"), [(0.2, 100, 20), (0.2, 104, 20), (0.29, 100, 29), (0.001, 9, 1), (1.0, 7, 7)]
)
def test_from_ratio_rounds_down_but_keeps_one(ratio, tokens, want):
    assert budget.from_ratio(ratio, tokens) == want


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_from_ratio_refuses_what_is_no_fraction(ratio):
    with pytest.raises(kvkeep.BudgetError, match="outside"):
        budget.from_ratio(ratio, 10)


def test_from_ratio_refuses_an_empty_prompt():
    with pytest.raises(kvkeep.BudgetError, match="no tokens"):
        budget.from_ratio(0.5, 0)


@pytest.mark.parametrize("bad", [0, -3, [], [4, 0], 2.5, [True], "8"])
def test_check_refuses(bad):
    with pytest.raises(kvkeep.BudgetError):
        budget.check(bad)


def test_per_row():
    device = torch.device("cpu")
    assert budget.per_row((5,), 3, device) == 5
    assert budget.per_row((5, 5, 5), 3, device) == 5
    assert budget.per_row((5, 6), 2, device).tolist() == [[5], [6]]
    with pytest.raises(kvkeep.BudgetError, match="2 budgets were given for a batch of 3"):
        budget.per_row((5, 6), 3, device)

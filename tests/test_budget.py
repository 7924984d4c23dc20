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


@pytest.mark.whole
@pytest.mark.parametrize("bad", [0, -3, [], [4, 0], 2.5, [True], "8", 2**60])
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


def test_numbers_that_no_memory_holds_are_told_by_their_bits():
    for refuse in (lambda: budget.check(2**4000), lambda: budget.check_one(2**4000)):
        with pytest.raises(kvkeep.BudgetError, match=r"^budget is a number of 4001 bits"):
            refuse()


def test_heads_have_no_budgets_where_rows_have_theirs():
    assert budget.check_rows([3, 4]) == (3, 4)
    with pytest.raises(kvkeep.BudgetError, match="by `head_budget`"):
        budget.check_rows([(3, 4), 5])


def test_budgets_of_heads_are_a_table():
    device = torch.device("cpu")
    assert budget.per_head([5], 2, 3, device).tolist() == [[5, 5, 5]] * 2
    assert budget.per_head([(1, 2), 4], 2, 2, device).tolist() == [[1, 2], [4, 4]]
    with pytest.raises(kvkeep.BudgetError, match="2 budgets were given for a batch of 3 rows"):
        budget.per_head([5, 6], 3, 2, device)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("uniform", [100] * 6),
        ("ramp:0.2", [80, 88, 96, 104, 112, 120]),
        ("ramp", [80, 88, 96, 104, 112, 120]),
        ("ramp:0", [100] * 6),
        ("ramp:-0.5", [150, 130, 110, 90, 70, 50]),
        ("taper:0.5", [150, 130, 110, 90, 70, 50]),
        ("taper", [150, 130, 110, 90, 70, 50]),
        ("pyramid:20", [195, 157, 119, 81, 43, 5]),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 5.0], [60, 60, 60, 60, 60, 298]),
    ],
)
def test_budgets_per_layer(how, want):
    assert budget.per_layer(how, 100, 6) == pytest.approx(want, abs=1)
    assert sum(budget.per_layer(how, 100, 6)) == 600


@pytest.mark.parametrize("how", ["uniform", "ramp:0.37", "pyramid:7", "pyramid:1"])
@pytest.mark.parametrize("number", [8, 9, 31, 1000])
@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32])
def test_budgets_per_layer_add_up_and_leave_none_short(how, number, layers):
    found = budget.per_layer(how, number, layers, least=8)
    assert sum(found) == number * layers
    assert min(found) >= 8


def test_a_taper_goes_through_all_of_the_budget_or_is_refused():
    assert budget.per_layer("taper:0.5", 100, 5, least=50) == [150, 125, 100, 75, 50]
    with pytest.raises(kvkeep.BudgetError, match="leaves a layer 50 of 100 slots, and every layer needs 51"):
        budget.per_layer("taper:0.5", 100, 5, least=51)


@pytest.mark.parametrize(
    ("number", "windows", "want"),
    [
        (100, [512, None, 512, None], [25, 175, 25, 175]),
        (100, [40, None, 512, None], [25, 145, 25, 145]),  # layers hold no more than their windows anyway
        (1024, [512, 512, 512, None], [256, 256, 256, 1024 + 3 * 256]),
        (4096, [512, 512, 512, None], [512, 512, 512, 4096]),  # a budget with room for whole windows takes nothing away
        (10, [64, 64, None], [8, 8, 14]),  # the least of every layer
        (20, [4, 4, None], [8, 8, 20]),  # windows below the least: there is nothing to leave
        (20, [4, 64, None], [8, 8, 32]),
        (100, [64, 64], [100, 100]),  # nothing to share
        (100, [None, None], [100, 100]),
        (100, [], [100] * 4),
    ],
)
def test_layers_with_sliding_windows_leave_slots_to_the_others(number, windows, want):
    found = budget.per_layer("sliding:0.25", number, len(want), least=8, windows=windows)
    assert found == want
    held = [number if window is None else min(window, number) for window in windows or [None] * len(want)]
    used = [have if window is None else min(window, have) for have, window in zip(found, windows, strict=False)]
    assert sum(used) <= sum(held)


def test_layers_in_which_less_persists_get_more():
    weights = budget.calibrated([1.0, 0.5, 0.0])
    first, second, third = budget.per_layer(weights, 64, 3)
    assert first < second < third


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("slope:2", "Unknown layer budget"),
        ("ramp:x", "not a number"),
        ("ramp:1.0", "out of range"),
        ("taper:1.0", "out of range"),
        ("pyramid:0.5", "out of range"),
        ("sliding:0", "out of range"),
        ("sliding:1.5", "out of range"),
        ("sliding:x", "not a number"),
        ([1.0], "1 layer weights were given for 4 layers"),
        ([1.0, 0.0, 1.0, 1.0], "above 0"),
    ],
)
def test_budgets_per_layer_refuse(how, message):
    with pytest.raises(kvkeep.BudgetError, match=message):
        budget.per_layer(how, 16, 4)
    with pytest.raises(kvkeep.BudgetError, match="below the 32 slots"):
        budget.per_layer("uniform", 16, 4, least=32)

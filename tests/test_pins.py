"""Pins: how spans are read, and that no policy evicts their tokens."""

import numpy as np
import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep.errors import BudgetError, InputError, ShapeError
from kvkeep.kv import ranking
from kvkeep.pins import LAST, spans, spans_of_rows, table
from kvkeep.testing import LAWS, Case

SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
POLICIES = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in kvkeep.available_policies()]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ()),
        ([(0, 3)], ((0, 3),)),
        ([(5, 9), (0, 3)], ((0, 3), (5, 9))),
        ([(0, 3), (2, 7), (7, 8)], ((0, 8),)),
        ([(0, 9), (2, 3)], ((0, 9),)),
        ([(4, 4), (2, 3)], ((2, 3),)),
        (((1, 2), [np.int64(4), 5]), ((1, 2), (4, 5))),
        (torch.tensor([[1, 2], [4, 6]]), ((1, 2), (4, 6))),
    ],
)
def test_spans_are_put_in_order_and_joined(given, found):
    assert spans(given) == found


@pytest.mark.whole
@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([(-1, 3)], "negative"),
        ([(3, 1)], "reversed"),
        ([(0, 2**31)], "goes beyond 2147483647"),
        ([(0, 10**4000)], "goes beyond"),
        ([(0, 1, 2)], "no pair of whole numbers"),
        ([(0.0, 1.5)], "no pair of whole numbers"),
        ([5], "no pair of whole numbers"),
        (["ab"], "no pair of whole numbers"),
        ([None], "no pair of whole numbers"),
        ("system", "no list"),
        (7, "no list"),
        ({"start": 1}, "no list"),
    ],
)
def test_what_is_no_span_is_refused_with_an_example(given, word):
    with pytest.raises(InputError, match=word):
        spans(given)


def test_spans_for_all_rows_or_for_each():
    assert spans_of_rows(()) == ((),)
    assert spans_of_rows([(0, 3)]) == (((0, 3),),)
    assert spans_of_rows([[(0, 3)], [], [(1, 2), (4, 5)]]) == (((0, 3),), (), ((1, 2), (4, 5)))
    with pytest.raises(InputError, match="negative"):
        spans_of_rows([[(0, 3)], [(-1, 2)]])
    with pytest.raises(InputError, match="pins=3 are no list"):
        spans_of_rows(3)


def test_a_position_is_pinned_where_a_span_holds_it():
    rows = [((0, 2), (5, 6)), (), ((3, LAST),)]
    positions = torch.tensor([[-1, 0, 1, 2, 4, 5, 6, LAST]] * 3, dtype=torch.int32)[:, None].expand(3, 2, 8)
    wanted = [[any(start <= p < stop for start, stop in row) for p in positions[0, 0].tolist()] for row in rows]
    assert ranking.pinned(positions, table(rows, torch.device("cpu")))[:, 1].tolist() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("policy", sweep(POLICIES, lambda one: one in ("h2o", "tova", "scissorhands")))
def test_pins_survive_thousands_of_evictions(policy):
    case = Case(rows=1, heads=2, group=1, dim=2, prompt=10, steps=1000, budget=12, padding=0)
    LAWS["pinned_tokens_stay"](kvkeep.parse(policy), case)


def test_more_pins_than_fit_are_refused_with_the_numbers():
    config = kvkeep.load()[0].config
    with pytest.raises(BudgetError, match=r"100 tokens are pinned, .* together 164: .* 128. .* least 199"):
        kvkeep.BoundedCache(config, "h2o", 128, pins=[(0, 100)])
    kvkeep.BoundedCache(config, "h2o", 199, pins=[(0, 100)])
    with pytest.raises(BudgetError, match="Raise the budget"):
        kvkeep.BoundedCache(config, "h2o:recent=4", [16, 8], pins=[[], [(0, 5)]])
    kvkeep.BoundedCache(config, "full", 8, pins=[(0, 100)])
    kvkeep.BoundedCache(config, "h2o:recent=0", 100, pins=[(0, 100), (50, 90)])


def test_pins_of_another_number_of_rows_are_refused():
    model, _ = kvkeep.load()
    cache = kvkeep.BoundedCache(model.config, "h2o", 32, pins=[[(0, 2)], [(1, 3)]])
    with pytest.raises(ShapeError, match="Pins of 2 rows were given for a batch of 3"):
        model(input_ids=torch.ones((3, 4), dtype=torch.long), past_key_values=cache)

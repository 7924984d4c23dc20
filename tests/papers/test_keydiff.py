"""KeyDiff: the key goes that is most like all the others."""

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, BudgetError, Layer, parse

from .cases import DECODE, Case, family, variant
from .lockstep import choose, compare, make_layer, played, retained
from .rules_keys import KeyDiff, unit

CASES = [
    *family("keydiff", budgets=(2, 5, 16)),  # two keys are equally far from their mean: budget 1 is a coin toss
    *variant("keydiff:recent=2,sinks=3", budgets=(5, 16)),
    Case("keydiff:recent=1", 7, (30, *DECODE), inputs="drift", heads=1),
    Case("keydiff", 12, (24, *(1,) * 200), heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drops_the_keys_that_are_like_the_others(case):
    compare(case)


def test_an_example_by_hand():
    """Three keys point to the right, whatever their lengths, one upwards, one to the left."""
    keys = {0: [1.0, 0.0], 1: [0.0, 2.0], 2: [9.0, 0.0], 3: [-3.0, 0.0], 4: [0.5, 0.0]}
    anchor = unit([2.0, 1.0])  # of the five unit vectors' sum
    expected = {0: -anchor[0], 1: -anchor[1], 2: -anchor[0], 3: anchor[0], 4: -anchor[0]}
    found = KeyDiff(4, 1).scores(keys)
    assert found == pytest.approx(expected)
    assert min(found, key=lambda j: (found[j], j)) == 0  # the oldest of the three alike


def test_the_anchor_does_not_depend_on_the_lengths_of_the_keys():
    keys = {0: [1.0, 2.0], 1: [-0.5, 0.3], 2: [2.0, 0.1]}
    longer = {j: [(j + 2) * x for x in key] for j, key in keys.items()}
    assert KeyDiff(2, 1).scores(longer) == pytest.approx(KeyDiff(2, 1).scores(keys))


def test_a_key_of_length_zero_is_like_nothing():
    assert KeyDiff(1, 1).scores({0: [0.0, 0.0], 1: [1.0, 0.0]}) == {0: 0.0, 1: -1.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_key_that_is_no_number_goes_first_and_does_not_change_the_anchor(bad):
    generator, kept = torch.Generator().manual_seed(0), []
    whole = torch.randn(1, 2, 20, 4, generator=generator)
    whole[:, :, 4, 1] = bad
    for keys in (whole, torch.cat([whole[:, :, :4], whole[:, :, 5:]], dim=2)):  # with and without token 4
        layer, held, prompt = Layer(parse("keydiff"), 5), [], keys.shape[2] - 11
        for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, keys.shape[2]))]:
            part = keys[:, :, start:stop]
            layer.step(part, part, part, options=AttentionOptions(scaling=0.5), phase=phase_of(part))
            held.append(retained(layer))
        kept.append(held)
    shifted = [[[[at + (at >= 4) for at in head] for head in row] for row in held] for held in kept[1]]
    assert kept[0] == shifted


def test_among_identical_keys_the_oldest_goes():
    layer = Layer(parse("keydiff"), 5)
    ones = torch.ones(1, 2, 12, 4)
    for part in (slice(0, 9), slice(9, 10), slice(10, 11), slice(11, 12)):
        layer.step(
            ones[:, :, part],
            ones[:, :, part],
            ones[:, :, part],
            options=AttentionOptions(scaling=0.5),
            phase=phase_of(ones[:, :, part]),
        )
    assert retained(layer) == [[[7, 8, 9, 10, 11]] * 2]


def test_the_set_held_changes_the_anchor():
    """Unlike with key norms, the same prompt in pieces may end in another set."""
    whole, pieces = (Case("keydiff", 6, (40,), chunk=chunk, heads=4, group=1) for chunk in (None, 4))
    streams, _ = choose(whole)
    assert streams[0].keys.shape == (4, 40, 8)
    assert played(whole, "keydiff") != played(pieces, "keydiff")


def test_more_protected_than_the_budget_is_refused():
    with pytest.raises(BudgetError):
        make_layer(Case("keydiff:recent=3,sinks=3", 5, (1,)))

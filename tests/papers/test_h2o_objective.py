"""H2O's objective F(T) = h(sum of masses) with a concave h (policies.md §4.2; Algorithm 2, Remark D.14)."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvkeep_lab.theory.h2o import CONCAVE

from .cases import DECODE, Case, variant
from .lockstep import choose, compare, lockstep, played
from .oracles import rule

CASES = [
    *(case for h in CONCAVE for case in variant(f"h2o:objective={h}", budgets=(2, 6), inputs="drift")),
    *(Case(f"h2o:objective={h},recent=0", 5, (1,) * 50, inputs="drift", group=1) for h in CONCAVE),
    *(Case(f"h2o:objective={h},recent=1,sinks=2", 7, (24, *DECODE), inputs="twins") for h in CONCAVE),
    Case("h2o:objective=log,graduate=replace,recent=2", 6, (24, *DECODE)),
    Case("h2o:objective=sqrt,decay=0.9", 6, (24, *DECODE), pads=(0, 7)),
]


def without_objective(policy):
    """The package's policy, which has no objective."""
    return re.sub(r"objective=\w+,?", "", policy).rstrip(":")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_token_goes_whose_absence_leaves_the_largest_objective(case):
    """The loops maximise F literally, the package drops the smallest mass; and F itself agrees."""
    *_, (layer, turn) = lockstep(replace(case, policy=without_objective(case.policy)), choose(case))
    mass = layer.state["mass"].double().masked_fill(layer.store.positions < 0, 0.0).sum(dim=-1)
    h = CONCAVE[turn.sequences[0].rule.objective]
    expected = [
        [sequence.rule.value(head, turn.kept[row][head]) for head in range(case.heads)]
        for row, sequence in enumerate(turn.sequences)
    ]
    found = [[h(total) for total in row] for row in mass.tolist()]
    torch.testing.assert_close(*map(torch.DoubleTensor, (found, expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("h", ["sqrt", "log"])
def test_no_decision_depends_on_h(h):
    case = Case("h2o", 6, (24, *DECODE), inputs="drift", group=1)
    assert played(case, f"h2o:objective={h}") == played(case, "h2o")


def value(h, mass, held):
    """F of the tokens that are held, by the rule of the loops."""
    found = rule(f"h2o:objective={h}", len(mass), 1)
    found.mass[0] = dict(enumerate(mass))
    return found.value(0, sorted(held))


@pytest.mark.parametrize(("h", "expected"), [("sum", 3.0), ("sqrt", 2.0), ("log", math.log(4.0))])
def test_values_by_hand(h, expected):
    """Masses 1 and 2 are held, 5 belonged to a victim."""
    assert value(h, [1.0, 5.0, 2.0], {0, 2}) == pytest.approx(expected)


def subsets(n):
    return [set(s) for size in range(n + 1) for s in itertools.combinations(range(n), size)]


def is_submodular(f, n):
    """``f(X + a) - f(X) >= f(Y + a) - f(Y)`` for all X within Y and a outside of Y (observables.md D1)."""
    return all(
        f(X | {a}) - f(X) >= f(Y | {a}) - f(Y) - 1e-9
        for Y in subsets(n)
        for X in subsets(n)
        if X <= Y
        for a in set(range(n)) - Y
    )


@pytest.mark.parametrize("h", CONCAVE)
def test_the_objective_is_monotone_and_submodular(h):
    mass = [0.0, 0.3, 0.3, 1.7, 4.0]
    f = partial(value, h, mass)
    assert is_submodular(f, len(mass))
    assert all(f(X | {a}) >= f(X) for X in subsets(len(mass)) for a in range(len(mass)))


def test_a_convex_h_would_not_be():
    mass = [0.1, 0.3, 1.7, 4.0]
    assert not is_submodular(lambda held: sum(mass[j] for j in held) ** 2, len(mass))


def test_heavy_hitters_alone_and_recent_tokens_alone():
    """Table 9: a budget of heavy hitters is ``recent=0``, a budget of recent tokens is `local`."""
    case = Case("h2o:recent=6", 6, (24, *DECODE), pads=(0, 5), inputs="drift")
    compare(case)
    assert played(case, case.policy) == played(case, "local")
    alone = played(case, "h2o:recent=0")
    assert alone != played(case, "h2o")
    assert any(max(head) < 24 for turn in alone[-1:] for row in turn for head in row)  # no recent token is held

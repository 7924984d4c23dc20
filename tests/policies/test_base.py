"""What every policy inherits: budgets that are too small are refused, and the smallest one that would do is named."""

import pytest

import kvkeep
from kvkeep import BudgetError, Policy


class Share(Policy):
    """Protects a part of a budget."""

    def protected(self, budget):
        return 2, budget // 2

    def score(self, view, state):
        return view.positions.float()


class All(Share):
    def protected(self, budget):
        return 1, budget


def test_the_smallest_budget_that_would_do_is_named():
    """A larger budget may protect more tokens, and so be too small itself."""
    for refused, least in (
        (lambda: Share().check(1), 3),
        (lambda: Share().check_pins(5, ((4, 8),)), 11),
        (lambda: kvkeep.parse("snapkv:recent=32,decode=grow,room=10").check(16), 21),
    ):
        with pytest.raises(BudgetError, match=rf"at least {least}[,;]"):
            refused()
    Share().check(3)
    Share().check_pins(11, ((4, 8),))
    kvkeep.parse("snapkv:recent=32,decode=grow,room=10").check(21)


def test_none_is_named_where_none_would_do():
    with pytest.raises(BudgetError, match=r"budget of 8\. Protect fewer\."):
        All().check(8)
    with pytest.raises(BudgetError, match=r"budget of 8\. Pin fewer\."):
        All().check_pins(8, ((4, 8),))

"""What a search is asked for, as far as no model is needed to check it."""

import pytest

from kvkeep import parse
from kvkeep.errors import InputError, PolicyError
from kvkeep.evals.tune.plan import LONGEST, SHORTEST, TuneArguments


def test_numbers_that_leave_nothing_to_search_are_refused():
    for given, said in (
        ({"limit": 0}, "limit=0 leaves nothing to measure; give 1 or more"),
        ({"context": SHORTEST - 1}, f"is too short to search in; give {SHORTEST} or more"),
        ({"context": LONGEST + 1}, f"is more than a search can read; give {LONGEST} or less"),
    ):
        with pytest.raises(InputError, match=said):
            TuneArguments(case="later", **given)
    assert TuneArguments(case="later", limit=1, context=SHORTEST).tokens == SHORTEST
    assert TuneArguments(case="later", context=LONGEST).tokens == LONGEST


def test_a_policy_that_evicts_nothing_is_not_searched():
    with pytest.raises(PolicyError, match="full evicts nothing"):
        TuneArguments(case="later", policies="h2o,full")
    chosen = TuneArguments(case="later", policies="h2o,local").chosen()
    assert [arm.policy for arm in chosen] == [parse("h2o"), parse("local")]
    few, all_of_them = (TuneArguments(case="later", quick=quick).chosen() for quick in (True, False))
    assert all_of_them[: len(few)] == few
    assert len(few) < len(all_of_them)

"""The laws that every policy must obey, for the tests of kvkeep and of third-party policies.

    import pytest
    from kvkeep.testing import LAWS, Case

    @pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
    def test_my_policy(law):
        law(MyPolicy(), Case())

A law raises ``AssertionError`` when it is broken. The yardstick of most laws is `replay`: the same policy on a
cache without slots, which gathers the tokens it keeps from the whole history in every step.
"""

from kvkeep.testing.case import Case, Moment, Tape, replay, run
from kvkeep.testing.laws import LAWS, Law

__all__ = ["LAWS", "Case", "Law", "Moment", "Tape", "replay", "run"]

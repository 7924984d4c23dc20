"""The laws that every policy must obey, for the tests of kvkeep and of third-party policies.

    import pytest
    from kvkeep.testing import LAWS, Case

    @pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
    def test_my_policy(law):
        law(MyPolicy(), Case())

A law raises ``AssertionError`` when it is broken. Most laws compare a layer with `replay`, which runs the same policy
without slots: in each step it gathers the kept tokens from the whole history.
"""

from kvkeep.testing.case import Case, Moment, Tape, replay, run
from kvkeep.testing.laws import LAWS, Law

__all__ = ["LAWS", "Case", "Law", "Moment", "Tape", "replay", "run"]

"""ReST-KV: the tokens stay whose loss would change the output of the prompt's end most."""

import pytest

from .by_hand import row
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep
from .rules_prompt import ReSTKV, SnapKV

CASES = [
    *family("restkv:window=4", budgets=(4, 5, 16)),
    *variant("restkv:window=3,kernel=1,decay=1.0,decode=score", budgets=(4, 16)),
    Case("restkv", 40, (60, *DECODE), heads=1),
    Case("restkv:window=2,kernel=13", 12, CHAT, chunk=8, pads=(8, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_the_output_would_miss(case):
    compare(case)


def test_the_score_is_the_change_of_the_output():
    """Leaving one token out and rescaling the others moves the output by exactly the score."""
    streams = [turn for _, turn in lockstep(Case("restkv:window=1,kernel=1", 16, (12,), heads=1, group=1))]
    sequence = streams[0].sequences[0]
    shares, values = sequence.rows[0][-1], sequence._values[0]
    assert sum(shares.values()) == pytest.approx(1.0)
    output = [sum(a * values[j][e] for j, a in shares.items()) for e in range(len(values[0]))]
    found = ReSTKV.worth(sequence.rule, _Last([shares], values))
    for gone in shares:
        rest = {j: a / (1 - shares[gone]) for j, a in shares.items() if j != gone}
        without = [sum(a * values[j][e] for j, a in rest.items()) for e in range(len(values[0]))]
        moved = sum((x - y) ** 2 for x, y in zip(output, without, strict=True)) ** 0.5
        assert found[gone] == pytest.approx(moved)


class _Last:
    def __init__(self, rows, values):
        self.rows, self.values = rows, values


def test_a_token_whose_value_is_the_output_may_go():
    """By attention token 1 is worth most; without it the output stays where it is."""
    step = _Last([row(0.25, 0.5, 0.25)], [[0.0], [1.0], [2.0]])
    rule, mass = ReSTKV(3, 1, window=1), SnapKV(3, 1, window=1)
    assert rule.worth(step) == pytest.approx({0: 1 / 3, 1: 0.0, 2: 1 / 3})
    assert max(mass.worth(step), key=mass.worth(step).get) == 1

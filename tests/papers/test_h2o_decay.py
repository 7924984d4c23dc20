"""H2O with a mass that fades: each row counts ``decay`` times as much as the next one."""

import pytest

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, variant
from .lockstep import choose, compare, lockstep, played
from .oracles import rule

CASES = [
    *variant("h2o:decay=0.9", budgets=(2, 5, 16)),
    *variant("h2o:decay=0.5,recent=1,sinks=2", budgets=(4, 16)),
    Case("h2o:decay=0.8,graduate=replace,recent=2", 8, (24, *DECODE), pads=(0, 3, 9), heads=1),
    Case("h2o:decay=0.0,recent=1", (6, 12), CHAT, pads=(0, 4), pause=5),
    Case("h2o:decay=0.95", 16, (24, *(1,) * 200), heads=1),
    *(
        Case("h2o:decay=0.75,recent=2", budget, (24, *DECODE), inputs=inputs, group=group)
        for budget, inputs, group in ((5, "twins", 1), (7, "constant", 2), (8, "hard", 2))
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_the_largest_faded_masses(case):
    compare(case)


def test_the_mass_is_a_geometric_sum_of_the_rows():
    case = Case("h2o:decay=0.9", 8, (24, *(1,) * 30), chunk=7)
    *_, (layer, turn) = lockstep(case)
    positions, mass = layer.store.positions.tolist(), layer.state["mass"].tolist()
    for n, sequence in enumerate(turn.sequences):
        for head, kept in enumerate(turn.kept[n]):
            found = {j: m for j, m in zip(positions[n][head], mass[n][head], strict=True) if j >= 0}
            newest = turn.seen[n] - 1
            rows = list(enumerate(sequence.rows[head]))
            expected = {j: sum(0.9 ** (newest - i) * seen.get(j, 0.0) for i, seen in rows) for j in kept}
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("turns", [(24, *DECODE), CHAT], ids=["prompt", "chat"])
def test_the_limits(turns):
    """Nothing fades: H2O. Everything fades at once: only the current row counts."""
    case = Case("h2o:decay=0.0,recent=1", 9, turns, pads=(0, 4))
    assert played(case, case.policy) == played(case, "topk")
    assert played(case, "h2o:decay=1.0") == played(case, "h2o")


def test_an_example_by_hand():
    """Token 0 has 1.425 and token 1 has 1.025; halved before each row they have 0.525 and 0.675."""
    prompt = [row(1.0), row(0.3, 0.7), row(0.125, 0.325, 0.55)]
    assert step(rule("h2o:recent=1", 2, 1), prompt) == [0, 2]
    assert step(rule("h2o:recent=1,decay=0.5", 2, 1), prompt) == [1, 2]


def test_a_row_that_gets_no_token_does_not_fade():
    """The second row pauses in every third step and keeps what it keeps alone."""
    paused = Case("h2o:decay=0.7", 6, (24, *DECODE), pads=(0, 0), pause=3)
    _, turns = choose(paused)
    assert turns[-1].seen[1] < turns[-1].seen[0]
    compare(paused)

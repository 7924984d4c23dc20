"""H2O: accumulated attention, and its variants."""

import math

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, Layer, parse

from .cases import DECODE, Case, family, variant
from .lockstep import Turn, compare, lockstep, retained

CASES = [
    *family("h2o", inputs="drift"),
    *family("h2o:recent=0", inputs="drift"),
    *variant("h2o:recent=1,graduate=replace", budgets=(2, 5, 16), inputs="drift"),
    *variant("h2o:recent=2,sinks=2", budgets=(4, 5, 16), inputs="drift"),
    Case("h2o:sinks=3,graduate=replace", 6, (24, *DECODE), group=1),
    Case("h2o", 16, (24, *(1,) * 200), group=2, heads=1),
    Case("h2o", 5, (1,) * 64, group=1, inputs="drift"),
    Case("h2o", 16, (24, *DECODE)),
]

TIES = [
    Case(policy, budget, (24, *DECODE), inputs=inputs, group=group)
    for policy in ("h2o", "h2o:recent=0", "h2o:recent=1,graduate=replace")
    for budget, inputs, group in (
        (5, "twins", 1),
        (16, "twins", 2),
        (7, "constant", 2),
        (6, "sink", 2),
        (5, "hard", 2),
        (16, "hard", 4),
    )
]


def check_mass(layer: Layer, turn: Turn) -> None:
    """The mass of every survivor is its column's sum over the rows that were computed."""
    positions, mass = layer.store.positions.tolist(), layer.state["mass"].tolist()
    for row, sequence in enumerate(turn.sequences):
        for head, kept in enumerate(turn.kept[row]):
            pairs = zip(positions[row][head], mass[row][head], strict=True)
            found = {j: m for j, m in pairs if j >= 0}
            expected = {j: sequence.column_sum(head, j, turn.seen[row]) for j in kept}
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_the_heavy_hitters_and_their_column_sums(case):
    for step, (layer, turn) in enumerate(lockstep(case)):
        if step % 10 == 0 or step == len(case.turns) - 1:
            check_mass(layer, turn)


def test_the_inputs_make_the_heavy_set_turn_over():
    """Accumulated mass favours the old; where only the youngest candidate ever went, little would be tested."""
    before: list[list[list[int]]] = [[[], []], [[], []]]
    n_older = 0
    for _, turn in lockstep(Case("h2o", 16, (1,) * 64, group=1, inputs="drift")):
        for row, seen in enumerate(turn.seen):
            for old, kept in zip(before[row], turn.kept[row], strict=True):
                gone = {*old, seen - 1} - set(kept)
                n_older += bool(gone) and gone != {seen - 1 - 8}
        before = turn.kept
    assert n_older >= 30  # of 192


@pytest.mark.parametrize("policy", ["h2o", "tova", "random"])
def test_left_padding_does_not_move_the_chunks(policy):
    """A chunk is so many tokens of a row; a padded row is cut where it would be cut alone."""
    compare(Case(policy, 5, (25, *DECODE), pads=(0, 4), chunk=3))


def test_mass_under_constant_attention_is_a_difference_of_harmonic_numbers():
    n = 12
    layer = Layer(parse("h2o"), n)
    ones = torch.ones(1, 1, n, 4)
    layer.step(0 * ones, ones, ones, options=AttentionOptions(scaling=0.5), phase=phase_of(ones))
    expected = [math.fsum(1 / i for i in range(j, n + 1)) for j in range(1, n + 1)]
    assert layer.state["mass"][0, 0, :n].tolist() == pytest.approx(expected, rel=1e-6)


def _play(policy: str, target: list[int], budget: int) -> list[list[int]]:
    """Prefill 6 tokens and decode the rest; token t's query takes ``target[t]`` if it is there, else spreads."""
    n = len(target)
    keys = torch.eye(n)[None, None]
    queries = 1000.0 * torch.eye(n)[target][None, None]
    layer = Layer(parse(policy), budget)
    kept = []
    for start, stop in [(0, 6), *((t, t + 1) for t in range(6, n))]:
        part = slice(start, stop)
        layer.step(
            queries[:, :, part],
            keys[:, :, part],
            keys[:, :, part],
            options=AttentionOptions(scaling=1.0),
            phase=phase_of(keys[:, :, part]),
        )
        kept.append(retained(layer)[0][0])
    return kept


def test_replace_drops_the_weakest_heavy_hitter_even_if_the_graduate_is_weaker():
    """Tokens 0 and 1 get 3 units each, token 5 leaves the window of 1 without ever having been looked at."""
    target = [0, 1, 0, 1, 0, 1, 0]
    assert _play("h2o:recent=1", target, 3) == [[0, 1, 5], [0, 1, 6]]
    assert _play("h2o:recent=1,graduate=replace", target, 3) == [[0, 1, 5], [0, 5, 6]]


def test_a_protected_sink_stays_without_any_mass():
    target = [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert all(0 in kept for kept in _play("h2o:recent=1,sinks=1", target, 3))
    assert _play("h2o:recent=1", target, 2)[-1] != [0, 10]

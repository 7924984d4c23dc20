"""H2O against its printed algorithm and against the ring of the FlexGen code (policies.md §4.1, §4.2, §4.6)."""

import pytest

from kvkeep_lab.theory.h2o import CONCAVE, algorithm_1_literal, h2_eviction

from .algorithms import FlexGenRing
from .cases import Case, Stream
from .lockstep import choose, lockstep, retained


def heads(streams: list[Stream]) -> list[tuple[int, int, list, list]]:
    """Row, head, queries and keys of every head, as lists."""
    return [
        (row, head, stream.queries[head].tolist(), stream.keys[head].tolist())
        for row, stream in enumerate(streams)
        for head in range(len(stream.keys))
    ]


@pytest.mark.parametrize("inputs", ["random", "drift"])
@pytest.mark.parametrize("graduate", ["replace", "compete"])
@pytest.mark.parametrize("K", [2, 3, 8])
def test_the_flexgen_ring_keeps_the_same_tokens(K, graduate, inputs):
    prompt, steps = 2 * K + 9, 60
    policy = f"h2o:recent={K - 1},graduate={graduate}"
    case = Case(policy, 2 * K - 1, (prompt, *(1,) * steps), inputs=inputs, group=1)
    streams, turns = choose(case)
    rings = [
        (row, head, FlexGenRing(K, q, k, prompt=prompt, scaling=case.scaling, compete=graduate == "compete"))
        for row, head, q, k in heads(streams)
    ]
    for step, (layer, _) in enumerate(lockstep(case, (streams, turns))):
        for row, head, ring in rings:
            if step:
                ring.decode(step)
            assert retained(layer)[row][head] == ring.kept, f"row {row}, head {head}, step {step}"


def test_the_ring_churns_one_heavy_slot_in_every_step():
    """The weakest heavy hitter goes each time, so the token that has just graduated is always among the heavy."""
    case = Case("h2o:recent=3,graduate=replace", 7, (17, *(1,) * 40), group=1)
    _, _, queries, keys = heads(choose(case)[0])[0]
    ring = FlexGenRing(4, queries, keys, prompt=17, scaling=case.scaling)
    for i in range(1, 41):
        before = ring.heavy
        ring.decode(i)
        assert 17 + i - 1 - 3 in ring.heavy
        assert len(set(before) - set(ring.heavy)) == 1


@pytest.mark.parametrize("inputs", ["drift", "hard", "sink", "twins"])
@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_algorithm_1_keeps_the_same_tokens_from_an_empty_cache(budget, inputs):
    case = Case("h2o:recent=0", budget, (1,) * 70, inputs=inputs, group=1)
    streams, turns = choose(case)
    printed = [(row, head, list(h2_eviction(q, k, budget, scaling=case.scaling))) for row, head, q, k in heads(streams)]
    for step, (layer, _) in enumerate(lockstep(case, (streams, turns))):
        for row, head, sets in printed:
            assert retained(layer)[row][head] == sets[step], f"row {row}, head {head}, token {step}"


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_concave_h_changes_no_decision(budget):
    case = Case("h2o:recent=0", budget, (1,) * 60, inputs="drift", group=1)
    for _, _, queries, keys in heads(choose(case)[0]):
        z, *others = (list(h2_eviction(queries, keys, budget, scaling=case.scaling, h=h)) for h in CONCAVE.values())
        assert others == [z, z]


@pytest.mark.parametrize("budget", [2, 5, 16])
def test_line_9_to_the_letter_freezes_the_first_tokens(budget):
    """The new token's score is exactly 0, the smallest, so it never gets in; with the corrected reading it does."""
    case = Case("h2o:recent=0", budget, (1,) * 60, inputs="drift", group=1)
    streams, turns = choose(case)
    frozen = list(range(budget))
    for _, _, queries, keys in heads(streams):
        *_, last = algorithm_1_literal(queries, keys, budget)
        assert last == frozen
    *_, (layer, _) = lockstep(case, (streams, turns))
    assert any(kept != frozen for row in retained(layer) for kept in row)

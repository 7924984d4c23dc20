"""Keyformer: accumulated softmax of logits with Gumbel noise, at a temperature that rises with every step."""

import math

import pytest

from kvkeep import BudgetError, PolicyError

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import choose, compare, lockstep, make_layer, played
from .oracles import rule
from .rules_random import gumbel
from .rules_softmax import Keyformer

CASES = [
    *family("keyformer"),
    *variant("keyformer:noise=false,max_new_tokens=20,tau_end=3.0", budgets=(2, 5, 16)),
    *variant("keyformer:release_quirk=true,recent=1", budgets=(2, 16)),
    Case("keyformer:seed=7,tau_start=2.0,tau_end=0.5,sinks=1,recent=3", (12, 16), CHAT, pads=(0, 4), pause=5),
    Case("keyformer:recent=0,max_new_tokens=10", 8, (30, *DECODE), pads=(5, 0, 7), heads=1, chunk=6),
    Case("keyformer:recent=0,release_quirk=true", 8, (30, *DECODE), heads=1, group=1),
    Case("keyformer", 10, (24, *DECODE)),  # 3 of them recent
    Case("keyformer", 12, (24, *(1,) * 200), heads=1),
]

TIES = [
    Case("keyformer:noise=false", budget, (24, *DECODE), inputs=inputs, group=group)
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 4), (7, "constant", 2), (8, "hard", 2))
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_the_largest_noisy_sums(case):
    compare(case)


@pytest.mark.long
@pytest.mark.parametrize("turns", [(24, *DECODE), CHAT], ids=["prompt", "chat"])
def test_without_noise_at_the_temperature_one_it_is_h2o(turns):
    case = Case("keyformer:noise=false,tau_end=1.0,recent=3", 12, turns, pads=(0, 5))
    assert played(case, case.policy) == played(case, "h2o:recent=3")


def test_with_the_quirk_no_generated_token_becomes_a_key_token():
    """policies.md §13: the key tokens of the prompt stay, the others are the newest ones."""
    first, *later = [turn for _, turn in lockstep(Case("keyformer:release_quirk=true,recent=4", 16, (40, *DECODE)))]
    for turn in later:
        for old_row, new_row, seen in zip(first.kept, turn.kept, turn.seen, strict=True):
            assert new_row == [[*old[:12], *range(seen - 4, seen)] for old in old_row]


@pytest.mark.parametrize("inputs", ["random", "drift"])
def test_with_the_quirk_a_window_and_a_set_of_keys_are_those_of_the_released_masks(inputs):
    """Its window of w columns counts the token that comes next; keys are chosen once, from the columns before n - w."""
    n, w, h = 24, 14, 4
    policy = f"keyformer:release_quirk=true,noise=false,tau_end=1.0,recent={w - 1}"
    for _, turn in lockstep(Case(policy, h + w - 1, (n, *(1,) * 20), inputs=inputs)):
        for row_kept, sequence, seen in zip(turn.kept, turn.sequences, turn.seen, strict=True):
            for head, kept in enumerate(row_kept):
                mass = {j: sequence.column_sum(head, j, n) for j in range(n - w)}
                keys = sorted(sorted(mass, key=lambda j: (mass[j], j))[-h:])
                assert kept == [*keys, *range(seen - w + 1, seen)]


def test_without_the_quirk_generated_tokens_do():
    *_, (_, turn) = lockstep(Case("keyformer:recent=4", 16, (16, *DECODE), inputs="drift", heads=1))
    assert any(16 <= j < 72 for row_kept in turn.kept for kept in row_kept for j in kept)


def test_the_temperature_rises_in_decode_and_starts_again_with_a_prompt():
    """Logits of ln 9 and 0: at tau 1 the shares are 9/10 and 1/10, at tau 2 3/4 and 1/4, at 3/2 in between."""
    keys = rule("keyformer:noise=false,max_new_tokens=2,recent=0", 9, 1)
    assert isinstance(keys, Keyformer)
    shares = []
    for rows in (
        [row(1.0), row(0.9, 0.1)],
        [row(0.9, 0.1)],
        [row(0.9, 0.1)],
        [row(0.9, 0.1)],
        [row(1.0), row(0.9, 0.1)],
    ):
        before = keys.scores[0].get(1, 0.0)
        step(keys, rows)
        shares.append(keys.scores[0][1] - before)
    assert shares == pytest.approx([1 / 10, 1 / (1 + 9 ** (2 / 3)), 1 / 4, 1 / 4, 1 / 10])


def test_the_noise_is_standard_gumbel():
    """Mean 0.5772 and variance pi**2 / 6."""
    numbers = [gumbel(0, j) for j in range(20000)]
    mean = sum(numbers) / len(numbers)
    assert mean == pytest.approx(0.5772, abs=0.03)
    assert sum((x - mean) ** 2 for x in numbers) / len(numbers) == pytest.approx(math.pi**2 / 6, abs=0.06)


def test_each_pair_of_query_and_key_and_each_query_head_has_its_own_noise():
    keys = Keyformer(8, 2, layer=3, sequence=10)
    drawn = {keys.zeta(head, i, j) for head in range(4) for i in range(10) for j in range(i + 1)}
    assert len(drawn) == 4 * 55


@pytest.mark.long
def test_noise_makes_a_difference():
    case = Case("keyformer", 12, (40, *DECODE))
    _, turns = choose(case)
    for other in ("keyformer:seed=1", "keyformer:noise=false"):
        assert [turn.kept for turn in turns] != played(case, other)


@pytest.mark.parametrize("policy", ["keyformer:recent=9", "keyformer:tau_start=0.0"])
def test_options_out_of_range_are_refused(policy):
    with pytest.raises((BudgetError, PolicyError)):
        make_layer(Case(policy, 8, (1,)))

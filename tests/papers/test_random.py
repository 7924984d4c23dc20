"""Random eviction: the same hash in Python's integers, and what the two modes promise."""

import pytest
import torch

from kvkeep.noise import uniform

from .cases import DECODE, Case, family, variant
from .lockstep import FIRST_SEQUENCE, LAYER, compare, lockstep, retained
from .rules_random import draw, split_mix

GOLDEN = 0x9E3779B97F4A7C15

CASES = [
    *family("random"),
    *variant("random:mode=reservoir,seed=7", budgets=(1, 5, 16)),
    *variant("random:seed=3,recent=2,sinks=1", budgets=(3, 16)),
    Case("random:mode=reservoir,recent=4,sinks=4", (8, 11, 16), (30, *DECODE), pads=(0, 3, 12)),
    Case("random:seed=9223372036854775807", 5, (24, *(1,) * 200), group=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drops_the_smallest_numbers(case):
    compare(case)


def test_the_hash_is_split_mix():
    """The first outputs of the published generator for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [split_mix((1234567 + n * GOLDEN) % 2**64) for n in range(1, 5)] == published


def test_the_package_draws_the_same_numbers():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**40, (3, 500), generator=generator)
    for seed in (0, 1, 2**40 + 3, 2**63 - 1):
        expected = [draw(seed, *column) / 2**24 for column in keys.T.tolist()]
        assert uniform(seed, *keys).tolist() == expected


def test_a_reservoir_is_the_top_of_the_whole_history():
    """However the tokens came, the ones with the largest numbers of all that ever came are held."""
    case = Case("random:mode=reservoir", 6, (20, *DECODE, 15, 1, 1), chunk=8, heads=3, group=1)
    *_, (layer, turn) = lockstep(case)
    for row, held in enumerate(retained(layer)):
        for head, kept in enumerate(held):
            numbers = {draw(0, FIRST_SEQUENCE + row, LAYER, head, j): j for j in range(turn.seen[row])}
            assert kept == sorted(numbers[number] for number in sorted(numbers)[-6:])


def test_a_victim_is_drawn_anew_in_every_step():
    """The number of a token changes from step to step; ages are then geometric instead of uniform."""
    case = Case("random", 8, (24, *(1,) * 100), heads=6, group=1)
    *_, (layer, turn) = lockstep(case)
    ages = [seen - j for row, seen in zip(retained(layer), turn.seen, strict=True) for head in row for j in head]
    assert sum(ages) / len(ages) < 20  # about budget + 1 = 9 on average; a uniform sample of the history would give 62

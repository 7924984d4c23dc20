"""Random eviction: the same hash in Python's integers, and what the two modes promise."""

from dataclasses import dataclass

import pytest
import torch

import kvkeep
from kvkeep import backends
from kvkeep.cache.decode_replay import DecodePath, why_not_fused
from kvkeep.noise import uniform
from kvkeep.policies._rounds import Rounds
from kvkeep.types import Phase

from .cases import DECODE, Case, family, variant
from .lockstep import FIRST_SEQUENCE, LAYER, compare, lockstep, retained
from .rules_random import draw, split_mix

GOLDEN = 0x9E3779B97F4A7C15

CASES = [
    *family("random"),
    *variant("random:mode=reservoir,seed=7", budgets=(1, 5, 16)),
    *variant("random:seed=3,recent=2,sinks=1", budgets=(3, 16)),
    Case("random:mode=reservoir,recent=4,sinks=4", (8, 11, 16), (30, *DECODE), pads=(0, 3, 12)),
    *variant("random:buffer=4,recent=3,sinks=1", budgets=(4, 16)),
    *variant("random:buffer=64,recent=64", budgets=(2, 24)),
    Case("random:mode=reservoir,buffer=5,seed=2", 12, (20, *DECODE), chunk=6, pads=(0, 7)),
    Case("random:seed=9223372036854775807", 5, (24, *(1,) * 200), group=1),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_drops_the_smallest_numbers(case):
    compare(case)


def test_bursts_come_when_the_budget_is_full():
    sizes = [len(turn.kept[0][0]) for _, turn in lockstep(Case("random:buffer=4,recent=2", 16, (20, *DECODE[:12])))]
    assert sizes == [12, 13, 14, 15, 16, 12, 13, 14, 15, 16, 12, 13, 14]
    assert kvkeep.parse("random:bursts") == kvkeep.parse("random:buffer=64,recent=64")


@dataclass(frozen=True, kw_only=True)
class Looks(Rounds):
    """A policy with bursts that looks at every step."""

    def observe(self, state, view, report):
        return state

    def score(self, view, state):
        return view.positions.float()


def test_a_kernel_makes_the_steps_between_bursts():
    """Between bursts the policy has nothing to do, and a burst follows the kernel's step as it follows a plain one."""
    backend = backends.choose(torch.device("cpu"), torch.float32)
    fused, plain = (kvkeep.Layer(kvkeep.parse("random:buffer=4,recent=2"), 16) for _ in range(2))
    paths = []
    for step in range(40):
        new = 20 if not step else 3 if step == 23 else 1
        tokens = [torch.randn(2, heads, new, 16) for heads in (4, 2, 2)]
        phase = Phase.DECODE if new == 1 else Phase.PREFILL
        for layer, real in ((fused, None), (plain, torch.ones(2, new, dtype=torch.bool))):
            layer.paths._not_fused = "asked for" if layer is plain and step else layer.paths._not_fused
            with torch.no_grad():
                layer.step(*tokens, options=kvkeep.AttentionOptions(scaling=0.25), phase=phase, real=real)
        assert retained(fused) == retained(plain), step
        paths.append(fused.paths.path)
    if backend.fuses:
        assert plain.paths.path is DecodePath.PLAIN
        assert {*paths[1:]} == {DecodePath.FUSED, DecodePath.REPLAY}
        assert "no sum" in why_not_fused(Looks(), backend)


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

"""The numbers of evaluations, against sums written out by hand."""

import itertools
import math

import pytest
import torch

from kvkeep.evals import task


def probabilities(B=1, Hk=2, R=3, T=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, keys = (torch.randn(B, Hk, n, 4, generator=generator) for n in (R, T))
    sees = torch.ones(R, T, dtype=torch.bool).tril(T - R)
    return (query @ keys.mT).masked_fill(~sees, -torch.inf).softmax(dim=-1)


def test_nll_is_minus_the_logarithm_of_the_targets_probability():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    found = task.nll(logits, torch.tensor([[1, 0]]))
    torch.testing.assert_close(found, torch.tensor([[math.log(4 / 3), math.log(2.0)]]))


def test_kl_of_two_coins():
    full, bounded = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3.0)]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    torch.testing.assert_close(task.kl(full, bounded), torch.tensor([expected]))
    assert task.kl(full, bounded) != task.kl(bounded, full)
    assert task.kl(full, full) == 0


@pytest.mark.parametrize(
    ("length", "buckets"),
    [(10, [(1, 10)]), (64, [(1, 64)]), (65, [(1, 64), (64, 65)]), (300, [(1, 64), (64, 128), (128, 256), (256, 300)])],
)
def test_buckets_double_and_cover_every_position_once(length, buckets):
    assert task.position_buckets(length) == buckets


def test_kept_tokens_by_tenth():
    positions = torch.tensor([[[0, 1, 19, -1, 20], [5, 5, -1, -1, -1]]], dtype=torch.int32)
    found = task.kept_by_tenth(positions, [20])  # position 20 is no longer of the text
    expected = torch.zeros(1, 10)
    expected[0, 0], expected[0, 9], expected[0, 2] = (2 / 3) / 2, (1 / 3) / 2, 0.5
    torch.testing.assert_close(found, expected)


def test_held_mass_ignores_empty_slots():
    p = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    found = task.held(p, torch.tensor([[[3, -1, 0]]], dtype=torch.int32))
    torch.testing.assert_close(found, torch.tensor([[0.5]]))


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_best_sets_against_all_subsets(budget):
    p = probabilities()
    dynamic, static = task.best_dynamic(p, budget)[0], task.best_static(p, budget)[0]
    for head in range(2):
        own = [float(p[0, head, row, 4 + row]) for row in range(3)]
        held = {
            chosen: [sum(float(p[0, head, row, j]) for j in chosen if j < 4 + row) for row in range(3)]
            for chosen in itertools.combinations(range(7), budget)
        }
        best = max(held.values(), key=sum)
        torch.testing.assert_close(static[head].tolist(), [a + b for a, b in zip(best, own, strict=True)])
        tops = [max(values[row] for values in held.values()) + own[row] for row in range(3)]
        torch.testing.assert_close(dynamic[head].tolist(), tops)


def test_best_sets_are_ordered_and_everything_is_one():
    p = probabilities(B=3, R=6, T=20)
    for budget in (1, 5, 19, 50):
        dynamic, static = task.best_dynamic(p, budget), task.best_static(p, budget)
        assert (dynamic - static >= -1e-6).all()
        assert (static - task.own(p) >= 0).all()
    torch.testing.assert_close(dynamic, torch.ones_like(dynamic))

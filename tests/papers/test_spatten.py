"""SpAtten: importance added up over heads, layers and steps; a later layer holds no more than the earlier ones."""

import itertools

import pytest
import torch
from phases import phase_of
from transformers import LlamaConfig, MistralConfig

from kvkeep import AttentionOptions, BoundedCache, BudgetError, Layer, UnsupportedOperationError, parse
from kvkeep.budget import per_layer

from .cases import D, E
from .loops import dot, require_margin, softmax

LAYERS, HEADS, GROUP = 3, 2, 2


def draw(n, seed):
    """Queries, keys and values ``[layer][head][token]`` of one row; the queries drift, so that what matters changes."""
    g = torch.Generator().manual_seed(seed)
    drift = torch.randn(LAYERS, HEADS * GROUP, n, D, generator=g).cumsum(dim=2) / 2
    return drift, torch.randn(LAYERS, HEADS, n, D, generator=g), torch.randn(LAYERS, HEADS, n, E, generator=g)


def linked(policy, budgets):
    """The layers of a model, each of which knows the one before it."""
    made = []
    for i, budget in enumerate(budgets):
        made.append(Layer(parse(policy), budget, index=i, before=made[-1] if made else None))
    return made


def spatten(queries, keys, turns, budgets, recent):
    """policies.md §12, with one dictionary of importance for the whole sequence. Yields the kept sets of all layers."""
    importance = {}
    kept = [[] for _ in range(LAYERS)]
    seen = 0
    for turn in turns:
        new = list(range(seen, seen + turn))
        seen += turn
        alive = set(kept[0]) | set(new)
        importance = {j: importance.get(j, 0.0) for j in alive}
        for layer in range(LAYERS):
            for t in new:
                visible = kept[layer] + [j for j in new if j <= t]
                for g in range(HEADS * GROUP):
                    own = [keys[layer][g // GROUP][j] for j in visible]
                    p = softmax([D**-0.5 * dot(queries[layer][g][t], key) for key in own])
                    for j, share in zip(visible, p, strict=True):
                        importance[j] += share / GROUP
            candidates = [j for j in kept[layer] + new if j in alive]
            ranked = sorted(candidates, key=lambda j: (j >= seen - recent, importance[j], j))
            excess = max(0, len(ranked) - budgets[layer])
            if excess > 0 and ranked[excess] < seen - recent:
                require_margin(importance[ranked[excess - 1]], importance[ranked[excess]])
            kept[layer] = sorted(ranked[excess:])
            alive = set(kept[layer])
        yield [list(layer) for layer in kept]


CASES = [
    ("spatten", [8] * LAYERS, (24, *(1,) * 200)),
    ("spatten:recent=3", [8] * LAYERS, (24, *(1,) * 60)),
    ("spatten:delta=0.5", [12, 8, 4], (24, *(1,) * 60)),
    ("spatten", [12, 8, 5], (5, 1, 1, 9, *(1,) * 30, 7, *(1,) * 20)),
    ("spatten:recent=2", [5, 9, 7], (30, *(1,) * 40)),
]


@pytest.mark.long
@pytest.mark.parametrize(("policy", "budgets", "turns"), CASES, ids=str)
def test_prunes_through_the_depth_of_the_model(policy, budgets, turns):
    rows = [draw(sum(turns), seed) for seed in (1, 2)]
    layers = linked(policy, budgets)
    recent = parse(policy).recent
    wanted = [spatten(q.tolist(), k.tolist(), turns, budgets, recent) for q, k, _ in rows]
    start = 0
    for number, turn in enumerate(turns):
        at = slice(start, start + turn)
        start += turn
        for i, layer in enumerate(layers):
            tensors = [torch.stack([row[which][i, :, at] for row in rows]) for which in range(3)]
            layer.step(*tensors, options=AttentionOptions(scaling=D**-0.5), phase=phase_of(tensors[0]))
        for r, oracle in enumerate(wanted):
            want = next(oracle)
            for i, layer in enumerate(layers):
                heads = [sorted(j for j in head if j >= 0) for head in layer.store.positions[r].tolist()]
                assert heads == [want[i]] * HEADS, f"turn {number}, layer {i}"
            assert all(set(b) <= set(a) for a, b in itertools.pairwise(want))


def test_delta_makes_the_budgets_a_falling_line_of_the_same_mean():
    assert parse("spatten:delta=0.5").defaults.layer_budget == "taper:0.5"
    assert per_layer("taper:0.5", 100, 5) == [150, 125, 100, 75, 50]


@pytest.mark.parametrize("recent", [1, 7, 40])
@pytest.mark.parametrize(("delta", "budget"), [(0.5, 100), (0.25, 64), (0.9, 1000)])
def test_delta_applies_to_all_of_the_budget_whatever_is_recent(recent, delta, budget):
    """policies.md §12: K_l = B (1 + d - 2 d l / (L - 1)), with no part set aside."""
    L = 5
    cache = BoundedCache(LlamaConfig(num_hidden_layers=L), f"spatten:delta={delta},recent={recent}", budget)
    found = [layer.budgets[0] for layer in cache.bounded_layers().values()]
    exact = [budget * (1 + delta - 2 * delta * layer / (L - 1)) for layer in range(L)]
    assert sum(found) == L * budget
    assert all(abs(n - k) < 1 for n, k in zip(found, exact, strict=True))


def test_a_last_layer_without_room_for_the_recent_tokens_is_refused():
    with pytest.raises(BudgetError, match=r"'taper:0\.5' leaves a layer 50 of 100 slots, and every layer needs 51"):
        BoundedCache(LlamaConfig(num_hidden_layers=5), "spatten:delta=0.5,recent=51", 100)


def test_refuses_what_would_let_a_layer_run_ahead():
    with pytest.raises(UnsupportedOperationError, match="prefill_chunk"):
        BoundedCache(LlamaConfig(num_hidden_layers=2), "spatten", 8, prefill_chunk=4)
    with pytest.raises(UnsupportedOperationError, match="sliding"):
        BoundedCache(MistralConfig(num_hidden_layers=2, sliding_window=8), "spatten", 8)


def test_rows_that_move_take_their_importance_along():
    """Beam search: what comes after rows were chosen is what rows that were read in that order would give."""
    tensors = [draw(40, seed) for seed in (1, 2)]

    def steps(rows, columns, caches):
        for at in columns:
            for i, layer in enumerate(caches):
                parts = [torch.stack([tensors[row][which][i, :, at] for row in rows]) for which in range(3)]
                layer.step(*parts, options=AttentionOptions(scaling=D**-0.5), phase=phase_of(parts[0]))

    def layers():
        return linked("spatten", [8] * LAYERS)

    prompt, moved, straight = [slice(0, 24), slice(24, 25)], layers(), layers()
    steps([0, 1], prompt, moved)
    for layer in moved:
        layer.select_rows(torch.tensor([1, 0, 1]))
    steps([1, 0, 1], prompt, straight)
    generated = [slice(at, at + 1) for at in range(25, 40)]
    steps([1, 0, 1], generated, moved)
    steps([1, 0, 1], generated, straight)
    for one, other in zip(moved, straight, strict=True):
        assert torch.equal(one.store.positions.sort(dim=-1).values, other.store.positions.sort(dim=-1).values)

"""Scissorhands: tokens that many of the last rows gave less than the average go, many at once."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep import BudgetError, Layer, PolicyError
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.types import Phase
from kvkeep_lab.theory.scissorhands import AlgorithmReading, algorithm_1

from .by_hand import row, step
from .cases import DECODE, Case, family, variant
from .lockstep import choose, compare, lockstep, make_layer, retained
from .loops import Sequence
from .oracles import rule

CASES = [
    *family("scissorhands"),
    *variant("scissorhands:threshold=live", budgets=(5, 16)),
    *variant("scissorhands:window=3,recent=5,drop=4", budgets=(9, 16)),
    Case("scissorhands:recent=0,theta=0.5", 12, (30, *DECODE), heads=1, pads=(0, 3, 12)),
    Case("scissorhands:theta=2.0,literal_ties=true,drop=6,window=5", 16, (24, *DECODE)),
    Case("scissorhands:drop=1,window=1", 9, (24, *DECODE), heads=1),
    Case("scissorhands:drop=13,window=2", 16, (24, *DECODE), heads=1, chunk=5),
    Case("scissorhands", 24, (40, *(1,) * 200), heads=1),
    Case("scissorhands:window=7,drop=9", 20, (11, 8, 1, 1, 5, 2, 30, *(1,) * 30, 6, 1, 1), pads=(0,)),
    Case("scissorhands:window=20,recent=10,drop=20", 40, (60, *(1,) * 25), heads=1, pads=(0,)),
    Case("scissorhands:window=31,recent=3,drop=31", 62, (63, *(1,) * 65), heads=1, group=1, chunk=26, pads=(0,)),
    Case("scissorhands:window=110,drop=110", 120, (100, *(1,) * 60, 90, 1, 1), heads=1, group=1, pads=(0,)),
]

TIES = [
    Case(f"scissorhands:{options}", budget, (24, *DECODE), inputs=inputs)
    for options in ("threshold=live,theta=1.1", "theta=0.9", "literal_ties=true,theta=1.1")
    for budget, inputs in ((5, "twins"), (16, "twins"), (7, "constant"), (16, "constant"), (8, "hard"))
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_drops_what_the_last_rows_passed_over(case):
    compare(case)


@pytest.mark.parametrize("chunk", [None, 3, 7])
@pytest.mark.parametrize("n", range(12, 26))
def test_the_window_of_the_first_generated_tokens_reaches_back_into_the_prompt(n, chunk):
    """Wherever in (B - m, B] the cut leaves the cache; rows of prompts before count like any others."""
    for ties in ("true", "false"):
        case = Case(
            f"scissorhands:window=6,recent=2,drop=6,literal_ties={ties}", 12, (n, *(1,) * 8), heads=1, chunk=chunk
        )
        compare(replace(case, pads=(0, 2, n - 1)))


@pytest.mark.parametrize("pieces", [(2, 2, 2), (3, 1, 4), (5, 2), (4, 1, 1, 3, 6)])
def test_the_window_reaches_back_over_several_short_pieces(pieces):
    turns = (15, *pieces, 1, 1, *pieces, *(1,) * 9)
    compare(Case("scissorhands:window=9,recent=1,drop=9,literal_ties=true", 18, turns, pads=(0,)))


@pytest.mark.parametrize("chunk", [None, 8, 13])
def test_the_engine_keeps_what_the_loops_keep(monkeypatch, chunk):
    policy, budget = "scissorhands:window=12,recent=2,drop=12", 24
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = kvkeep.attach(LlamaForCausalLM(config).eval())
    for name in ("q_proj", "k_proj"):  # uneven attention
        getattr(model.model.layers[0].self_attn, name).weight.data.mul_(20)
    loops, step, sets = [], Layer.step, []

    def spy(layer, query, keys, values, *, options, phase, real=None):
        if not sets or layer.seen.item() == 0:
            loops[:] = [Sequence(rule(policy, budget, 1), options.scaling)]
        out = step(layer, query, keys, values, options=options, phase=phase, real=real)
        loops[0].feed(*(x[0].tolist() for x in (query, keys, values)), decode=phase is Phase.DECODE)
        sets.append((retained(layer)[0], loops[0].kept))
        return out

    engine = Engine(model, policy=policy, budget=budget, rows=1, prefill_chunk=chunk)
    monkeypatch.setattr(Layer, "step", spy)
    prompts = [[(7 * i * i + n) % 50 for i in range(n)] for n in range(23, 37, 3)]
    engine.generate([Request(prompt=tuple(p), sampling=SamplingParams(max_new_tokens=14)) for p in prompts])
    assert len(sets) >= 5 * 14
    assert all(found == want for found, want in sets)


@pytest.mark.parametrize(("options", "words"), [("", 4), ("window=25,drop=25", 1), ("window=26,drop=26", 2)])
def test_a_slot_pays_a_float_for_25_rows_and_two_for_the_masses(options, words):
    layer = make_layer(Case(f"scissorhands:{options}", 60, (1,)))
    assert len(layer.policy.slots) == words + 2


@pytest.mark.parametrize(
    ("budget", "w", "r", "m", "literal", "inputs"),
    [
        (5, 1, 1, 1, "false", "hard"),
        (9, 3, 2, 4, "false", "twins"),
        (9, 3, 2, 4, "true", "constant"),
        (16, 8, 4, 8, "true", "random"),
        (16, 8, 4, 8, "false", "random"),
    ],
)
def test_algorithms_1_and_2_keep_the_same_tokens_from_an_empty_cache(budget, w, r, m, literal, inputs):
    policy = f"scissorhands:window={w},recent={r},drop={m},theta=1.1,literal_ties={literal}"
    case = Case(policy, budget, (1,) * 60, inputs=inputs, group=1)
    streams, turns = choose(case)
    reading = AlgorithmReading(theta=1.1, newest_first=literal == "true")
    printed = {
        (b, head): list(
            algorithm_1(
                stream.queries[head].tolist(),
                stream.keys[head].tolist(),
                budget,
                w=w,
                r=r,
                m=m,
                scaling=case.scaling,
                reading=reading,
            )
        )
        for b, stream in enumerate(streams)
        for head in range(case.heads)
    }
    for turn, (layer, _) in enumerate(lockstep(case, (streams, turns))):
        for (b, head), sets in printed.items():
            assert retained(layer)[b][head] == sets[turn], f"row {b}, head {head}, token {turn}"


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "drop"), [(16, None), (16, 5), (9, 1)])
def test_occupancy_is_a_saw_tooth(budget, drop):
    """policies.md §19.7: it falls to B + 1 - m, rises to B by one in each step, and falls again."""
    options = f":drop={drop},window=1" if drop else ""
    drop = drop or budget // 2
    sizes = [
        {len(head) for row in retained(layer) for head in row}
        for layer, _ in lockstep(Case(f"scissorhands{options}", budget, (1,) * 90))
    ]
    teeth = [budget + 1 - drop + n % drop for n in range(90 - budget)]
    assert sizes == [{n} for n in [*range(1, budget + 1), *teeth]]


def test_the_recent_tokens_never_go():
    for _, turn in lockstep(Case("scissorhands:recent=5,literal_ties=true", 12, (40, *DECODE))):
        for row_kept, seen in zip(turn.kept, turn.seen, strict=True):
            for kept in row_kept:
                assert kept[-5:] == list(range(seen - 5, seen))


@pytest.mark.parametrize("n", range(8, 30))
def test_a_prompt_is_cut_by_a_multiple_of_the_drop_to_the_budget_or_below(n):
    *_, turn = (turn for _, turn in lockstep(Case("scissorhands:drop=4,window=2", 9, (n,), pads=(0,))))
    expected = n - 4 * max(0, math.ceil((n - 9) / 4))
    assert [len(kept) for kept in turn.kept[0]] == [expected] * 2
    assert expected <= 9


def test_an_example_by_hand():
    """Budget 4, two go: the window is the rows 3 and 4 with the thresholds 1/4 and 1/5.

    Token 0 is low twice, tokens 1 and 2 once each, token 1 with the smaller sum; 3 is never low and 4 is recent.
    """
    prompt = [row(1.0), row(0.6, 0.4), row(0.4, 0.3, 0.3), row(0.1, 0.3, 0.2, 0.4), row(0.1, 0.1, 0.25, 0.3, 0.25)]
    options = "window=2,recent=1,drop=2"
    assert step(rule(f"scissorhands:{options}", 4, 1), prompt) == [2, 3, 4]
    assert step(rule(f"scissorhands:{options},literal_ties=true", 4, 1), prompt) == [1, 3, 4]


def test_an_equal_number_of_lows_is_decided_by_the_sum_and_then_by_age():
    """All of the row but token 4 is low; 1 and 2 have the smallest sums, and 1 is the older one."""
    last = [row(1.0), row(0.5, 0.5), row(0.4, 0.3, 0.3), row(0.25, 0.25, 0.25, 0.25), row(0.15, 0.1, 0.1, 0.15, 0.5)]
    options = "window=1,recent=1,drop=1,theta=0.9"
    assert step(rule(f"scissorhands:{options}", 4, 1), last) == [0, 2, 3, 4]
    assert step(rule(f"scissorhands:{options},literal_ties=true", 4, 1), last) == [0, 1, 2, 4]


def test_the_two_thresholds_differ_once_tokens_are_gone():
    """Position 99 with 4 keys: all are above 1/100 and tie, two are below 1/4; ties cost the newest."""
    rows = [{7: 0.1, 50: 0.2, 98: 0.3, 99: 0.4}]
    options = "window=1,recent=1,drop=1,literal_ties=true"
    assert step(rule(f"scissorhands:{options}", 3, 1), rows) == [7, 50, 99]
    assert step(rule(f"scissorhands:{options},threshold=live", 3, 1), rows) == [7, 98, 99]


@pytest.mark.parametrize("drop", [12, 13])
def test_as_much_may_be_dropped_as_is_not_recent(drop):
    """Of B + 1 = 17 tokens 5 are recent."""
    case = Case(f"scissorhands:recent=5,drop={drop}", 16, (24, 1, 1))
    if drop == 12:
        compare(case)
    else:
        with pytest.raises(BudgetError):
            make_layer(case)


@pytest.mark.parametrize("options", ["window=5,drop=4", "window=9", "window=2,drop=1"])
def test_a_window_longer_than_the_way_between_compressions_is_refused(options):
    with pytest.raises((BudgetError, PolicyError)):
        make_layer(Case(f"scissorhands:{options}", 16, (1,)))

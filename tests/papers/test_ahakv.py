"""AhaKV: the last rows of the prompt, SG-softmax and the value prior."""

import math
from dataclasses import replace

import pytest

from kvkeep import BudgetError
from kvkeep_lab.theory.ahakv import algorithm_1, sg_softmax, value_prior

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import choose, compare, lockstep, make_layer, play, played, retained
from .oracles import rule
from .rules_softmax import AhaKV

CASES = [
    *family("ahakv:recent=3", budgets=(4, 5, 16)),
    *variant("ahakv:recent=4,sinks=2,kernel=3,recent_accumulation=false", budgets=(7, 16)),
    *variant("ahakv:recent=2,clamp=false,value_prior=false", budgets=(3, 16)),
    Case("ahakv:recent=6,kernel=7,clamp=false,recent_accumulation=false", (18, 12), CHAT, pads=(0, 4), pause=5),
    Case("ahakv:recent=1,sg_softmax=false", 12, (30, *DECODE), heads=1, group=4),
    Case("ahakv:recent=0,recent_accumulation=false,kernel=1", 8, (24, *DECODE), heads=1),
    Case("ahakv", 40, (60, *(1,) * 200), heads=1),
]

TIES = [
    Case(f"ahakv:recent=2,value_prior=false{options}", budget, (24, *DECODE), inputs=inputs, group=group)
    for options in ("", ",recent_accumulation=false,clamp=false")
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 1), (7, "constant", 1), (8, "hard", 2))
]

ABLATED = "recent_accumulation=false,sg_softmax=false,value_prior=false"


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_the_largest_holistic_scores(case):
    compare(case)


@pytest.mark.parametrize(
    ("budget", "recent", "kernel", "inputs"), [(4, 1, 5, "twins"), (9, 3, 3, "random"), (16, 4, 1, "hard")]
)
def test_algorithm_1_keeps_the_same_tokens(budget, recent, kernel, inputs):
    policy = f"ahakv:recent={recent},kernel={kernel}"
    case = Case(policy, budget, (29, *DECODE), inputs=inputs, group=1)
    streams, turns = choose(case)
    printed = {
        (b, head): list(
            algorithm_1(
                *(getattr(stream, name)[head].tolist() for name in ("queries", "keys", "values")),
                prompt=29 - case.pads[b],
                B=budget,
                B_r=recent,
                kernel=kernel,
                scaling=case.scaling,
            )
        )
        for b, stream in enumerate(streams)
        for head in range(case.heads)
    }
    for turn, (layer, _) in enumerate(lockstep(case, (streams, turns))):
        for (b, head), sets in printed.items():
            assert retained(layer)[b][head] == sets[turn], f"row {b}, head {head}, turn {turn}"


@pytest.mark.parametrize("turns", [(24, *DECODE), CHAT, (1,) * 60], ids=["prompt", "chat", "decode"])
def test_with_everything_switched_off_it_is_h2o(turns):
    case = Case(f"ahakv:recent=3,sinks=1,{ABLATED}", 12, turns, pads=(0, 5))
    _, turns_played = choose(case)
    assert [turn.kept for turn in turns_played] == played(case, "h2o:recent=3,sinks=1")


def test_recent_accumulation_over_the_whole_prompt_is_no_change_in_its_first_step():
    case = Case("ahakv:recent=12,value_prior=false,sg_softmax=false", 13, (12, 1, 1, 1), pads=(0,))
    assert played(case, case.policy) == played(case, f"ahakv:recent=12,{ABLATED}")


def test_the_gain():
    """policies.md §6.2 and §6.3: 1 at i / k = sqrt(e), never below 1, and the figures of two long prompts."""
    clamped, literal = rule("ahakv", 1000, 1), rule("ahakv:clamp=false", 1000, 1)
    assert isinstance(clamped, AhaKV)
    assert isinstance(literal, AhaKV)
    assert 1000 * literal.gain(1) == literal.gain(1000) == 0.0
    assert clamped.gain(0) == clamped.gain(1000) == clamped.gain(1648) == 1.0
    assert literal.gain(1648) < 1.0 < literal.gain(1649) == clamped.gain(1649)
    assert literal.gain(1649) == pytest.approx(1.0, abs=1e-3)
    assert clamped.gain(8192) == pytest.approx(2.05, abs=5e-3)
    assert clamped.gain(5000) == pytest.approx(1.79, abs=5e-3)


@pytest.mark.long
def test_up_to_the_square_root_of_e_the_softmax_is_the_ordinary_one():
    """26 tokens and a budget of 16: 1.625, below 1.6487; from 27 tokens on, 1.6875, the two differ."""
    for n, equal in ((26, True), (27, False)):
        case = Case("ahakv:recent=4", 16, (n, *(1,) * 100), heads=4, group=1)
        assert (played(case, case.policy) == played(case, "ahakv:recent=4,sg_softmax=false")) is equal


def test_a_power_of_a_softmax_is_the_softmax_of_a_multiple():
    logits = [0.3, -1.2, 2.0, 0.7]
    whole = [sum(math.exp(gain * x) for x in logits) for gain in (1.0, 1.7)]
    p = {j: math.exp(x) / whole[0] for j, x in enumerate(logits)}
    assert sg_softmax(p, 1.7) == pytest.approx({j: math.exp(1.7 * x) / whole[1] for j, x in enumerate(logits)})


def test_the_value_prior_by_hand():
    """Squared norms 4, 1, 0, 9, 0 with a kernel of 3: means 5/2, 5/3, 10/3, 3, 9/2, divided by the largest."""
    found = value_prior([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]], kernel=3)
    assert found == pytest.approx([5 / 9, 10 / 27, 20 / 27, 2 / 3, 1.0])


def test_the_value_prior_turns_a_choice_round():
    """Token 0 is looked at a little more, and its value is half as long as token 1's."""
    prompt = [row(1.0), row(0.5, 0.5), row(0.4, 0.35, 0.25)]
    values = [[1.0], [2.0], [1.0]]
    assert step(rule("ahakv:recent=1,kernel=1", 2, 1), prompt, values=values) == [1, 2]
    assert step(rule("ahakv:recent=1,kernel=1,value_prior=false", 2, 1), prompt, values=values) == [0, 2]


def test_a_decode_row_is_not_multiplied_by_the_prior():
    """0 starts at 0.4 * 1/4 and 1 at 0.35; then 0 gets 0.3 more, and the prior would have made it 0.075."""
    options = "ahakv:recent=1,kernel=1,sg_softmax=false"
    weak = rule(options, 3, 1)
    assert step(weak, [row(1.0), row(0.5, 0.5), row(0.4, 0.35, 0.25)], values=[[1.0], [2.0], [1.0]]) == [0, 1, 2]
    assert step(weak, [row(0.3, 0.04, 0.4, 0.26)]) == [0, 2, 3]


@pytest.mark.parametrize(("policy", "budget"), [("ahakv", 31), ("ahakv:recent=4,sinks=3", 6)])
def test_more_protected_than_the_budget_is_refused(policy, budget):
    with pytest.raises(BudgetError):
        make_layer(Case(policy, budget, (1,)))


def test_the_inputs_make_each_of_the_three_parts_count():
    case = Case("ahakv:recent=3", 12, (40, *DECODE))
    streams, turns = choose(case)
    for part in ("recent_accumulation", "sg_softmax", "value_prior"):
        other = play(replace(case, policy=f"ahakv:recent=3,{part}=false"), streams)
        assert [turn.kept for turn in turns] != [turn.kept for turn in other], part

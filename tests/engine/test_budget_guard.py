"""The guard: a request takes the smallest budget at which its prompt's cut loses little, and is then as under it."""

from dataclasses import dataclass

import pytest
from sweeps import sweep

import kvkeep
from kvkeep import InputError, backends
from kvkeep.engine import Engine, Request
from kvkeep.engine.budget_guard import refusal
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.lost_mass import LostMass
from kvkeep.policies._mass import HeavyHitters

from .models import model
from .test_equal import prompt_of

POLICIES = ["h2o", "h2o:recent=3,sinks=1", "snapkv:window=2,decode=score", "snapkv:window=3", "tova", "keyformer"]
POLICIES += ["h2o:decay=0.9", "nacl:sinks=1,recent=1", "h2o_avg:recent=2", "pyramidkv:window=2", "tova:per_head=true"]
POLICIES += ["ahakv:recent=2,sg_softmax=false", "blend:recent=2,sinks=1", "restkv:window=2"]
BUDGET = 16


def asked(i, *, length=40, new=8, **others):
    return Request(prompt=prompt_of(i, length), sampling=SamplingParams(max_new_tokens=new, temperature=0.7), **others)


def plain(result):
    return result.token_ids, result.lost_mass, result.budget, result.text


@pytest.mark.slow
@pytest.mark.parametrize("policy", sweep(POLICIES, lambda one: POLICIES.index(one) < 6))
def test_the_choice_equals_a_request_that_asked_for_that_budget(policy):
    """By hand: run all three budgets, take the smallest whose loss is small enough, and compare with the guard's."""
    engine = Engine(model("qwen3"), policy=policy, budget=BUDGET, rows=3)
    chosen = set()
    for i in range(4):
        by_hand = {budget: engine.generate(asked(i, budget=budget))[0] for budget in (4, 8, 16)}
        losses = [result.lost_mass.prompt for result in by_hand.values()]
        assert losses == sorted(losses, reverse=True)
        for guard in (0.0, losses[2], (losses[1] + losses[2]) / 2, losses[1], losses[0], 1.0):
            fits = [budget for budget, result in by_hand.items() if result.lost_mass.prompt <= guard]
            wanted = by_hand[fits[0] if fits else BUDGET]
            (found,) = engine.generate(asked(i, guard=guard))
            assert plain(found) == plain(wanted)
            assert found.guarded == bool(fits)
            chosen.add(found.budget)
    assert chosen == {4, 8, 16}


@pytest.mark.slow
def test_guarded_rows_share_a_batch_with_others():
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=4)
    requests = [
        asked(i, length=20 + 3 * i, guard=(None, 0.2, 0.5, 1.0)[i % 4], pins=((0, 2),) if i % 3 == 0 else ())
        for i in range(9)
    ]
    together = engine.generate(requests)
    assert len({one.budget for one in together}) > 1
    for request, result in zip(requests, together, strict=True):
        alone = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=1)
        assert alone.generate(request)[0].token_ids == result.token_ids
        assert (result.guarded is None) == (request.guard is None)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_it_works_beside_sliding_windows_and_slot_positions(name):
    options = {"positions": "slot"} if name == "llama" else {}
    engine = Engine(model(name), policy="h2o:recent=2", budget=BUDGET, rows=1, **options)
    guarded, small = engine.generate([asked(3, guard=1.0), asked(3, budget=4)])
    assert guarded.budget == 4
    assert guarded.token_ids == small.token_ids


def test_a_budget_that_pins_do_not_fit_is_left_out():
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=1, guard=1.0)
    results = engine.generate([asked(1), asked(1, pins=((0, 5),)), asked(1, pins=((0, 14),)), asked(1, pins=((0, 2),))])
    assert [one.budget for one in results] == [4, 8, 16, 4]


@pytest.mark.parametrize(("budget", "levels"), [(13, {13}), (40, {20, 40}), (64, {16, 32, 64})])
def test_budgets_under_which_a_policy_rates_tokens_otherwise_are_left_out(budget, levels):
    """Under 16 tokens the default of `generate` protects less than its observation window, and rates the rest."""
    engine = Engine(model("llama"), policy="snapkv:default", budget=budget, rows=1)
    found = [engine.generate(asked(i, length=80, guard=guard))[0] for i, guard in enumerate((0.0, 0.5, 1.0))]
    assert {result.finish_reason for result in found} == {"length"}
    assert found[2].budget == min(levels)
    by_hand = {number: engine.generate(asked(1, length=80, budget=number))[0].lost_mass.prompt for number in levels}
    wanted = min((number for number in levels if by_hand[number] <= 0.5), default=budget)
    assert found[1].budget == wanted


def test_a_prompt_that_fits_into_a_quarter_loses_nothing_there():
    engine = Engine(model("llama"), policy="h2o", budget=BUDGET, rows=1, guard=0.0)
    (found,) = engine.generate(asked(1, length=4, new=1))
    assert (found.budget, found.guarded, found.lost_mass) == (4, True, LostMass(0.0, None))


REFUSED = {
    "full": "it keeps every token",
    "h2o:keep_prompt=1.0": "it keeps prompts, whole or a share of the budget",
    "local": "its statistic shows no attention mass",
    "reread:decode=score": "it asks for no row of a prompt, so what a cut loses is not known",
    "scissorhands": "its cuts are no plain choice of the best tokens of each head",
    "spatten": "its cuts are no plain choice of the best tokens of each head",
    "snapkv:window=2,decode=grow": "its cuts are no plain choice of the best tokens of each head",
    "ahakv:recent=2": "what it asks of attention depends on the budget",
    "defensivekv:window=2": "how it rates tokens depends on the budget",
    "h2o": None,
}


def test_policies_under_which_no_budget_can_be_chosen_are_refused():
    assert {name: refusal(kvkeep.parse(name), [16, 32, 64]) for name in REFUSED} == REFUSED
    engine = Engine(model("llama"), policy="full", budget=64, rows=1)
    with pytest.raises(InputError, match="it keeps every token"):
        engine.add(asked(1, length=20, new=2, guard=0.1))
    with pytest.raises(InputError, match="it keeps every token"):  # of an engine's own guard already here
        Engine(model("llama"), policy="full", budget=64, rows=1, guard=0.1)


def test_prompts_in_chunks_are_refused_with_the_remedy():
    engine = Engine(model("llama"), policy="h2o", budget=BUDGET, rows=1, prefill_chunk=10)
    with pytest.raises(InputError, match=r"40 tokens is cut after chunks of 10\. Leave `guard` or `prefill_chunk` out"):
        engine.add(asked(1, guard=0.1))
    assert engine.generate(asked(1, length=10, guard=1.0))[0].budget == 4


@pytest.mark.parametrize("guard", [-0.1, 1.1, float("nan")])
def test_a_guard_is_a_share(guard):
    with pytest.raises(InputError, match="no share of attention; give a number from 0 to 1"):
        asked(1, guard=guard)
    with pytest.raises(InputError, match="no share of attention"):
        Engine(model("llama"), guard=guard, budget=8, rows=1)


def test_a_policy_whose_state_depends_on_the_budget_ends_its_request():
    @dataclass(frozen=True, kw_only=True)
    class Moody(HeavyHitters):
        def observe(self, state, view, report):
            return {"mass": state["mass"] + report.mass * view.budget}

        def score(self, view, state):
            return state["mass"]

    engine = Engine(model("llama"), policy="h2o", budget=BUDGET, rows=2)
    (bad,) = engine.generate([asked(1, policy=Moody(), guard=0.1)])
    assert bad.finish_reason == "error"
    assert "no budget can be chosen" in bad.error
    assert engine.generate(asked(2, guard=1.0))[0].budget == 4


def test_a_policy_that_cannot_be_asked_beforehand_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Curious(HeavyHitters):
        def wants(self, view):
            return [self.statistic][int(view.positions[0, 0, 5]) * 0]

        def score(self, view, state):
            return state["mass"]

    engine = Engine(model("llama"), policy="h2o", budget=BUDGET, rows=1)
    with pytest.raises(InputError, match="cannot be told beforehand"):
        engine.add(asked(1, policy=Curious(), guard=0.1))


def test_a_recorded_step_obeys_the_budget_that_was_chosen(monkeypatch):
    monkeypatch.setenv(backends.SWITCH, "torch")
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=2, graphs=True)
    guarded, small = engine.generate([asked(1, guard=1.0), asked(1, budget=4)])
    assert guarded.token_ids == small.token_ids
    assert guarded.budget == 4


def test_the_next_sequence_of_the_row_has_its_own_budget():
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=1)
    results = engine.generate([asked(1), asked(1, guard=1.0), asked(1)])
    assert [one.budget for one in results] == [16, 4, 16]
    assert results[0].token_ids == results[2].token_ids
    assert results[0].lost_mass == results[2].lost_mass

"""A guard where heads share a budget: a row is then as under the budget that was chosen, division and all."""

from dataclasses import replace

import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep.engine import Engine, Request, budget_guard
from kvkeep.engine.budget_guard import _end_of_prompt as end_of_prompt
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.store import DenseStore
from kvkeep.policies._head_budgets import under

from .models import model
from .test_budget_guard import BUDGET, asked
from .test_equal import prompt_of

RULES = ["ada:0.2", "global:0.1", "global:0"]
POLICIES = ["snapkv:window=3", "h2o:recent=2", "h2o:recent=1,sinks=2", "adakv:window=2", "snapkv:window=2,decode=score"]
POLICIES += ["blend:recent=2,sinks=1,rotated=true", "restkv:window=2", "nacl:sinks=1,recent=1"]
CASES = [(name, rule, policy) for name in ("llama", "gemma3") for rule in RULES for policy in POLICIES]
NEW = 6


def engine_of(name="llama", rule="global:0.1", policy=POLICIES[0], **options):
    return Engine(model(name), **{"policy": policy, "budget": BUDGET, "head_budget": rule, "rows": 3, **options})


def requests(budgets=(None,), guards=(None,), **others):
    pairs = zip(range(3), budgets * 3, guards * 3, strict=False)
    return [asked(i, length=26 + 7 * i, new=NEW, budget=budget, guard=guard, **others) for i, budget, guard in pairs]


def close(one, other):
    """Whether two results are the same. The loss is summed up in other pieces where tokens go early."""
    lost = [pytest.approx(share, abs=1e-6) for share in (other.lost_mass.prompt, other.lost_mass.decode)]
    shown = one.token_ids, one.budget, one.lost_mass.prompt, one.lost_mass.decode
    return shown == (other.token_ids, other.budget, *lost)


@pytest.mark.parametrize(
    ("name", "rule", "policy"), sweep(CASES, lambda case: case in (CASES[0], CASES[13], CASES[40]))
)
def test_the_choice_equals_a_request_that_asked_for_that_budget(name, rule, policy):
    """Rows of one batch choose different budgets."""
    engine = engine_of(name, rule, policy)
    by_hand = {budget: engine.generate(requests((budget,))) for budget in (4, 8, 16)}
    losses = [[by_hand[budget][i].lost_mass.prompt for budget in (4, 8, 16)] for i in range(3)]
    assert all(each == sorted(each, reverse=True) for each in losses)
    guards = ((losses[0][1] + losses[0][2]) / 3 + losses[0][2] / 3, 1.0, (losses[2][0] + losses[2][1]) / 2)
    found = engine.generate(requests(guards=guards))
    for i, (result, guard) in enumerate(zip(found, guards, strict=True)):
        fits = [budget for budget, results in by_hand.items() if results[i].lost_mass.prompt <= guard]
        assert close(result, by_hand[fits[0] if fits else BUDGET][i])
        assert result.guarded == bool(fits)
    assert {result.budget for result in found} >= {4, 8}


@pytest.mark.long
@pytest.mark.parametrize("rule", ["ada:0", "global:0"])
def test_rows_of_one_run_choose_for_themselves(rule):
    """Prompts of one length are read together, with and without a guard."""
    guards, engine = (1.0, None, 0.85, 0.0), engine_of(rule=rule, rows=4)
    together = engine.generate([asked(i, new=NEW, guard=guard) for i, guard in enumerate(guards)])
    assert len({result.budget for result in together}) == 3
    for i, result in enumerate(together):
        assert close(result, engine_of(rule=rule).generate([asked(i, new=NEW, budget=result.budget)])[0])


@pytest.mark.long
@pytest.mark.parametrize("kv_bits", ["4", "k8v4"])
@pytest.mark.parametrize("rule", ["ada:0.2", "global:0.1"])
def test_codes_and_pins(rule, kv_bits):
    engine, pins = engine_of("gemma3", rule, kv_bits=kv_bits), {"pins": ((3, 5),)}
    small, chosen = engine.generate(requests((8,), **pins)), engine.generate(requests(guards=(1.0,), **pins))
    assert [result.budget for result in chosen] == [8] * 3  # a quarter does not hold pins beside the window
    assert all(close(one, other) for one, other in zip(small, chosen, strict=True))


def row_of(engine, **options):
    """What a row holds after a prompt: the budgets, positions and tensors of each layer."""
    with engine.session() as session:
        session.ask(Request(prompt=prompt_of(3, 40), sampling=SamplingParams(max_new_tokens=1), **options))
        return session.snapshot().contents.layers


@pytest.mark.parametrize("rule", ["ada:0.2", "global:0.1"])
def test_a_row_is_bit_for_bit_that_of_the_smaller_budget(rule):
    wanted = row_of(engine_of("gemma3", rule, budget=BUDGET // 4))
    found = row_of(engine_of("gemma3", rule), guard=1.0)
    for one, other in zip(wanted, found, strict=True):
        assert one.budget == other.budget
        assert torch.equal(one.positions, other.positions)
        there = one.positions >= 0
        for name, x in other.tensors.items():
            if name != "lost":
                assert torch.equal(*((y[there] if name in one.cut else y) for y in (one.tensors[name], x))), name


def test_the_pool_of_a_row_that_was_reduced_is_whole_again_for_the_next():
    engine = engine_of(rows=1)
    before, _, after = engine.generate([asked(1), asked(1, guard=1.0), asked(1)])
    assert close(before, after)
    assert engine.memory_usage().allocated_bytes == engine.row_bytes
    rows: KVManager = engine._kv
    assert all(isinstance(block.store, PooledStore) for block in rows.blocks_of(0))


@pytest.mark.long
@pytest.mark.parametrize("rule", ["ada:0.2", "global:0.1"])
def test_a_session_keeps_the_budget_that_its_first_turn_chose(rule, tmp_path):
    answers = []
    for budget, guard in ((BUDGET // 4, None), (BUDGET, 1.0)):
        with engine_of(rule=rule, budget=budget).session() as session:
            turns = [
                session.ask(Request(prompt=prompt_of(1, 30), sampling=SamplingParams(max_new_tokens=4), guard=guard))
            ]
            session.snapshot().save(tmp_path / "memory")
            turns.append(session.ask(prompt_of(2, 9), SamplingParams(max_new_tokens=4)))
        assert [turn.budget for turn in turns] == [BUDGET // 4] * 2
        answers.append([turn.token_ids for turn in turns])
        memory = kvkeep.Snapshot.load(tmp_path / "memory")
        again = Request(prompt=prompt_of(2, 9), snapshot=memory, sampling=SamplingParams(max_new_tokens=2))
        (result,) = engine_of(rule=rule, budget=budget).generate([again])
        assert result.budget == BUDGET // 4
    assert answers[0] == answers[1]


def test_a_budget_whose_tokens_the_row_does_not_hold_is_passed_over(monkeypatch):
    """A division that gives a head more of a smaller budget than of the whole."""
    real, calls = budget_guard.shared_budgets, []

    def unfair(policy, layers):
        calls.append(real(policy, layers))
        if len(calls) > 1:
            return calls[-1]
        whole = real(policy, [(replace(view, budget=view.budget * 4), score) for view, score in layers])
        poorest, found = whole.argmin(dim=1, keepdim=True), torch.ones_like(whole)
        return found.scatter(1, poorest, calls[0].sum(dim=1, keepdim=True) - found.shape[1] + 1)

    monkeypatch.setattr(budget_guard, "shared_budgets", unfair)
    engine = engine_of(rule="global:0", policy="snapkv:window=1", rows=1)
    (result,) = engine.generate([asked(1, new=NEW, guard=1.0)])
    assert (result.budget, result.guarded, result.error) == (8, True, None)
    (wanted,) = engine.generate([asked(1, new=NEW, budget=8)])
    assert close(result, wanted)


@pytest.mark.parametrize("alpha", [0.02, 0.2, 0.5])
def test_no_head_gets_more_of_a_smaller_budget(alpha):
    policy, generator = under(kvkeep.parse("snapkv:window=1"), f"global:{alpha}"), torch.Generator().manual_seed(0)
    for _ in range(60):
        heads, whole = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 40), (4, 48)))
        spread = torch.rand(heads, 1, generator=generator) * 3
        score, found = torch.rand(1, heads, 60, generator=generator) * spread, []
        for budget in (max(1, whole // 4), whole // 2, whole):
            tokens, nothing = torch.arange(60, dtype=torch.int32), torch.zeros(1, heads, 60, 1)
            positions = tokens.expand(1, heads, -1)
            view = replace(end_of_prompt(60, budget), positions=positions, keys=nothing, values=nothing)
            found.append(policy.spreads.heads(policy, view, score))
        assert (found[0] <= found[1]).all()
        assert (found[1] <= found[2]).all()


@pytest.mark.parametrize("store", [DenseStore, PooledStore])
def test_a_token_that_no_slot_holds_leaves_an_empty_one(store):
    keys = torch.arange(6.0)[:, None].expand(1, 2, 6, 8)
    block, other = (Block(keys, -keys, numbers=[5], starts={"mass": 0.0}, store=store) for _ in range(2))
    held, wanted = (
        torch.tensor(places, dtype=torch.int32).expand(1, 2, -1) for places in ([3, 0, 2, 4], [0, 1, 3, -1])
    )
    block.store.fill(keys[:, :, [3, 0, 2, 4]], -keys[:, :, [3, 0, 2, 4]], held)
    budget_guard.Reduced.of(block, budget_guard.Cut(wanted, torch.zeros(1, 2), None)).put(other)
    assert other.store.positions[..., :4].tolist() == [[[0, -1, 3, -1]] * 2]
    assert other.store.slots().keys[..., [0, 2], 0].tolist() == [[[0.0, 3.0]] * 2]

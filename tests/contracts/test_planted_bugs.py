"""Bugs that other implementations really had, planted one by one: each must break a law."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from kvkeep.attention_stats import Mass
from kvkeep.cache import decode_replay, layer
from kvkeep.cache.layer import Layer
from kvkeep.kv import ranking, row_copy
from kvkeep.kv.block import Block
from kvkeep.policies.base import Policy
from kvkeep.policies.h2o import H2O
from kvkeep.policies.streaming_llm import StreamingLLM
from kvkeep.snapshot import contents
from kvkeep.snapshot import snapshot as snapshots
from kvkeep.testing import LAWS, Case

CASE = Case(rows=2, prompt=20, steps=30, budget=8)


def breaks(law, policy):
    try:
        LAWS[law](policy, CASE)
    except AssertionError:
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("policy", [StreamingLLM(sinks=2), H2O(recent=3)])
def test_without_a_bug_no_law_is_broken(policy):
    assert [law for law in LAWS if breaks(law, policy)] == []


@dataclass(frozen=True, kw_only=True)
class SlotsAsPositions(Policy):
    """Reads the index of a slot as the token's position."""

    def protected(self, budget):
        return 0, 0

    def score(self, view, state):
        return torch.arange(view.positions.shape[-1]).float().expand(view.positions.shape)


def test_slots_read_as_positions():
    assert breaks("slots_do_not_matter", SlotsAsPositions())


def test_sinks_found_by_slot_instead_of_position(monkeypatch):
    def by_slot(values, positions, seen, *, sinks=0, recent=0, pins=None):
        return values.index_fill(-1, torch.arange(sinks), torch.inf)

    monkeypatch.setattr(ranking, "protect", by_slot)
    assert breaks("protected_tokens_stay", H2O(sinks=2, recent=2))


def test_state_not_moved_with_the_slots(monkeypatch):
    honest = layer.cut

    def forgetful(policy, block, view, state, **others):
        return honest(policy, block, view, {name: tensor.flip(-1) for name, tensor in state.items()}, **others)

    monkeypatch.setattr(layer, "cut", forgetful)
    assert breaks("slots_do_not_matter", H2O(recent=3))


def test_state_of_the_victim_inherited_by_the_new_token(monkeypatch):
    honest = Layer._decode

    def unclean(self, *arguments):
        slots = type(self.policy).slots
        monkeypatch.setattr(type(self.policy), "slots", {})
        try:
            return honest(self, *arguments)
        finally:
            monkeypatch.setattr(type(self.policy), "slots", slots)

    monkeypatch.setattr(Layer, "_decode", unclean)
    assert breaks("slots_do_not_matter", H2O(recent=3))


def test_budget_off_by_one(monkeypatch):
    honest = ranking.keep
    monkeypatch.setattr(ranking, "keep", lambda values, positions, n: honest(values, positions, n + 1))
    assert breaks("never_over_budget", H2O(recent=3))


def test_budget_off_by_one_in_decode(monkeypatch):
    honest = layer.evict

    def late(policy, block, view, **others):
        honest(policy, block, replace(view, budget=view.budget + 1), **others)

    monkeypatch.setattr(decode_replay, "why_not_fused", lambda *given, **others: "not to be tried")
    monkeypatch.setattr(layer, "evict", late)
    assert breaks("never_over_budget", H2O(recent=3))


@dataclass(frozen=True, kw_only=True)
class HeadAverage(Policy):
    """Averages scores over heads without saying so."""

    statistic: ClassVar[Mass] = Mass()
    slots: ClassVar[dict[str, float]] = {"mass": 0.0}

    def observe(self, state, view, report):
        return {"mass": state["mass"] + report.mass}

    def score(self, view, state):
        return state["mass"].mean(dim=1, keepdim=True).expand_as(state["mass"])


def test_scores_averaged_over_heads():
    assert breaks("heads_are_independent", HeadAverage())


@dataclass(frozen=True, kw_only=True)
class Unseeded(Policy):
    """Draws from the global generator."""

    stochastic: ClassVar[bool] = True

    def score(self, view, state):
        return torch.rand(view.positions.shape)


def test_unseeded_randomness():
    assert breaks("repeatable", Unseeded())


def test_padding_enters_the_slots(monkeypatch):
    honest = Block.advance

    def deaf(self, T, real, phase):
        return honest(self, T, None, phase)

    monkeypatch.setattr(Block, "advance", deaf)
    assert breaks("slots_do_not_matter", H2O(recent=3))


def test_keys_written_to_the_wrong_slot(monkeypatch):
    honest = layer.append

    def shifted(policy, block, keys, *others, backend):
        return honest(policy, block, keys.roll(1, dims=1), *others, backend=backend)

    monkeypatch.setattr(decode_replay, "why_not_fused", lambda *given, **others: "not to be tried")
    monkeypatch.setattr(layer, "append", shifted)
    assert breaks("slots_hold_the_originals", H2O(recent=3))


@dataclass(frozen=True, kw_only=True)
class Remembers(Policy):
    """Keeps a number beside its slots, where no copy of a row finds it."""

    counts: ClassVar[dict[int, int]] = {}

    def score(self, view, state):
        self.counts[id(view.seen)] = self.counts.get(id(view.seen), 0) + 1
        return (view.positions % (self.counts[id(view.seen)] % 3 + 2)).float()


def test_memory_beside_the_state():
    assert breaks("saving_and_restoring_changes_nothing", Remembers())


def test_tokens_that_return_to_other_slots(monkeypatch):
    honest = snapshots._spread
    monkeypatch.setattr(snapshots, "_spread", lambda packed, occupied: honest(packed.flip(0), occupied))
    assert breaks("saving_and_restoring_changes_nothing", H2O(recent=3))


def test_state_left_out_of_a_copy(monkeypatch):
    honest = row_copy.put_row

    def forgetful(block, number, copy):
        honest(block, number, copy)
        for tensor in block.state.values():
            tensor[number] = 0

    monkeypatch.setattr(contents, "put_row", forgetful)
    assert breaks("saving_and_restoring_changes_nothing", H2O(recent=3))

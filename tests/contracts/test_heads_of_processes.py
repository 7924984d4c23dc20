"""Policies that forget the heads of other processes, and mistakes in `Heads`: each breaks the law about processes."""

import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvkeep
from kvkeep.attention_stats import Mass
from kvkeep.policies.base import Policy
from kvkeep.testing import LAWS, Case, case

CASE = Case(rows=2, heads=2, prompt=20, steps=8, budget=6)
LAW = LAWS["processes_share_the_heads"]


@dataclass(frozen=True, kw_only=True)
class Averages(Policy):
    """Goes by the attention of all heads of a layer, as TOVA does."""

    statistic: ClassVar = Mass(rows=1)
    slots: ClassVar = {"last": 0.0}
    shares_heads: ClassVar[bool] = True
    asks_others: ClassVar[bool] = True

    def protected(self, budget):
        return 0, 0

    def observe(self, state, view, report):
        whole = view.heads.all(report.mass) if self.asks_others else report.mass
        return {"last": whole.mean(dim=1, keepdim=True).expand_as(report.mass)}

    def score(self, view, state):
        return state["last"]


@dataclass(frozen=True, kw_only=True)
class AveragesOwn(Averages):
    """The same, of the process's own heads."""

    asks_others: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Counted(Policy):
    """Other rules for even heads than for odd ones."""

    asks_others: ClassVar[bool] = True

    def protected(self, budget):
        return 0, 0

    def score(self, view, state):
        mine = view.positions.shape[1]
        numbers = view.heads.numbers(mine, view.positions.device) if self.asks_others else torch.arange(mine)
        return ((view.positions + 3) * (numbers[:, None] * 7 + 5) % 11).float()


@dataclass(frozen=True, kw_only=True)
class CountedOwn(Counted):
    """The same, with heads counted in the process."""

    asks_others: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class AsksInOne(Averages):
    """Asks the others in the first process alone."""

    def observe(self, state, view, report):
        if view.heads.rank:
            return {"last": report.mass}
        return super().observe(state, view, report)


@pytest.mark.parametrize("policy", [Averages(), Counted()])
def test_policies_that_ask_for_the_heads_are_lawful(policy):
    LAW(policy, CASE)


@pytest.mark.parametrize("policy", [AveragesOwn(), CountedOwn()])
def test_policies_that_forget_the_heads_of_others_are_found(policy):
    with pytest.raises(AssertionError, match="one process keeps"):
        LAW(policy, CASE)


def test_a_policy_that_asks_in_one_process_alone_is_found():
    with pytest.raises(AssertionError, match="have not asked each other"):
        LAW(AsksInOne(), CASE)


def test_an_error_of_a_policy_reaches_the_test():
    class Fails(Averages):
        def score(self, view, state):
            raise ZeroDivisionError("a mistake of its own")

    with pytest.raises(ZeroDivisionError, match="of its own"):
        LAW(Fails(), CASE)


def test_an_error_in_one_process_alone_reaches_the_test_at_once():
    """The other process waits for it at that moment."""

    class FailsInOne(Averages):
        def observe(self, state, view, report):
            if view.heads.rank:
                raise ZeroDivisionError("a mistake of its own")
            return super().observe(state, view, report)

    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of its own"):
        LAW(FailsInOne(), CASE)
    assert time.monotonic() - begun < case.PATIENCE_S / 2


@pytest.mark.parametrize("policy", [Averages(), AveragesOwn(), AsksInOne()])
def test_no_thread_is_left_while_the_error_is_held(policy):
    before, held = set(threading.enumerate()), None
    try:
        LAW(policy, CASE)
    except AssertionError as error:
        held = error
    assert (held is None) == (policy == Averages())
    assert set(threading.enumerate()) <= before


def breaks(policy, case):
    try:
        LAW(policy, case)
    except (AssertionError, RuntimeError):
        return True
    return False


def turned(self, mine):
    return torch.cat(self._gathered(mine)[::-1], dim=1)


def doubled(self, mine):
    return torch.cat([self._gathered(mine)[0]] * 2, dim=1)


BUGS = [
    ("all", turned, "adakv:window=2"),
    ("all", doubled, "tova"),
    ("all", lambda self, mine: mine, "spatten"),
    ("all_slots", lambda self, mine, empty: mine, "adakv:window=2,alpha=0"),
    ("mine", lambda self, whole: whole.chunk(self.ranks, dim=1)[0], "defensivekv:window=2"),
    ("numbers", lambda self, mine, device: torch.arange(mine), "random"),
]


@pytest.mark.parametrize(("name", "bug", "policy"), BUGS)
def test_mistakes_in_the_heads_of_processes_are_found(name, bug, policy, monkeypatch):
    monkeypatch.setattr(case._Between, name, bug)
    chunk = None if policy == "spatten" else 7
    cases = [Case(rows=2, heads=2, prompt=24, steps=6, budget=6, chunk=chunk, seed=seed) for seed in range(3)]
    assert any(breaks(kvkeep.parse(policy), case) for case in cases)


def test_what_a_padded_query_gets_is_not_compared():
    """It is undefined, and here it depends on the longest range of a pool, which two processes do not share."""
    sizes = {
        "rows": 2,
        "heads": 1,
        "group": 1,
        "dim": 2,
        "prompt": 8,
        "steps": 1,
        "budget": 4,
        "chunk": 2,
        "padding": 1,
    }
    for kv_bits in (None, "8"):
        LAW(kvkeep.parse("defensivekv:window=2"), Case(**sizes, seed=1, kv_bits=kv_bits))

"""Policies that say what their sums are, so that a backend can fuse their decode step."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conformance.dummy_backend import DummyBackend

import kvkeep
from kvkeep import registry
from kvkeep.eviction import fuses
from kvkeep.policies._mass import HeavyHitters
from kvkeep.policies.abilities import Sums
from kvkeep.statistic import Mass
from kvkeep.store import Cascade
from kvkeep.types import Phase, Report, View


def told():
    """Every policy that says what its sums are, with the options under which they are so."""
    for name in registry.available():
        sums = kvkeep.parse(name).sums
        if sums is not None:
            options = ",".join(f"{option}={value}" for option, value in sums.only.items())
            yield kvkeep.parse(f"{name}:{options}" if options else name)
    yield kvkeep.parse("h2o:decay=0.75,recent=3")


@pytest.mark.parametrize("policy", list(told()), ids=str)
def test_what_a_policy_says_of_its_sums_is_what_it_does(policy):
    g = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(111, generator=g)[:37] for _ in range(8)]).view(4, 2, 37).int()
    positions = positions.masked_fill(torch.rand(positions.shape, generator=g) < 0.3, -1)
    view = View(
        positions=positions,
        keys=torch.zeros(4, 2, 37, 1),
        values=torch.zeros(4, 2, 37, 1),
        seen=torch.full((4,), 111),
        budget=30,
        new=torch.tensor([1, 0, 1, 1]),
        prompt=torch.full((4,), 90),
        phase=Phase.DECODE,
        layer=0,
        sequences=torch.zeros(4, dtype=torch.int64),
        past=torch.zeros(4, 0),
        alive=torch.zeros(4, 0, dtype=torch.bool),
    )
    mass = torch.rand(4, 2, 37, generator=g) * (view.new > 0)[:, None, None]
    state = {name: torch.rand(4, 2, 37, generator=g) for name in policy.slots}
    fade = (getattr(policy.wants(view), "decay", 1.0) ** view.new)[:, None, None]
    after = policy.observe(state, view, Report({"mass": mass}))
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor * fade + mass)
    want = positions.float() if policy.sums.score is None else after[policy.sums.score]
    assert torch.equal(policy.score(view, after), want)
    assert set(policy.slots.values()) <= {0.0}
    assert fuses(policy, DummyBackend())


def test_a_policy_that_changes_a_method_is_asked_again():
    class Contrary(type(kvkeep.parse("local"))):
        def score(self, view, state):
            return -view.positions.float()

    assert fuses(kvkeep.parse("local"), DummyBackend())
    assert not fuses(Contrary(), DummyBackend())


@dataclass(frozen=True, kw_only=True)
class Plain(HeavyHitters):
    sums: ClassVar[Sums | None] = Sums("mass")

    def score(self, view, state):
        return state["mass"]


def test_a_report_that_follows_from_the_slots_is_asked_for_with_the_new_token_among_them():
    class Sparing(Plain):
        def wants(self, view):
            return Mass(rows=(view.positions[:, 0] >= 0).sum(dim=-1) % 2)

    assert fuses(Plain(), DummyBackend())
    assert not fuses(Sparing(), DummyBackend())


@pytest.mark.parametrize(
    "attributes",
    [
        {"cascades": Cascade},
        {"slots": {"mass": 1.0}},
        {"slots": {"mass": 0.0, "bonus": 0.5}},
        {"sums": Sums("attention")},
        {"sums": Sums("mass"), "slots": {}},
    ],
    ids=["a table of layers", "a start above 0", "another start above 0", "another name", "no state"],
)
def test_a_policy_with_more_than_the_kernel_does_is_asked_itself(attributes):
    assert not fuses(type("More", (Plain,), attributes)(), DummyBackend())

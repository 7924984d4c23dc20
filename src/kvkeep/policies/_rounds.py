"""Base of policies for long generations, which drop many tokens at once and leave the cache alone in between."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass, RowMasses, Statistic
from kvkeep.budget import between
from kvkeep.policies import _bursts
from kvkeep.policies.base import Bursts, Policy, option
from kvkeep.types import Budget, Phase, Report, State, View


@runtime_checkable
class Buffered(Protocol):
    """A policy with a buffer: one of `Rounds`, or `random`, which has its buffer on demand."""

    @property
    def buffer(self) -> int:
        """Return how many tokens go at once."""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted."""


def left(policy: Buffered, view: View) -> Int[Tensor, "#B #Hk"]:
    """Return how many tokens a burst leaves in a head: the budget less the buffer (at most half of the budget), but no
    fewer than the policy protects, and at least 1.
    """
    sinks, recent = policy.protected(view.budget)
    budget, gone, shielded = (
        number if isinstance(number, Tensor) else view.seen.new_full((1, 1), number)  # made on the device, not copied
        for number in (view.budget, between(1, view.budget // 2, policy.buffer), sinks + recent)
    )
    return (budget - gone).maximum(shielded).clamp(min=1)


def stays(policy: Buffered, view: View, state: State) -> Int[Tensor, "B Hk"]:
    """Return how many tokens may stay: the budget while a head's tokens fit into it; otherwise what a burst leaves."""
    held = (view.positions >= 0).sum(dim=-1)
    return torch.where(held > view.budget, left(policy, view), view.budget)


ROUNDS = Bursts(stays, waits=True)
"""Whenever a head is over budget, as many tokens go as the policy's ``buffer`` says."""


@dataclass(frozen=True, kw_only=True)
class Rounds(Policy):
    """Whenever a head is over budget, as many tokens go as `buffer` says."""

    buffer: int = option(128, "tokens that go at once; at most half of the budget", within=(1, math.inf))
    bursts: ClassVar[Bursts | None] = ROUNDS


@dataclass(frozen=True, kw_only=True)
class NewestRows(Rounds):
    """Remembers the mass of each of the newest rows, whose tokens stay."""

    window: int = option(8, "newest rows whose attention counts; their tokens stay", within=(1, 64))

    @property
    def slots(self) -> Mapping[str, float]:  # type: ignore[override]  # a longer window needs more
        """Return the per-slot state: the mass from each of the newest rows, row ``i`` under ``i % window``."""
        return {f"row{place}": 0.0 for place in range(self.window)}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens stay: 0, and the window (at most a quarter of the budget)."""
        return 0, between(0, budget // 4, self.window)

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the mass of each of a prompt's last rows, or of a generated token's row."""
        return Mass() if view.is_decode else RowMasses(rows=self.window, places=self.window)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with the masses of this step's rows in place of those of the oldest ones.

        Probes change nothing.
        """
        if view.phase is Phase.PROBE:
            return state
        places = torch.arange(self.window, device=view.seen.device)
        # the mass of row r lies in place r mod window, so these places belong to the newest rows
        fresh = (view.seen[:, None] - 1 - places) % self.window < view.new[:, None]
        changes = _bursts._are_set(fresh.long())
        found = {
            name: torch.where(fresh[:, place, None, None], report.mass if view.is_decode else report.sums[name], old)
            for place, (name, old) in enumerate((name, state[name]) for name in self.slots)
            if changes[place]
        }
        return state | found

    def mass(self, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the mass that each token received from all of the newest rows together."""
        return torch.stack([state[name] for name in self.slots]).sum(dim=0)


# How much the keys of a head resemble each other.

BLOCK_BYTES = 2**23
"""Size of one block of cosines."""


def redundancy(
    keys: Float[Tensor, "B Hk S D"], positions: Int[Tensor, "B Hk S"], threshold: float
) -> Float[Tensor, "B Hk S"]:
    """Return how redundant each token's key is: a softmax, over each head's tokens, of its mean cosine to the other
    keys.

    Of the keys that are alike to a key (with a cosine above ``threshold`` to it), the newest counts as unlike it, with
    a cosine of 0. A token whose key is not finite gets NaN, and an empty slot 0.
    """
    there = positions >= 0
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    broken = ~unit.isfinite().all(dim=-1)
    unit = unit.masked_fill((broken | ~there)[..., None], 0.0)
    total = torch.zeros(positions.shape, dtype=unit.dtype, device=unit.device)
    S, places = positions.shape[-1], torch.arange(positions.shape[-1], device=positions.device)
    # a head never has the cosines of all pairs in memory
    rows = max(1, BLOCK_BYTES // (unit.element_size() * positions.numel()))
    for start in range(0, S, rows):
        cosines = unit[:, :, start : start + rows] @ unit.mT
        # a key's cosine to itself says nothing
        cosines.masked_fill_(places[start : start + rows, None] == places, 0.0)
        alike = torch.where(cosines > threshold, positions[:, :, None], -1)
        # of several tokens that are alike, the newest does not count as redundant, so one of them stays
        newest = alike.amax(dim=-1, keepdim=True)
        total += cosines.masked_fill_((alike == newest) & (newest >= 0), 0.0).sum(dim=2)
    # NaN: a token with a broken key goes first
    mean = total / there.sum(dim=-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, torch.finfo(mean.dtype).min).softmax(dim=-1).masked_fill(broken & there, torch.nan)

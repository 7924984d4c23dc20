"""Base of policies for long generations, which drop many tokens at once and leave the cache alone in between."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies.abilities import Bursts
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, State, View


@dataclass(frozen=True, kw_only=True)
class Rounds(Policy):
    """Whenever a head is over budget, as many tokens go as `buffer` says."""

    buffer: int = option(128, "tokens that go at once; at most half of the budget", within=(1, math.inf))

    def stays(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """The budget where it holds all tokens; otherwise less by the buffer, and at least the protected tokens."""
        sinks, recent = self.protected(view.budget)
        held = (view.positions >= 0).sum(dim=-1)
        budget, gone, shielded = (
            torch.as_tensor(number, device=held.device)
            for number in (view.budget, between(1, view.budget // 2, self.buffer), sinks + recent)
        )
        return torch.where(held > budget, (budget - gone).maximum(shielded).clamp(min=1), budget)

    def quarter(self, budget: Budget, number: int) -> Budget:
        """A number of protected tokens, at most a quarter of a budget."""
        return between(0, budget // 4, number)

    bursts: ClassVar[Bursts | None] = Bursts(stays, waits=True)

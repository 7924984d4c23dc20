"""What the policies that choose once, at the end of a prompt, have in common: how they go on afterwards."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies.base import Policy, Sums, option
from kvkeep.statistic import Mass, Statistic
from kvkeep.types import Budget, Report, State, View


@dataclass(frozen=True, kw_only=True)
class PrefillOnly(Policy):
    """Rates the tokens of a prompt by the mass of its last rows; generated tokens are only rated if asked for."""

    decode: Literal["local", "score", "grow"] = option(
        "local",
        "generated tokens: a sliding window beside the chosen ones, rated by their mass, or kept until it is full",
    )
    room: int = option(0, "slots that a prompt leaves free for generated tokens under decode=grow")

    slots: ClassVar[Mapping[str, float]] = {"score": 0.0}
    sums: ClassVar[Sums | None] = Sums("score", only={"decode": "score"})

    @abc.abstractmethod
    def rows(self, view: View) -> Tensor | int:
        """How many of a prompt's last query rows are looked at."""

    @abc.abstractmethod
    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Score of a prompt's tokens from the mass of its last rows."""

    @property
    def grows(self) -> bool:
        """Generated tokens are refused once there is no room, under ``decode=grow``."""
        return self.decode == "grow"

    @property
    def spare(self) -> int:
        """The room."""
        return self.room

    def check(self, budget: int) -> None:
        """Refuse a budget without space for what is protected and the room."""
        super().check(budget)
        if self.room and not self.grows:
            raise PolicyError(f"room={self.room} is only of use with decode=grow, where slots are left free.")
        least = sum(map(int, self.protected(budget))) + self.room + 1
        if self.room and budget < least:
            raise BudgetError(f"{self} needs a budget of at least {least}; {budget} leaves nothing to choose.")

    def wants(self, view: View) -> Statistic:
        """The mass of a prompt's last rows; of a generated token's row only if it is to be rated."""
        rows = self.rows(view)
        prompt = rows if isinstance(rows, Tensor) else view.new.new_full((), rows)
        return Mass(rows=torch.where(view.reads, prompt, int(self.decode == "score")))

    def stays(self, view: View, state: State) -> Budget:
        """All of the budget, less the room at the end of a prompt."""
        if not self.room:
            return view.budget
        return torch.as_tensor(view.budget, device=view.new.device) - self.room * view.reads[:, None]

    def observe(self, state: State, view: View, report: Report) -> State:
        """Rate a prompt; add the mass of a generated token's row."""
        added = state["score"] + report.mass
        return {"score": added if view.is_decode else torch.where(_prompts(view), self.rate(view, report.mass), added)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """What `choose` says in a prompt, and `later` afterwards."""
        later = self._later(view, state)
        return later if view.is_decode else torch.where(_prompts(view), self.choose(view, state), later)

    def choose(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """How much a prompt's tokens are worth at its end: by default their rating."""
        return state["score"]

    def _later(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The rating; under ``local`` what a prompt chose stays and the rest is first in, first out."""
        if self.decode != "local":
            return state["score"]
        _, window = self.protected(view.budget)
        chosen = view.positions < (view.prompt[:, None] - window)[:, :, None]
        return view.positions.float().masked_fill(chosen, torch.finfo(torch.float32).max)


def _prompts(view: View) -> Bool[Tensor, "B 1 1"]:
    return view.reads[:, None, None]

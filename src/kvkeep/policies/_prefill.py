"""Bases of policies that choose once, at the end of a prompt, and SnapKV's rating of its tokens."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.budget import column, smaller
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.kv import ranking
from kvkeep.policies.abilities import Growth, Sums
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, Report, State, View


@dataclass(frozen=True, kw_only=True)
class PrefillOnly(Policy):
    """Rates the tokens of a prompt by the mass of its last rows, and rates generated tokens only if asked to."""

    decode: Literal["local", "score", "grow"] = option(
        "local",
        "generated tokens: slide beside the chosen ones, compete by their mass, or are kept until the budget is full",
    )
    room: int = option(0, "slots that a prompt leaves free for generated tokens under decode=grow")

    slots: ClassVar[Mapping[str, float]] = {"score": 0.0}
    sums: ClassVar[Sums | None] = Sums("score", only={"decode": "score"}, steady={"decode": "score"})

    @abc.abstractmethod
    def rows(self, view: View) -> Tensor | int:
        """How many of a prompt's last query rows count."""

    @abc.abstractmethod
    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """The rating of a prompt's tokens, from the mass of its last rows."""

    @property
    def fading(self) -> float:
        """The weight of a prompt's row relative to the next one."""
        return 1.0

    @cached_property
    def grows(self) -> Growth | None:  # type: ignore[override]  # depends on an option
        """Generated tokens are refused once there is no room, under ``decode=grow``."""
        return Growth(self.room) if self.decode == "grow" else None

    def check(self, budget: int) -> None:
        """Refuse a budget without space for the protected tokens, the room and a choice."""
        super().check(budget)
        if self.room and not self.grows:
            raise PolicyError(f"room={self.room} is only of use with decode=grow, where slots are left free.")
        least = sum(map(int, self.protected(budget))) + self.room + 1
        if self.room and budget < least:
            raise BudgetError(f"{self} needs a budget of at least {least}; {budget} leaves nothing to choose.")

    def wants(self, view: View) -> Statistic:
        """The mass of a prompt's last rows; that of a generated token's row only under ``decode=score``."""
        later = int(self.decode == "score")
        if view.is_decode:
            return Mass(rows=later)
        rows = self.rows(view)
        prompt = rows if isinstance(rows, Tensor) else view.new.new_full((), rows)
        counted = torch.where(view.reads, prompt, later)
        if self.fading == 1.0:
            return Mass(rows=counted)
        return Mass(rows=counted, decay=self.fading, last=view.seen - 1)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Rate a prompt; add the mass of a generated token's row."""
        added = state["score"] + report.mass
        return {"score": added if view.is_decode else torch.where(_prompts(view), self.rate(view, report.mass), added)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The result of `choose` in a prompt. Afterwards the rating, or an order that keeps the chosen tokens."""
        later = self._later(view, state)
        return later if view.is_decode else torch.where(_prompts(view), self.choose(view, state), later)

    def choose(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The score of a prompt's tokens at its end, by default their rating."""
        return state["score"]

    def _later(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The rating; under ``decode=local`` the chosen tokens stay and the others go first in, first out."""
        if self.decode != "local":
            return state["score"]
        return slide(view, self.protected(view.budget)[1])


@dataclass(frozen=True, kw_only=True)
class ObservationWindow(PrefillOnly):
    """Keeps the last ``window`` tokens of a prompt, whose attention, pooled along the prompt, rates the others."""

    window: int = option(32, "last tokens of a prompt, which stay and rate the others", within=(1, math.inf))
    kernel: int = option(7, "width of the pooling along the prompt, an odd number; 1 for none", odd=True)
    pool: Literal["max", "avg"] = option("max", "pool the largest mass around a token, or the average")
    decay: float = option(
        1.0, "weight of a row of the window relative to the next one; 0.7 follows the last rows", within=(0, 1)
    )

    presets: ClassVar[Mapping[str, str]] = {"late": "window=8,kernel=13"}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The observation window."""
        return 0, self.window

    def rows(self, view: View) -> int:
        """The observation window."""
        return self.window

    @property
    def fading(self) -> float:
        """The option `decay`."""
        return self.decay

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """The mass of the tokens before the window, pooled in the order of their positions.

        Where fewer tokens than the window are protected, its other tokens are rated, too.
        """
        unrated = column(smaller(self.protected(view.budget)[1], self.window), view.seen)
        older = (view.positions >= 0) & (view.positions < (view.seen - unrated)[:, None, None])
        return ranking.pooled(mass, view.positions, older, kernel=self.kernel, kind=self.pool)


def slide(view: View, recent: Budget) -> Float[Tensor, "B Hk S"]:
    """A score under which generated tokens go first in, first out, beside the tokens that a prompt's cut has chosen.

    Args:
        view: the slots.
        recent: newest tokens of the prompt, which the cut did not choose; they slide, too.
    """
    chosen = view.positions < (view.prompt[:, None] - recent)[:, :, None]
    return view.positions.float().masked_fill(chosen, torch.finfo(torch.float32).max)


def _prompts(view: View) -> Bool[Tensor, "B 1 1"]:
    return view.reads[:, None, None]

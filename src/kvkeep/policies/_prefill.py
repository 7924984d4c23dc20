"""Bases of policies that choose once, at the end of a prompt, and SnapKV's rating of its tokens."""

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Nothing, Statistic, Worst
from kvkeep.budget import column, smaller
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.kv import ranking
from kvkeep.policies._head_budgets import average
from kvkeep.policies.base import Growth, MassSums, Policy, option, smallest_budget
from kvkeep.types import EMPTY, Budget, Phase, Report, State, View

SLIDING = MassSums(steady={}, slides=True)
"""The rule of `slide`, where no state changes with generated tokens."""


def sums_of(score: str) -> Callable[[Any], MassSums | None]:
    """Return the getter of a policy's property ``sums``: from the policy's option ``decode`` it returns the rule for
    generated tokens, or ``None`` under ``grow``, where they are kept until the budget is full.

    Args:
        score: name of the state that is the score where generated tokens compete.
    """
    rules = {"local": SLIDING, "score": MassSums(score, steady={})}
    return lambda policy: rules.get(policy.decode)


@dataclass(frozen=True, kw_only=True)
class PrefillOnly(Policy):
    """Rates the tokens of a prompt by the mass of its last rows, and rates generated tokens only if asked to."""

    decode: Literal["local", "score", "grow"] = option(
        "local",
        "generated tokens: slide beside the chosen ones, compete by their mass, or are kept until the budget is full",
    )
    room: int = option(0, "slots that a prompt leaves free for generated tokens under decode=grow")

    slots: ClassVar[Mapping[str, float]] = {"score": 0.0}
    sums = property(sums_of("score"))  # depends on an option

    @abc.abstractmethod
    def rows(self, view: View) -> Tensor | int:
        """Return how many of a prompt's last query rows count."""

    @abc.abstractmethod
    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the score of a prompt's tokens, given the mass that they received from the prompt's last rows."""

    @property
    def fading(self) -> float:
        """Return the factor by which each row of a prompt counts less than the row after it: 1, so all count alike."""
        return 1.0

    @cached_property
    def grows(self) -> Growth | None:  # type: ignore[override]  # depends on an option
        """Return the rule that refuses generated tokens once there is no room, under ``decode=grow``; else ``None``."""
        return Growth(self.room) if self.decode == "grow" else None

    def check(self, budget: int) -> None:
        """Refuse a budget below the number of protected tokens; with ``room``, also one that has no slot beside them
        and the room; and ``room`` without ``decode=grow``.

        Raises:
            BudgetError: the budget is too small.
            PolicyError: ``room`` is given without ``decode=grow``.
        """
        super().check(budget)
        if self.room and not self.grows:
            raise PolicyError(f"room={self.room} is only of use with decode=grow, where slots are left free.")
        if self.room and budget < self._chooses(budget):
            least = smallest_budget(self._chooses, self._chooses(budget))  # a larger budget may protect more
            remedy = f"Raise it to at least {least}, or protect fewer" if least else "Protect fewer"
            raise BudgetError(f"{self}: a budget of {budget} leaves nothing to choose. {remedy}.")

    def _chooses(self, budget: int) -> int:
        """Return how many slots are protected or left free under a budget, and one more."""
        return sum(map(int, self.protected(budget))) + self.room + 1

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: mass of a prompt's last rows; of a generated token only if ``decode=score``."""
        competes = self.decode == "score"
        if view.is_decode:
            return Mass() if competes else Nothing()
        rows = self.rows(view)
        prompt = rows if isinstance(rows, Tensor) else view.new.new_full((), rows)
        # 1: the last row of a probe counts as a generated token's row would
        counted = torch.where(view.reads, prompt, int(competes))
        if self.fading == 1.0:
            return Mass(rows=counted)
        return Mass(rows=counted, decay=self.fading, last=view.seen - 1)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the rating of a prompt's tokens, or the mass of a generated token's row added to it."""
        if view.is_decode and self.decode != "score":
            return state
        added = state["score"] + report.mass
        return {"score": added if view.is_decode else torch.where(_prompts(view), self.rate(view, report.mass), added)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the outcome of `choose` at the end of a prompt. In decode, return the rating, or an order by age
        under ``decode=local``.
        """
        later = self._later(view, state)
        return later if view.is_decode else torch.where(_prompts(view), self.choose(view, state), later)

    def choose(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the score of a prompt's tokens at its end, by default their rating."""
        return state["score"]

    def _later(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the score in decode: the rating, or under ``decode=local`` the order of `slide`."""
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
        """Return how many first and newest tokens are never evicted: 0, and the observation window."""
        return 0, self.window

    def rows(self, view: View) -> int:
        """Return how many of a prompt's last rows count: those of the observation window."""
        return self.window

    @property
    def end_rows(self) -> int:  # type: ignore[override]  # depends on an option
        """Return how many of a prompt's last rows rate its tokens: the option ``window``."""
        return self.window

    @property
    def fading(self) -> float:
        """Return the factor by which each row of a prompt counts less than the row after it, the option ``decay``."""
        return self.decay

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the mass of the tokens before the window, pooled over neighbouring positions, and 0 for the others.

        Where fewer tokens than the window are protected, its other tokens are rated, too.
        """
        unrated = column(smaller(self.protected(view.budget)[1], self.window), view.seen)
        older = (view.positions >= 0) & (view.positions < (view.seen - unrated)[:, None, None])
        return ranking.pooled(mass, view.positions, older, kernel=self.kernel, kind=self.pool)


def slide(view: View, recent: Budget) -> Float[Tensor, "B Hk S"]:
    """Return a score under which the tokens chosen at the end of the prompt stay, and the others, mostly generated
    ones, go oldest first.

    Args:
        view: the slots.
        recent: newest tokens of the prompt, which the cut did not choose; they slide, too.
    """
    return ranking.chosen_last(view.positions.float(), view.positions, view.prompt[:, None] - recent)


def _prompts(view: View) -> Bool[Tensor, "B 1 1"]:
    """Return which rows read a prompt in this step (`View.reads`), with axes for heads and slots."""
    return view.reads[:, None, None]


# The part of a layer's output that one vector of its heads contributes.


def lengths(view: View, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
    """Return the Euclidean norm of what the query heads of a group would add to the layer's output if each of them put
    out ``x``; that of ``x`` if the output projection cannot be read.
    """
    if view.output is not None:
        return view.output.lengths(x)
    norms: Tensor = x.float().norm(dim=-1)
    return norms


def sizes(view: View, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
    """Return the L1 norm of what a query head would add to the layer's output if it put out ``x``, as a mean over the
    group; that of ``x`` if the output projection cannot be read.
    """
    return x.float().abs().sum(dim=-1) if view.output is None else view.output.sizes(x)


# Base of policies that go by the worst case of a prompt's last rows, and by what a token adds to the output.


@dataclass(frozen=True, kw_only=True)
class WorstCase(PrefillOnly):
    """The worst case over the window's rows, at least the mean, times the token's share of all heads' sizes."""

    window: int = option(32, "last tokens of a prompt, which stay and rate the others", within=(1, math.inf))
    kernel: int = option(5, "width of the average along the prompt, an odd number; 1 for none", odd=True)
    first: float = option(0.9, "share of the mean attention that chooses tokens before sizes count", within=(0, 1))

    slots: ClassVar[Mapping[str, float]] = {"score": 0.0, "size": 0.0}
    projects: ClassVar[bool] = True
    rated_from: ClassVar[int | None] = None  # the first stage of `rate` fills a part of the budget

    @property
    def sums(self) -> MassSums | None:  # type: ignore[override]  # depends on an option
        """Return the rule under ``decode=local``; ``None`` where mass is added to one of the two states only."""
        return SLIDING if self.decode == "local" else None

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and the window."""
        return 0, self.window

    def rows(self, view: View) -> int:
        """Return how many of a prompt's last rows count: those of the window."""
        return self.window

    @property
    def end_rows(self) -> int:  # type: ignore[override]  # depends on an option
        """Return how many of a prompt's last rows rate its tokens: the option ``window``."""
        return self.window

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the worst case of a prompt's last rows, or a generated token's mass."""
        if view.is_decode:
            return super().wants(view)
        return Worst(rows=self.window * view.reads.long(), before=view.seen - self.window, kernel=self.kernel)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the rating of a prompt's tokens and their sizes, or a generated token's mass added.

        Probes change nothing.
        """
        if view.phase is not Phase.PREFILL:
            return state if view.phase is Phase.PROBE else state | super().observe(state, view, report)
        size, reads = self._sizes(state, view), view.reads[:, None, None]
        found = self.rate(view, report.mass)
        worst = report.sums["worst"]
        older = self._older(view)
        number = older.sum(dim=-1, keepdim=True).clamp(min=1)  # 1: of no token there is no mean
        worst = worst.maximum(worst.sum(dim=-1, keepdim=True) / number) * size
        # 1 puts chosen tokens above all others, whose mass times their share of sizes is at most 1
        rating = torch.where(found > 0, 1.0 + found, worst).masked_fill(~older, 0.0)
        return {"score": torch.where(reads, rating, state["score"]), "size": size}

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the mean attention of the tokens that the first stage of the choice takes, and 0 for the others.

        It takes the tokens before the window that have most of it, as long as these and the window together have less
        than the share ``first`` of all attention, and at most as many as have slots beside the window and ``room``.
        """
        number = view.new.clamp(min=1, max=self.window)[:, None, None]  # rows that were counted
        mean, older = mass / number, self._older(view)
        # - 1, below every mass: the window's tokens come last
        order = ranking.ranks(mean.masked_fill(~older, -1.0), view.positions).argsort(dim=-1, descending=True)
        so_far = mean.masked_fill(~older, 0.0).gather(-1, order).cumsum(dim=-1)
        # the rest of the attention is the window's own, whose tokens stay: it counts towards `first`
        own = (1.0 - so_far[..., -1:]).clamp(min=0.0)
        early = torch.zeros_like(older).scatter_(-1, order, so_far + own < self.first) & older
        room = (average(view) - self.window - self.room).clamp(min=0)
        chosen = ranking.keep(mean, view.positions.masked_fill(~early, EMPTY), room)
        return mean.masked_fill(~chosen, 0.0)

    def _sizes(self, state: State, view: View) -> Float[Tensor, "B Hk S"]:
        """Return each token's share in the sum, over all heads, of the sizes of what it adds to the output.

        The shares of this step's tokens are measured, those of earlier ones taken from the state; a generated token was
        never measured, and has the share of a mean head.
        """
        first = (view.seen - view.new)[:, None, None]
        found = sizes(view, view.values.masked_fill((view.positions < 0)[..., None], 0.0))
        everything = view.heads.all_slots(found, 0.0)
        # other processes may hold more slots, of which those in front have no counterpart here
        total = everything.sum(dim=1, keepdim=True)[..., -found.shape[-1] :]
        shares = found / total.clamp(min=torch.finfo(found.dtype).tiny)
        # the size of a generated token was never measured: it gets the share that a mean head has
        old = state["size"].masked_fill(state["size"] == 0.0, 1.0 / everything.shape[1])
        return torch.where(view.positions >= first, shares.to(old.dtype), old)

    def _older(self, view: View) -> Bool[Tensor, "B Hk S"]:
        """Return a mask of the slots whose token comes before the window."""
        return (view.positions >= 0) & (view.positions < (view.seen - self.window)[:, None, None])

"""The contract of an eviction policy."""

from __future__ import annotations

import abc
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.statistic import Nothing, Statistic
from kvkeep.types import Budget, Report, State, Top, View

_T = TypeVar("_T")


def option(default: _T, text: str, *, within: tuple[int | float, int | float] = (0, math.inf), odd: bool = False) -> _T:
    """Declare an option of a policy: a dataclass field with a default, a line of help and the range of a number."""
    value: _T = dataclasses.field(default=default, metadata={"help": text, "within": within, "odd": odd})
    return value


@dataclasses.dataclass(frozen=True)
class Sums:
    """What `observe` and `score` come to for a generated token, of a policy whose state consists of sums of mass.

    Each of them is ``decay·state + mass``, with the decay of the statistic, and starts at 0.

    Attributes:
        score: the one of the sums that is the score; ``None``: the position is.
        only: options under which this is so, with their values.
    """

    score: str | None = None
    only: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """A score per slot. Concrete policies are frozen, keyword-only dataclasses of options, and final.

    The cache calls, in this order and once per step: attention with what the policy `wants`, `observe`, `score`,
    `stays`; then it shields what `protected` names and evicts the lowest scores until so many slots are left.

    Class attributes:
        statistic: what attention must report, if that is the same in every step.
        slots: the policy's per-slot state, name → value that a new token starts with. Float32; moved by the cache.
        evicts: ``False`` for a policy that refuses tokens over budget instead of dropping any.
        bursts: whether it may drop several tokens in one decode step; the others drop at most one.
        spreads: whether heads get budgets of their own at the end of a prompt, see `heads`.
        cascades: whether layers share what they saw, and a token dropped by one is dropped by all later ones.
        sums: what a generated token does, where that is so simple that a GPU's kernel can do it while it attends; then
            what the policy `wants` must not depend on the slots of the view. ``None``: `observe` and `score` are asked.
        stochastic: whether scores depend on random numbers that are keyed by the head.
        position_mode: positions that attention sees unless the user says otherwise, ``true`` or ``slot``.
        bibtex: the paper, for ``kvkeep policies show``.
    """

    statistic: ClassVar[Statistic] = Nothing()
    slots: ClassVar[Mapping[str, float]] = {}
    evicts: ClassVar[bool] = True
    bursts: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    cascades: ClassVar[bool] = False
    sums: ClassVar[Sums | None] = None
    stochastic: ClassVar[bool] = False
    position_mode: ClassVar[str] = "true"
    bibtex: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if not _is_a(value, kind):
                raise PolicyError(f"{type(self).__name__}: {field.name}={value!r} is not {kind_name(kind)}.")
            low, high = field.metadata.get("within", (0, math.inf))
            if isinstance(value, int | float) and not low <= value <= high:
                wanted = f"use {low} or more" if high == math.inf else f"use {low} to {high}"
                raise PolicyError(f"{type(self).__name__}: {field.name}={value} is out of range; {wanted}.")
            if field.metadata.get("odd") and isinstance(value, int) and value % 2 == 0:
                raise PolicyError(f"{type(self).__name__}: {field.name}={value} has no middle; use an odd number.")

    def __str__(self) -> str:
        module = type(self).__module__
        name = module.rpartition(".")[2] if module.startswith(f"{__package__}.") else type(self).__name__
        return f"{name}:{self.changed}" if self.changed else name

    @property
    def changed(self) -> str:
        """The options that are not at their default, as a user writes them: ``recent=32,sinks=4``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return ",".join(f"{name}={_show(value)}" for name, value in values.items() if value != defaults[name])

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """How many first and how many newest tokens are never evicted: ``(sinks, recent)``."""
        return 0, 0

    def check(self, budget: int) -> None:
        """Refuse a budget that is smaller than what the policy protects.

        Raises:
            BudgetError: it is; with the smallest budget that would do.
        """
        sinks, recent = self.protected(budget)
        if sinks + recent > budget:
            raise BudgetError(
                f"{self} protects {sinks} first and {recent} recent tokens, more than the budget of {budget}. Raise "
                f"the budget to at least {sinks + recent}, or protect fewer."
            )

    @property
    def layer_budget(self) -> str:
        """How a budget is spread over the layers unless the user says otherwise; see `kvkeep.budget.per_layer`."""
        return "uniform"

    @property
    def least(self) -> int:
        """Slots that a layer needs, whatever its share of the budget."""
        return max(1, sum(map(int, self.protected(0))) + self.spare)

    def most(self, budget: int, heads: int) -> int:
        """The largest budget that one of a layer's heads can get; more than the budget only where it `spreads`."""
        return budget

    @property
    def spare(self) -> int:
        """Slots that a prompt leaves free."""
        return 0

    @property
    def fills(self) -> bool:
        """Whether the budget is always used to the last slot, once so many tokens were seen."""
        return not self.bursts and not self.grows and not self.spreads

    @property
    def grows(self) -> bool:
        """Whether it evicts in prefill only: then a generated token is refused once the budget is full."""
        return False

    @property
    def shares_heads(self) -> bool:
        """Whether the KV heads of a layer decide together and keep the same tokens."""
        return self.cascades

    def wants(self, view: View) -> Statistic:
        """What attention must report in this step; by default always the class's `statistic`."""
        return self.statistic

    def top(self, view: View) -> Top | None:
        """Restrict a generated token's attention to the largest probabilities; by default all are used."""
        return None

    def heads(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """The budget of each head from the end of a prompt on; a row's heads together have what they had before.

        Asked only of a policy that `spreads`, before `stays`, which then finds these budgets in its view.
        """
        raise NotImplementedError

    def stays(self, view: View, state: State) -> Budget:
        """How many slots may stay occupied after this step, at most the budget; by default all of it."""
        return view.budget

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state after this step; a pure function, by default nothing changes."""
        return state

    @abc.abstractmethod
    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Say how much each slot is worth: float32, higher = keep, only the order matters.

        Empty and protected slots may get any value; the cache overrides them.
        """


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _is_a(value: object, kind: object) -> bool:
    """Whether a value is of an option's declared type: int, float, bool, str, a choice, or one of these or None."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(_is_a(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def kind_name(kind: object) -> str:
    """An option's declared type in words."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(kind_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(typing.cast(type, kind), str(kind))

"""The contract of an eviction policy."""

from __future__ import annotations

import abc
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Nothing, Statistic
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.pins import Spans, count
from kvkeep.policies.abilities import Abilities
from kvkeep.types import Budget, Report, State, View

_T = TypeVar("_T")

_TRIES = 64
"""Steps of the search for the smallest budget that holds pins."""


def option(default: _T, text: str, *, within: tuple[int | float, int | float] = (0, math.inf), odd: bool = False) -> _T:
    """Declare an option of a policy: a dataclass field with a default, a line of help and the range of a number."""
    value: _T = dataclasses.field(default=default, metadata={"help": text, "within": within, "odd": odd})
    return value


@dataclasses.dataclass(frozen=True)
class Policy(Abilities, abc.ABC):
    """A score per slot. Concrete policies are frozen, keyword-only dataclasses of options, and final.

    In each step the layer asks for the statistic that the policy `wants`, attends, and calls `observe` and `score`. It
    then protects the tokens that `protected` names and evicts the lowest scores until the budget is met.

    Class attributes:
        statistic: what attention must report, if that is the same in every step.
        slots: the policy's per-slot state: name → value of a new token. Float32; the cache moves it with the slots.
        summaries: the policy's state of each KV head, for all tokens that the head has seen: name → axes after
            ``B Hk``, e.g. ``"D D"``, or ``""`` for one number. Float32, 0 in an empty row; moves with the row.
        presets: names for several options: name → options as a user writes them.
        bibtex: the paper, for ``kvkeep policies show``.

    `Abilities` lists further class attributes, which few policies need.
    """

    statistic: ClassVar[Statistic] = Nothing()
    slots: ClassVar[Mapping[str, float]] = {}
    summaries: ClassVar[Mapping[str, str]] = {}
    presets: ClassVar[Mapping[str, str]] = {}
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
        """The numbers of first and of newest tokens that are never evicted: ``(sinks, recent)``."""
        return 0, 0

    def check(self, budget: int) -> None:
        """Refuse a budget that is smaller than the number of protected tokens.

        Raises:
            BudgetError: the budget is too small. The message names the smallest one that would do.
        """
        sinks, recent = self.protected(budget)
        if sinks + recent > budget:
            raise BudgetError(
                f"{self} protects {sinks} first and {recent} recent tokens, more than the budget of {budget}. Raise "
                f"the budget to at least {sinks + recent}, or protect fewer."
            )

    def check_pins(self, budget: int, pins: Spans) -> None:
        """Refuse pins that do not fit into a budget beside the tokens that the policy protects.

        Raises:
            BudgetError: they do not. The message names the smallest budget that would do.
        """
        if not self.evicts or not pins or (needed := self._needed(budget, pins)) <= budget:
            return
        least, tries = needed, 0
        while (more := self._needed(least, pins)) > least and tries < _TRIES:
            least, tries = more, tries + 1
        remedy = f"Raise the budget to at least {least}, or pin fewer" if tries < _TRIES else "Pin fewer"
        raise BudgetError(
            f"{count(pins)} tokens are pinned, and {self} needs slots for others beside them, together {needed}: more "
            f"than the budget of {budget}. {remedy}."
        )

    def _needed(self, budget: int, pins: Spans) -> int:
        """The number of slots for pinned and protected tokens together, and for room that must stay free."""
        sinks, recent = self.protected(budget)
        return count(pins, sinks) + int(recent) + (self.grows.room if self.grows else 0)

    @property
    def least(self) -> int:
        """The smallest budget that a layer can work with."""
        room = self.grows.room if self.grows else 0
        return max(1, sum(map(int, self.protected(0))) + room)

    def wants(self, view: View) -> Statistic:
        """The statistic that attention must report in this step, by default the class's `statistic`."""
        return self.statistic

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state after this step, by default unchanged. A pure function."""
        return state

    @abc.abstractmethod
    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the worth of each slot in float32: higher = keep. Only the order matters.

        Empty and protected slots may get any value. The cache overrides it.
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

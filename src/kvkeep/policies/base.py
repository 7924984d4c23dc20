"""The contract of an eviction policy."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Nothing, Statistic
from kvkeep.budget import table
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.parameters import KEEP_PROMPT
from kvkeep.pins import Spans, count
from kvkeep.types import Budget, Phase, Report, State, Top, View

# Optional abilities of a policy, each a small object that the policy names. Most policies name none.
#
# Some objects hold a function. It is a method of the policy, and is called with the policy as its first argument.


@dataclass(frozen=True)
class Bursts:
    """Drops several tokens in one step, so that fewer slots than the budget stay occupied.

    Attributes:
        stays: method that returns how many slots stay occupied after a step, at most the budget. Pinned tokens
            (`View.pins`) are among them: whoever counts the tokens to keep counts these as well.
        waits: whether a head that is within its budget keeps all its tokens.
    """

    stays: Callable[[Any, View, State], Budget]
    waits: bool = False


@dataclass(frozen=True)
class Growth:
    """Evicts at the end of a prompt only. Generated tokens fill the budget, and further ones are refused.

    Attributes:
        room: slots that a prompt leaves free for generated tokens.
    """

    room: int = 0

    def stays(self, view: View) -> Budget:
        """Return how many slots stay occupied after a step: the budget, less the room in rows that read a prompt."""
        if not self.room or view.phase is not Phase.PREFILL:
            return view.budget
        return torch.as_tensor(view.budget, device=view.new.device) - self.room * view.reads[:, None]


@dataclass(frozen=True)
class HeadBudgets:
    """Gives each KV head a budget of its own at the end of a prompt.

    Attributes:
        heads: method that returns these budgets from the scores of the heads' tokens. The sum over a row's heads must
            stay the same, and they must be equal where no token has to go: it may not be asked then.
        most: method that returns the largest budget of a head, from the budget of a layer and its number of heads.
        ceilings: set if the heads of all layers share their budgets; otherwise those of one layer do. A method that
            returns upper limits of the budgets of some heads, from their scores and the number of all heads.
    """

    heads: Callable[[Any, View, Float[Tensor, "B Hk S"]], Int[Tensor, "B Hk"]]
    most: Callable[[Any, int, int], int]
    ceilings: Callable[[Any, View, Float[Tensor, "B Hk S"], int], Int[Tensor, "B Hk"]] | None = None


@dataclass(frozen=True)
class NearHeads:
    """KV heads that keep their first and their newest tokens, whatever the policy. A profile of heads names them.

    Attributes:
        heads: number of a layer in the model → whether each of its KV heads is such a head.
        sinks: first tokens that such a head keeps.
        slots: the budget of such a head. Under another budget it follows the policy.
    """

    heads: Mapping[int, tuple[bool, ...]]
    sinks: int
    slots: int

    def score(self, view: View, own: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the policy's score, which is ``own``. In the heads of this profile that have the budget ``slots``,
        return an order in which the first ``sinks`` tokens and the newest stay.
        """
        if not any(self.heads[view.layer]):
            return own
        near = view.heads.mine(marks(self.heads[view.layer], own.device)[None]) & (
            table(view.budget, view.seen) == self.slots
        )
        exact = torch.promote_types(own.dtype, torch.float32)  # half precision cannot tell positions apart
        order = view.positions.to(exact).masked_fill(view.positions < self.sinks, torch.finfo(exact).max)
        return torch.where(near[:, :, None], order, own)


@functools.cache
def marks(heads: tuple[bool, ...], device: torch.device) -> Bool[Tensor, " Hk"]:
    """Return which heads are limited, as a boolean tensor on a device. It is made once."""
    # the tensor is cached, and its next reader may be outside of inference mode
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)


@dataclass(frozen=True)
class Focus:
    """Lets a generated token attend to the largest probabilities only.

    Attributes:
        top: method that returns how many probabilities are used.
    """

    top: Callable[[Any, View], Top]


@dataclass(frozen=True)
class MassSums:
    """The rule of a policy that adds up attention mass, simple enough for the kernel that attends to apply it.

    For a generated token, `observe` must return ``decay * state + mass`` for each state, where the decay is that of the
    statistic, or the state itself if the statistic is `kvkeep.attention_stats.Nothing`; and `score` must return one of
    these sums or the position. Every state must start at 0, and `wants` must not depend
    on the view's slots. A kernel then does the work of `observe` and `score`, and neither is called.

    Attributes:
        score: name of the state that is the score; ``None`` if the position is.
        only: values of options under which this holds.
        steady: values of options under which `wants` looks at the view's prompt, budget and number of rows alone, so
            that all tokens that are generated after a prompt ask for the same; ``None``: it may look at more.
        slides: whether the tokens chosen at the end of a prompt have the largest finite score: those before the newest
            ones that `protected` names, counted from the prompt's end (`kvkeep.policies._prefill.slide`).
    """

    score: str | None = None
    only: Mapping[str, object] = field(default_factory=dict)
    steady: Mapping[str, object] | None = None
    slides: bool = False


@dataclass(frozen=True)
class Tally:
    """The rule of a policy that marks low rows in a ring of bits, simple enough for a kernel that attends to apply it.

    For a generated token, `wants` must return `kvkeep.attention_stats.Low`, whatever the view, and `observe` must do
    what `kvkeep.backends.Ring` says. The states must be the words of the ring, then the two sums, and must start at 0.
    The policy must have `Bursts` that wait. A kernel then does the work of `observe`, which is not called.

    Attributes:
        sizes: method that returns the window, the least number of tokens and the burst under a budget.
    """

    sizes: Callable[[Any, Budget], tuple[Budget, Budget, Budget]]


@dataclass(frozen=True)
class Defaults:
    """Arguments of a cache that the policy chooses where the user does not.

    Attributes:
        positions: positions that attention sees, ``true`` or ``slot``.
        layer_budget: how a budget is spread over the layers, see `kvkeep.budget.per_layer`.
    """

    positions: str = "true"
    layer_budget: str = "uniform"


class Abilities:
    """The optional abilities of a policy, all of them absent.

    Attributes:
        evicts: whether it ever evicts. If not, tokens over budget are refused.
        bursts: set if it may drop several tokens in one decode step. Other policies drop at most one.
        grows: set if it evicts in prefill only.
        spreads: set if KV heads get budgets of their own.
        near: set if some KV heads keep their first and newest tokens only, under a profile of heads.
        focuses: set if generated tokens attend to a part of the slots.
        cascades: whether it prunes through the layers: each layer hands the state of its tokens on to the next one, see
            `kvkeep.types.Earlier`. After the last layer it is the first layer's, for the next step.
        sums: set if the rule for generated tokens can run within an attention kernel.
        tally: set if the part of the rule that does not drop tokens can run within an attention kernel.
        unrotates: whether it looks at keys (`View.unrotated`) or queries before their rotation.
        asks: whether it looks at a prompt's queries, `View.queries`.
        projects: whether it looks at the projection of the heads' outputs while a prompt is read, `View.output`.
        rereads: whether the report of a prompt has the field ``again``, see `kvkeep.backends.Backend.reread`.
        rated_from: the smallest budget from which on all budgets rate a prompt's tokens alike, so that they can be
            compared; ``None`` if none do.
        end_rows: set if tokens of a prompt are rated by keys, values and the attention of so many of its last rows, or
            hardly by more: then a prompt whose beginning was read before can be read on from there.
        stochastic: whether scores depend on random numbers that are keyed by the head.
        defaults: arguments of a cache that depend on the policy.
    """

    evicts: ClassVar[bool] = True
    bursts: ClassVar[Bursts | None] = None
    grows: ClassVar[Growth | None] = None
    spreads: ClassVar[HeadBudgets | None] = None
    near: ClassVar[NearHeads | None] = None
    focuses: ClassVar[Focus | None] = None
    cascades: ClassVar[bool] = False
    sums: ClassVar[MassSums | None] = None
    tally: ClassVar[Tally | None] = None
    asks: ClassVar[bool] = False
    projects: ClassVar[bool] = False
    rereads: ClassVar[bool] = False
    rated_from: ClassVar[int | None] = 0
    end_rows: ClassVar[int | None] = None
    stochastic: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults()

    @property
    def unrotates(self) -> bool:
        """Return whether the policy looks at keys or queries before their rotation, which not every model lets undo."""
        return False

    @property
    def needs_rotary(self) -> bool:
        """Return whether the policy is useless for a model whose keys are not rotated to their positions: by default if
        it `rereads`.
        """
        return self.rereads

    @property
    def shares_layers(self) -> bool:
        """Return whether the KV heads of all layers share one budget."""
        return self.spreads is not None and self.spreads.ceilings is not None

    @property
    def shares_heads(self) -> bool:
        """Return whether the KV heads of a layer decide together and keep the same tokens.

        By default they do if the policy `cascades`.
        """
        return self.cascades


_T = TypeVar("_T")

_TRIES = 64
"""Steps of the search for the smallest budget that is enough: where each larger budget protects more, none is."""


def smallest_budget(needed: Callable[[int], int], least: int) -> int | None:
    """Return the smallest budget that is enough; ``None`` if there seems to be none.

    Args:
        needed: returns how many slots are needed under a budget; under a larger budget that may be more.
        least: how many are needed at least.
    """
    for _ in range(_TRIES):
        if (more := needed(least)) <= least:
            return least
        least = more
    return None


def option(
    default: _T,
    text: str,
    *,
    within: tuple[int | float, int | float] = (0, math.inf),
    odd: bool = False,
    file: bool = False,
) -> _T:
    """Declare an option of a policy: a dataclass field with a default, a line of help and the range of a number.

    Args:
        default: the default.
        text: the line of help.
        within: the smallest and the largest number.
        odd: whether the number must be odd.
        file: whether the option names a file, which clients of a server must not do.
    """
    # a field to dataclasses; to type checkers a value of the default's type, as `dataclasses.field` is declared
    value: _T = dataclasses.field(default=default, metadata={"help": text, "within": within, "odd": odd, "file": file})
    return value


def share_kept(value: bool | int | float | None) -> float | None:
    """Return the share of a budget that a prompt may keep: 1.0 for ``True``, ``None`` for ``False`` and ``None``.

    Raises:
        PolicyError: the number is not above 0 and at most 1.
    """
    if value is None or isinstance(value, bool):
        return 1.0 if value else None
    if not 0 < value <= 1:  # NaN as well
        raise PolicyError(
            f"keep_prompt={value} is no share of the budget. Use true (the whole prompt stays), or a number above 0 "
            "and below 1, such as 0.5 (the prompt is cut to half of the budget first)."
        )
    return float(value)


def own_options(cls: type[Policy]) -> list[dataclasses.Field[Any]]:
    """Return the options that a policy's class declares, without those that every policy carries for the cache."""
    carried = {field.name for field in dataclasses.fields(Policy)}
    return [field for field in dataclasses.fields(cls) if field.name not in carried]


@functools.cache
def kinds_of(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a policy's options by name. Resolving annotations takes a millisecond, so they are kept."""
    return types.MappingProxyType(typing.get_type_hints(cls))


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

    Attributes:
        keep_prompt: the share of the budget up to which a prompt stays while its answer is generated: 1 for all of it,
            ``None`` for none. The cache sees to it, and no policy has to know.

    `Abilities` lists further class attributes, which few policies need.
    """

    statistic: ClassVar[Statistic] = Nothing()
    slots: ClassVar[Mapping[str, float]] = {}
    summaries: ClassVar[Mapping[str, str]] = {}
    presets: ClassVar[Mapping[str, str]] = {}
    bibtex: ClassVar[str] = ""

    keep_prompt: float | None = dataclasses.field(
        default=None, kw_only=True, metadata={"help": KEEP_PROMPT.help, "within": (0, 1)}
    )
    """An option of the cache, which a policy only carries; see `kvkeep.policies._keep_prompt`."""

    def __post_init__(self) -> None:
        """Check the type and the range of each option.

        Raises:
            PolicyError: a value has another type, is out of range, or is a text that `kvkeep.spec` could not write.
        """
        kinds = kinds_of(type(self))
        for entry in dataclasses.fields(self):
            value, kind = getattr(self, entry.name), kinds[entry.name]
            if not _is_a(value, kind):
                raise PolicyError(f"{type(self).__name__}: {entry.name}={value!r} is not {kind_name(kind)}.")
            low, high = entry.metadata.get("within", (0, math.inf))
            if entry.name == "keep_prompt":
                share_kept(value)  # refuses 0, too, which is within the field's range
            if isinstance(value, int | float) and not low <= value <= high:  # NaN as well
                wanted = f"use {low} or more" if high == math.inf else f"use {low} to {high}"
                raise PolicyError(f"{type(self).__name__}: {entry.name}={value} is out of range; {wanted}.")
            if isinstance(value, str) and value != entry.default and not _is_writable(value, kind):
                raise PolicyError(
                    f"{type(self).__name__}: {entry.name}={value!r:.200} cannot be written into the policy's string, "
                    "by which files name it: there a text is not empty, has no comma, does not begin or end with a "
                    "blank, and none stands for no text. Choose another; a file can be renamed, or moved elsewhere."
                )
            if entry.metadata.get("odd") and isinstance(value, int) and value % 2 == 0:
                raise PolicyError(f"{type(self).__name__}: {entry.name}={value} has no middle; use an odd number.")

    def __str__(self) -> str:
        """Return the policy's name and, behind a colon, its options as `named` has them, for messages."""
        # the class's name for a policy of another package, which need not be registered
        module = type(self).__module__
        name = module.rpartition(".")[2] if module.startswith(f"{__package__}.") else type(self).__name__
        return f"{name}:{self.named}" if self.named else name

    @property
    def named(self) -> str:
        """Return the policy's options as people read them: the preset that stands for them, ``late,keep_prompt=0.5``,
        or else those that differ from their defaults, ``recent=32,sinks=4``.
        """
        kept = [] if self.keep_prompt is None else [f"keep_prompt={_show(self.keep_prompt)}"]
        # sets: a preset may have its options in another order than the fields
        options = set(self.changed.split(",")) - set(kept)
        preset = next((name for name, text in self.presets.items() if set(text.split(",")) == options), None)
        return self.changed if preset is None else ",".join([preset, *kept])

    @property
    def changed(self) -> str:
        """Return the options that are not at their default, as a user writes them: ``recent=32,sinks=4``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return ",".join(f"{name}={_show(value)}" for name, value in values.items() if value != defaults[name])

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and how many newest tokens are never evicted: ``(sinks, recent)``."""
        return 0, 0

    def check(self, budget: int) -> None:
        """Refuse a budget that is smaller than the number of protected tokens.

        Raises:
            BudgetError: the budget is too small. The message names the smallest budget that would do, if there is one.
        """
        sinks, recent = self.protected(budget)
        if sinks + recent <= budget:
            return
        least = smallest_budget(lambda larger: sum(map(int, self.protected(larger))), sinks + int(recent))
        remedy = f"Raise the budget to at least {least}, or protect fewer" if least else "Protect fewer"
        raise BudgetError(
            f"{self} protects {sinks} first and {recent} recent tokens, more than the budget of {budget}. {remedy}."
        )

    def check_pins(self, budget: int, pins: Spans) -> None:
        """Refuse pins that do not fit into a budget beside the tokens that the policy protects.

        A policy that does not evict has no such limit.

        Raises:
            BudgetError: the pins do not fit. The message names the smallest budget that would do, if there is one.
        """
        if not self.evicts or not pins or (needed := self._needed(budget, pins)) <= budget:
            return
        least = smallest_budget(lambda larger: self._needed(larger, pins), needed)
        remedy = f"Raise the budget to at least {least}, or pin fewer" if least else "Pin fewer"
        raise BudgetError(
            f"{count(pins)} tokens are pinned, and {self} needs slots for others beside them, together {needed}: more "
            f"than the budget of {budget}. {remedy}."
        )

    def _needed(self, budget: int, pins: Spans) -> int:
        """Return how many slots of a head the pinned tokens, the protected ones beside them, and the room that must
        stay free need together.
        """
        sinks, recent = self.protected(budget)
        return count(pins, sinks) + int(recent) + (self.grows.room if self.grows else 0)

    @property
    def least(self) -> int:
        """Return the smallest budget that a layer can work with: 1, or as many slots as are protected or left free
        whatever the budget.
        """
        room = self.grows.room if self.grows else 0
        # 0: what is protected as a share of the budget is then left out
        return max(1, sum(map(int, self.protected(0))) + room)

    def needed(self, budget: int, pins: Spans) -> int:
        """Return how many slots a head needs under a budget: for the pinned tokens, for those that the policy protects
        beside them, and for a new one.
        """
        return max(self._needed(budget, pins), count(pins) + 1)

    def wants(self, view: View) -> Statistic:
        """Return the statistic that attention must report in this step, by default the class's `statistic`."""
        return self.statistic

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state after this step, by default unchanged. A pure function."""
        return state

    @abc.abstractmethod
    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the worth of each slot in float32: higher = keep. Only the order matters.

        The scores of empty and protected slots are ignored.
        """


def _show(value: object) -> str:
    """Return an option's value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _is_writable(text: str, kind: object) -> bool:
    """Return whether `kvkeep.policies.registry.parse` reads the text of an option of this kind as it is written."""
    means_none = text.lower() == "none" and _is_a(None, kind)
    return bool(text) and text == text.strip() and "," not in text and not means_none


def _is_a(value: object, kind: object) -> bool:
    """Return whether a value has an option's declared type. A whole number is a number as well; True is neither."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(_is_a(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind  # not `isinstance`: True is no whole number


def kind_name(kind: object) -> str:
    """Return an option's declared type in words, such as ``a whole number or none``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(kind_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(typing.cast(type, kind), str(kind))

"""The trial of smaller budgets at the end of a prompt, and the reduction of a row to the one that was chosen.

A prompt that is read in one piece is attended to in full before anything is evicted. So the cuts of smaller budgets are
known from the same scores, without a second run of the model. The row is cut to the largest budget in every layer; when
the model has run, the loss is the mean over all layers, and the row is reduced to the tokens of the budget that is
chosen. It is then what it would have been under that budget from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.budget import Number, largest, smallest
from kvkeep.cache.eviction import head_budgets, kept, scored, shielded
from kvkeep.cache.layer_layout import Layout
from kvkeep.cache.shared_budget import positions_of, shared_budgets
from kvkeep.engine.kv_manager import KVManager, Segment
from kvkeep.engine.scheduler import InputBatch
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BudgetError, InputError, PolicyError, one_line
from kvkeep.kv import lost_mass, ranking
from kvkeep.kv.block import Block
from kvkeep.kv.joint_block import give
from kvkeep.kv.slot_codec import Tokens
from kvkeep.kv.store import inference
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.types import EMPTY, Phase, Report, State, View

# The choice of a budget at the end of a prompt: the smallest one at which the prompt's cut loses little attention.
#
# Which budgets there are, and for which policies; `kvkeep.engine.budget_guard` tries them.

SHARES = (4, 2)
"""Divisors of a budget that give the smaller ones."""


def refusal(policy: Policy, levels: GenericSequence[int]) -> str | None:
    """Return the reason why a request under this policy cannot choose its budget at the end of its prompt; ``None`` if
    it can.

    Args:
        policy: the policy.
        levels: the budgets to choose from, in tokens.
    """
    if not policy.evicts:
        return "it keeps every token"
    if policy.keep_prompt is not None:
        return "it keeps prompts, whole or a share of the budget"
    if policy.bursts or policy.grows or policy.cascades:
        return "its cuts are no plain choice of the best tokens of each head"
    if policy.rated_from is None:
        return "how it rates tokens depends on the budget"
    try:
        # the prompt is longer than every budget, as in the case that matters; the factor itself has no meaning
        asked = [policy.wants(_end_of_prompt(10 * max(levels), level)) for level in levels]
    except Exception as error:  # a policy of other code
        return f"what it asks of attention cannot be told beforehand ({one_line(error)})"
    if "mass" not in asked[0].fields:
        return "its statistic shows no attention mass"
    if not torch.as_tensor(asked[0].rows).any():
        return "it asks for no row of a prompt, so what a cut loses is not known"
    if not all(_same(asked[0], statistic) for statistic in asked[1:]):
        return "what it asks of attention depends on the budget"
    return None


def _end_of_prompt(tokens: int, budget: int) -> View:
    """Return a view like the one that a policy gets at the end of a prompt of this length. Its keys and values are
    placeholders.
    """
    seen, nothing = torch.tensor([tokens]), torch.zeros(1, 1, 1, 1)
    return View(
        positions=torch.zeros(1, 1, 1, dtype=torch.int32),
        keys=nothing,
        values=nothing,
        seen=seen,
        budget=budget,
        new=seen,
        prompt=seen,
        phase=Phase.PREFILL,
        layer=0,
        sequences=torch.zeros(1, dtype=torch.int64),
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two statistics, or two fields of statistics, are equal. Tensors are compared by value."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def levels(layout: Layout, budget: int, pins: Spans) -> tuple[int, ...]:
    """Return the budgets among which a request with a guard chooses, in ascending order: a quarter, half and all of
    ``budget``. Of the first two, those too small for the protected and pinned tokens are left out, and those under
    which a layer rates tokens otherwise than under ``budget``.

    Raises:
        InputError: the policy's cuts cannot be tried, see `refusal`, or heads have budgets from a profile.
    """
    found = []
    for share in SHARES:
        number = max(1, budget // share)
        with suppress(BudgetError):  # a share that has no room for what is pinned or protected is no level
            layout.check_pins(number, pins)
            if _comparable(layout, number, budget):
                found.append(number)
    # two shares of a small budget may be the same number
    found = sorted({*found, budget})
    if layout.profile:  # it divides one budget among heads; what a cut loses is compared for equal ones
        raise InputError(
            "`guard` chooses one budget for all heads, and here a profile gives each head its own. Leave `guard` or "
            "`head_budget` out."
        )
    if reason := refusal(layout.policy, found):
        raise InputError(
            f"`guard` chooses a budget by the attention that a prompt's cut loses, which fails under {layout.policy}: "
            f"{reason}. Leave `guard` out, or give another policy, such as h2o or snapkv."
        )
    return tuple(found)


def _comparable(layout: Layout, number: int, budget: int) -> bool:
    """Return whether each layer rates tokens alike under two budgets. Of a policy under which it never does, return
    ``True``: `refusal` says so.
    """
    least = layout.policy.rated_from or 0
    pairs = zip(layout.slots(number), layout.slots(budget), strict=True)
    return all(smaller == larger or smallest(smaller) >= least for smaller, larger in pairs)


def chosen(layout: Layout, budget: int, held: GenericSequence[Number]) -> int:
    """Return the budget that a request with a guard once chose (all, a quarter or half of ``budget``), as the budgets
    of the layers in its saved memory tell. Return ``budget`` if they are those of none.

    Args:
        layout: the memory's policy, and how budgets are spread over the layers.
        budget: the budget that it was asked for.
        held: the budgets of its layers.
    """
    for number in (budget, *(max(1, budget // share) for share in SHARES)):
        with suppress(BudgetError):  # a share that the policy refuses was not given
            if _totals(layout, held) == _totals(layout, layout.slots(number)):
                return number
    return budget


def _totals(layout: Layout, budgets: GenericSequence[Number]) -> list[Fraction]:
    """Return the sum of the budgets of layers that share one (0 if none do), then the average over the heads of each
    other layer: what a divided budget has in common with the one that was divided.

    Args:
        layout: tells which layers share a budget.
        budgets: the budget of each layer; a tuple where heads have their own.
    """
    # fractions, since averages are compared for equality
    each = [Fraction(number) if isinstance(number, int) else Fraction(sum(number), len(number)) for number in budgets]
    shares = [own.shares_layers for own in layout.policies]
    pairs = list(zip(each, shares, strict=False))  # a memory of another model has other layers
    joint = sum((number for number, joint in pairs if joint), Fraction())
    return [joint, *(number for number, joint in pairs if not joint)]


_LATER = torch.iinfo(torch.int32).max  # sorts behind every position; as a budget it cuts nothing


@dataclass(frozen=True, eq=False)
class Cut:
    """The cut of a smaller budget in one layer, for some rows.

    Attributes:
        positions: the tokens that would stay, in order, then `EMPTY`.
        gone: mass of the other tokens in each head.
        budget: of each head, where heads share one; ``None``: the row's.
    """

    positions: Int[Tensor, "B Hk n"]
    gone: Float[Tensor, "B Hk"]
    budget: Int[Tensor, "B Hk"] | None

    @classmethod
    def of(cls, view: View, stays: Bool[Tensor, "B Hk S"], mass: Float[Tensor, "B Hk S"], *, divided: bool) -> Cut:
        """Return the cut of a layer's rows after which the tokens in ``stays`` remain: their positions, and the mass
        of all others in each head.

        If ``divided``, the cut stores the view's budgets of heads, and else none.
        """
        # slots without a token have a negative position, and no mass to lose
        gone = mass.masked_fill(stays | (view.positions < 0), 0.0).sum(dim=-1)
        budget = cast(Tensor, view.budget) if divided else None
        return cls(_in_order(view.positions, stays), gone, budget)

    def row(self, row: int) -> Cut:
        """Return this layer's cut for a single row alone, a view of the same tensors."""
        mine = slice(row, row + 1)
        return Cut(self.positions[mine], self.gone[mine], None if self.budget is None else self.budget[mine])


@dataclass(frozen=True, eq=False)
class Rated:
    """A layer's tokens under a smaller budget that it shares with other layers, for some rows.

    Attributes:
        layer: the layer's number among those with slots.
        policy: the policy of all of them.
        view: the tokens, without keys and values.
        score: of each token.
        mass: attention mass of each token.
    """

    layer: int
    policy: Policy
    view: View
    score: Float[Tensor, "B Hk S"]
    mass: Float[Tensor, "B Hk S"]


@Policy.register  # no subclass: its own attributes would hide those of the policy
class WatchedPolicy:
    """A policy whose step over the end of a prompt is noted; otherwise it is that policy.

    Args:
        policy: the policy.
        note: is given the view, the state before the step, the report, and the state after it.
    """

    def __init__(self, policy: Policy, note: Callable[[View, State, Report, State], None]) -> None:
        self._policy, self._note = policy, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __str__(self) -> str:
        return str(self._policy)  # Python never asks `__getattr__` for special methods

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state that the watched policy has after a step. First pass the view, the state before, the report
        and the state after to ``note``.
        """
        after = self._policy.observe(state, view, report)
        self._note(view, state, report, after)
        return after


class Trial:
    """Watches a batch of prompts in every layer, and reduces its guarded rows afterwards.

    Args:
        batch: whole prompts, of which some have a budget to choose: see `InputBatch.chooses_budgets`.
        rows: the rows of the engine.
    """

    def __init__(self, batch: InputBatch, rows: KVManager) -> None:
        self._rows = rows
        self._guarded = {
            sequence.row: sequence
            for sequence in batch.requests
            if len(sequence.levels) > 1 and sequence.row is not None  # of a single level nothing is chosen
        }
        self._cuts: dict[tuple[int, int], list[Cut]] = {}  # (layer, first row of a segment) → from small to large
        self._rated: dict[tuple[int, int], list[Rated]] = {}  # (place of the budget, first row of a segment) → layers

    def watch(self, layer: int, segment: Segment, policy: Policy) -> Policy:
        """Return a policy that behaves like the given one, and also records which tokens smaller budgets would keep.
        Without guarded rows in the segment, return the policy itself.
        """
        if not any(segment.start <= row < segment.stop for row in self._guarded):
            return policy
        return cast(Policy, WatchedPolicy(policy, partial(self._note, layer, segment, policy)))

    def _note(
        self, layer: int, segment: Segment, policy: Policy, view: View, before: State, report: Report, after: State
    ) -> None:
        """Record what each smaller budget would keep in one layer of a segment of rows; of layers that share one
        budget, the scores on which that depends. Called once per layer, when the policy has observed the prompt.

        Raises:
            PolicyError: the smaller budgets' tokens are not among those of the larger ones, or their state differs.
        """
        # heads share a smaller budget in other parts, so that its tokens need not be among those of a larger one
        last = _kept(policy, view, after)[1] if policy.spreads is None else None
        # from large to small, so that each cut is compared with the next larger one
        for place in reversed(range(len(SHARES))):
            numbers = [self._number(row, place, layer) for row in range(segment.start, segment.stop)]
            column = torch.tensor(numbers, device=view.seen.device)[:, None]
            # rows without this smaller budget keep their own
            asked = dataclasses.replace(view, budget=torch.minimum(column, torch.as_tensor(view.budget).to(column)))
            same = _same_state(policy.observe(before, asked, report), after)
            # what stays depends on the scores of all layers, so `_cut_together` cuts these; another state fails below
            if same and policy.shares_layers:
                rated = Rated(layer, policy, positions_of(asked), scored(policy, asked, after), report.mass)
                self._rated.setdefault((place, segment.start), []).append(rated)
                continue
            asked, stays = _kept(policy, asked, after)
            if not same or (last is not None and bool((stays & ~last).any())):
                raise PolicyError(
                    f"{policy} keeps tokens under a smaller budget that it evicts under a larger one, or rates them "
                    "otherwise, so no budget can be chosen for it. Leave `guard` out, or give another policy."
                )
            last = None if last is None else stays
            cut = Cut.of(asked, stays, report.mass, divided=policy.spreads is not None)
            # the loop runs from large to small budgets, the list from small to large
            self._cuts.setdefault((layer, segment.start), []).insert(0, cut)

    def _number(self, row: int, place: int, layer: int) -> int:
        """Return the budget of a row in a layer at its ``place``-th smaller budget; the largest int32 if the row has no
        such budget, so that nothing is cut.
        """
        sequence = self._guarded.get(row)
        if sequence is None or place >= len(sequence.levels) - 1:
            return _LATER
        return largest([self._rows.numbers(sequence.policy, sequence.levels[place])[layer]])

    @inference
    def settle(self) -> None:
        """Choose, for each row whose request has a guard, the smallest budget at which the prompt's cut loses no larger
        share of attention than the guard, and reduce the row to it.

        A row without such a budget, or which no longer holds all tokens of it, stays as it is.
        """
        self._cut_together()
        for row, sequence in self._guarded.items():
            found = [self._loss(row, place) for place in range(len(sequence.levels) - 1)]
            guard = cast(float, sequence.request.guard)
            fits = (place for place, lost in enumerate(found) if lost is not None and lost <= guard)
            place = next((place for place in fits if self._holds(row, place)), None)
            if place is not None:
                sequence.budget = sequence.levels[place]
                self._reduce(row, sequence)

    def _holds(self, row: int, place: int) -> bool:
        """Return whether the row, cut to its whole budget, still holds every token that its ``place``-th smaller budget
        would keep, in all layers and processes.
        """
        pairs = zip(self._rows.blocks_of(row), self._of(row, place), strict=True)
        # other cuts are among the tokens that the row was cut to, which `_note` has checked
        divided = [(block, cut) for block, (_, cut) in pairs if cut.budget is not None]
        missing = [_places(block.opened().store.positions, cut.positions)[1].any(dim=-1) for block, cut in divided]
        return not missing or not bool(self._rows.heads.all(torch.stack(missing).any(dim=0).long()).any())

    def _reduce(self, row: int, sequence: Sequence) -> None:
        """Shrink a row to the budget that its sequence has chosen: keep the tokens recorded for it, and set the row's
        budget and the attention mass that its prompt's cut has lost.
        """
        cuts = [cut for _, cut in self._of(row, sequence.levels.index(sequence.budget))]
        # read first: new budgets divide a pool anew, and its slots lose their content
        held = [Reduced.of(block, cut) for block, cut in zip(self._rows.blocks_of(row), cuts, strict=True)]
        self._rows.limit_row(row, sequence.policy, sequence.budget)
        blocks = self._rows.blocks_of(row)
        give(blocks, [cut.budget for cut in cuts])
        for block, cut, tokens in zip(blocks, cuts, held, strict=True):
            tokens.put(block)
            block.lost[..., 0] = cut.gone  # the first sum is what cuts of the prompt evicted

    def _cut_together(self) -> None:
        """Compute and record the smaller budgets' cuts of layers that share one budget. This needs the scores of all of
        them, so it runs after the last layer.
        """
        # sorted by the budget's place, since the cuts of a layer are listed from small to large
        for (_, start), layers in sorted(self._rated.items(), key=lambda item: item[0]):
            policy = layers[0].policy
            budgets = shared_budgets(policy, [(rated.view, rated.score) for rated in layers]).chunk(len(layers), dim=1)
            for rated, budget in zip(layers, budgets, strict=True):
                view = dataclasses.replace(rated.view, budget=budget)
                stays = kept(policy, view, {}, rated.score)  # no state: the scores are there already
                cut = Cut.of(view, stays, rated.mass, divided=True)
                self._cuts.setdefault((rated.layer, start), []).append(cut)

    def _of(self, row: int, place: int) -> list[tuple[int, Cut]]:
        """Return, for each layer, its number and what one row would keep at its ``place``-th smaller budget."""
        start = max(start for _, start in self._cuts if start <= row)  # of the segment that has the row
        layers = sorted(layer for layer, first in self._cuts if first == start)
        return [(layer, self._cuts[layer, start][place].row(row - start)) for layer in layers]

    def _loss(self, row: int, place: int) -> float | None:
        """Return the share of the prompt's attention mass that a row would lose at its ``place``-th smaller budget, as
        the mean over all layers; ``None`` if no mass was measured.
        """
        sums = self._rows.lost_of(row)
        for layer, cut in self._of(row, place):
            sums[layer][..., 0] = self._rows.heads.all(cut.gone)[0]  # the first sum is what cuts of the prompt evicted
        return lost_mass.mean(sums).prompt


def _kept(policy: Policy, view: View, state: State) -> tuple[View, Bool[Tensor, "B Hk S"]]:
    """Return the view, with a budget that heads share divided among them, and a mask of the tokens that stay."""
    if policy.spreads is not None:
        view = dataclasses.replace(view, budget=head_budgets(policy, view, state))
    # the whole budget, without `limit`: `refusal` leaves out the policies that keep a part of it free
    return view, ranking.keep(shielded(policy, view, state), view.positions, view.budget)


def _in_order(positions: Int[Tensor, "B Hk S"], stays: Bool[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk n"]:
    """Return the positions of the tokens that stay in ascending order, padded with `EMPTY` to the longest head."""
    most = int(stays.sum(dim=-1).max())
    # the largest int32 sorts behind every position, so that tokens which go end up in the padding
    found = positions.masked_fill(~stays, _LATER).sort(dim=-1).values[..., :most]
    return found.masked_fill(found == _LATER, EMPTY)


def _places(
    held: Int[Tensor, "1 Hk S"], positions: Int[Tensor, "1 Hk n"]
) -> tuple[Int[Tensor, "1 Hk n"], Bool[Tensor, "1 Hk n"]]:
    """Return the slot index of each wanted position, and a mask of the wanted positions that no slot holds; their index
    means nothing. Padding (negative) counts as held, and its index means nothing either.

    Args:
        held: the positions in the slots; negative: an empty slot.
        positions: the wanted ones.
    """
    ordered, order = held.masked_fill(held < 0, _LATER).sort(dim=-1)
    # torch warns of a search in another order of memory, and copies as well
    wanted = positions.masked_fill(positions < 0, _LATER).contiguous()
    # a position behind all that are held has no place
    place = torch.searchsorted(ordered, wanted).clamp(max=held.shape[-1] - 1)
    return order.gather(-1, place), (ordered.gather(-1, place) != wanted) & (positions >= 0)


def _same_state(one: State, other: State) -> bool:
    """Return whether two states of a policy have equal tensors."""
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@dataclass(frozen=True, eq=False)
class Reduced:
    """Some of the tokens of a block of one row, taken out of its slots.

    Attributes:
        positions: of the tokens, in order, then `EMPTY`.
        tokens: their keys and values.
        state: the policy's state of these tokens.
    """

    positions: Int[Tensor, "1 Hk n"]
    tokens: Tokens
    state: State

    @classmethod
    def of(cls, block: Block, cut: Cut) -> Reduced:
        """Copy the tokens of a cut out of the slots of a one-row block.

        A token that no slot holds (one with a non-finite key in quantized slots) becomes an empty slot.
        """
        opened = block.opened()
        # cuts of several rows are padded to the longest of them
        store, n = opened.store, int((cut.positions >= 0).sum(dim=-1).max())
        positions = cut.positions[..., :n]
        index, missing = _places(store.positions, positions)
        tokens = store.tokens(store.slots(), used=store.positions.shape[-1]).chosen(index)
        return cls(
            positions.masked_fill(missing, EMPTY),
            tokens,
            {name: x.gather(-1, index) for name, x in opened.of_slots().items()},
        )

    def put(self, block: Block) -> None:
        """Replace the content of a one-row block by the tokens and the state that were copied out of it."""
        opened, n = block.opened(), self.positions.shape[-1]
        order = torch.arange(n, device=self.positions.device).expand(self.positions.shape)
        opened.store.take(self.tokens, self.positions, order)
        for name, held in opened.of_slots().items():
            held[..., :n] = self.state[name]
        block.close(opened)

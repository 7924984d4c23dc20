"""Layers whose heads share one budget: each step over a prompt ends when all layers have attended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.budget import table
from kvkeep.cache.eviction import divided, kept, may_stay, scored
from kvkeep.errors import UnsupportedOperationError
from kvkeep.kv import lost_mass
from kvkeep.kv.block import Block, settle
from kvkeep.kv.joint_block import JointBlock, PartBlock, divide
from kvkeep.kv.slot_codec import Tokens, nothing
from kvkeep.policies.base import Policy
from kvkeep.types import EMPTY, Phase, Report, State, View

AT_ONCE = 2
"""Tokens go early once so many times the slots of all layers wait."""

WORTH = 0.75
"""Tokens of a layer go early if at most this share of its width is left."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A layer's step over a prompt that has attended and has not evicted.

    Attributes:
        view: slots and chunk, without keys and values.
        tokens: their keys and values.
        score: of each token.
        state: the policy's state of slots and chunk.
        report: the attention mass that tokens received, if the statistic has it.
    """

    view: View
    tokens: Tokens
    score: Float[Tensor, "B Hk S"]
    state: State
    report: Report

    def thinned(self, block: Block, stays: Bool[Tensor, "B Hk S"]) -> Waiting:
        """Return this waiting step without the tokens that cannot stay, whose mass is counted as lost in ``block``;
        the step itself, with nothing counted, if more than `WORTH` of its width would be left.
        """
        width = int(stays.sum(dim=-1).max())
        if width > WORTH * stays.shape[-1]:
            return self
        gone = ~stays & (self.view.positions >= 0)
        # `settle` will not see these tokens, so they are counted as lost now
        lost_mass.count(block.lost, self.report, torch.zeros_like(stays), phase=Phase.PREFILL, among=gone)
        # a stable sort brings the tokens that stay to the front, in their order
        index = (~stays).int().argsort(dim=-1, stable=True)[..., :width]
        there = stays.gather(-1, index)
        positions = self.view.positions.gather(-1, index).masked_fill(~there, EMPTY)
        state, sums = (
            {name: x.gather(-1, index) for name, x in held.items()} for held in (self.state, self.report.sums)
        )
        keys, values = nothing(positions)
        view = replace(self.view, positions=positions, keys=keys, values=values)
        return Waiting(view, self.tokens.chosen(index), self.score.gather(-1, index), state, Report(sums))

    def settle(self, policy: Policy, block: Block) -> None:
        """Put the best tokens into the layer's slots, whose budgets are known now, and count the mass of the others
        as lost.
        """
        opened = block.opened()
        view = replace(self.view, budget=opened.budget)
        stays = kept(policy, view, self.state, self.score)
        settle(opened, view, stays, self.state, used=0, chunk=None, tokens=self.tokens)
        block.close(opened)
        lost_mass.count(block.lost, self.report, stays, phase=Phase.PREFILL, among=view.positions >= 0)


class SharedBudget:
    """The layers of a model that share the budgets of all heads, and the slots.

    Args:
        layers: numbers of the layers in the model, in order.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = list(layers)
        self._whole: JointBlock | None = None
        self.clear()

    @classmethod
    def by_layer(cls, layers: Sequence[int]) -> dict[int, SharedBudget]:
        """Return one shared budget for several layers: a mapping from each layer's number to the same object."""
        return dict.fromkeys(layers, cls(layers))

    def clear(self) -> None:
        """Drop the steps that wait for the last layer."""
        self._waiting: list[Waiting] = []
        self._blocks: list[Block] = []

    def block(self, layer: int, keys: Tensor, values: Tensor, **given: Any) -> Block:
        """Return an empty block of one layer. The first layer's call allocates the slots of all layers.

        Args:
            layer: the layer's number in the model.
            keys: see `Block`.
            values: see `Block`.
            given: other arguments of `JointBlock`.

        Raises:
            UnsupportedOperationError: the layer is not like the first one.
        """
        number = self._layers.index(layer)
        # layer 0 comes first: its call allocates anew, and the other layers join
        if number == 0 or self._whole is None:
            self._whole = JointBlock(keys, values, layers=len(self._layers), **given)
        part = self._whole.layer(number)
        if not part.store.fits(keys, values):
            raise UnsupportedOperationError(
                f"`head_budget=global` needs layers with heads of one shape and dtype on one device, and layer {layer} "
                f"differs from layer {self._layers[0]}. Use `head_budget=uniform`, `head_budget=ada` or a profile."
            )
        return part

    def wait(self, policy: Policy, block: Block, view: View, state: State, report: Report, *, used: int) -> None:
        """Queue a layer's prefill step, which has attended, until the last layer has attended too and eviction can
        begin.

        The state of heads is written at once.

        Args:
            policy: scores the tokens, now.
            block: the layer's block.
            view: slots and chunk.
            state: the policy's state for them.
            report: what attention has reported; of it, the mass is kept.
            used: slots among the view's tokens, which come first.
        """
        own = {name: x for name, x in state.items() if name not in block.heads}
        score, mass = scored(policy, view, state), {name: x for name, x in report.sums.items() if name == "mass"}
        tokens = block.store.tokens(view, used=used).apart()  # other layers' tokens may get their slots
        block.remember({name: x for name, x in state.items() if name in block.heads})
        self._waiting.append(Waiting(positions_of(view), tokens, score, own, Report(mass)))

    def end(self, policy: Policy, block: Block) -> None:
        """End a layer's step. After the last layer's prefill step, divide the budget among all heads, and evict in
        all layers.

        For a generated token or a probe do nothing.

        Args:
            policy: the policy of all layers.
            block: the layer's block between its steps.
        """
        if len(self._blocks) == len(self._waiting):  # this layer has not called `wait`
            return  # a generated token, or a probe
        self._blocks.append(block)
        if len(self._blocks) < len(self._layers):
            self._thin(policy, block)
            return
        # forgotten before anything can fail: the next prompt must not find the steps of this one
        waiting, blocks = self._waiting, self._blocks
        self.clear()
        divide(blocks, shared_budgets(policy, [(step.view, step.score) for step in waiting]))
        for step, own_block in zip(waiting, blocks, strict=True):
            step.settle(policy, own_block)

    def _thin(self, policy: Policy, block: Block) -> None:
        """Drop tokens that cannot stay, whatever the later layers hold, once far more tokens wait than there are
        slots.

        Args:
            policy: the policy of all layers.
            block: the newest layer's, which knows the budgets of all.
        """
        assert isinstance(block, PartBlock)
        numbers = block.whole.budget
        assert isinstance(numbers, Tensor)
        if sum(step.score.numel() for step in self._waiting) <= AT_ONCE * int(numbers.sum()):
            return
        view, score = _joined([(step.view, step.score) for step in self._waiting])
        mean = numbers.sum(dim=1, keepdim=True) // numbers.shape[1]
        stays = may_stay(policy, view, score, mean, heads=numbers.shape[1]).chunk(len(self._waiting), dim=1)
        # without the tokens with which `_joined` has padded a layer
        pairs = zip(self._waiting, self._blocks, stays, strict=True)
        self._waiting = [step.thinned(block, own[..., : step.score.shape[-1]]) for step, block, own in pairs]


def positions_of(view: View) -> View:
    """Return a view with positions and counters alone: without keys, values, queries and output projection, which
    nobody needs after scoring.
    """
    keys, values = nothing(view.positions)
    return replace(view, keys=keys, values=values, queries=None, output=None)


def shared_budgets(policy: Policy, layers: Sequence[tuple[View, Float[Tensor, "B Hk _"]]]) -> Int[Tensor, "B heads"]:
    """Return the budgets of the heads of all layers, layer by layer, from each layer's tokens and scores."""
    return divided(policy, *_joined(layers))


def _joined(layers: Sequence[tuple[View, Float[Tensor, "B Hk _"]]]) -> tuple[View, Float[Tensor, "B heads S"]]:
    """Join the tokens of all layers, padded to one length, as if they were the heads of a single layer. Return them
    with their scores.
    """
    most = max(score.shape[-1] for _, score in layers)
    padded = [(view, score, most - score.shape[-1]) for view, score in layers]
    positions = torch.cat([pad(view.positions, (0, room), value=EMPTY) for view, _, room in padded], dim=1)
    score = torch.cat([pad(score, (0, room)) for _, score, room in padded], dim=1)  # empty slots need no true score
    budget = torch.cat([table(view.budget, view.seen).expand(view.positions.shape[:2]) for view, _ in layers], dim=1)
    keys, values = nothing(positions)
    return replace(layers[0][0], positions=positions, keys=keys, values=values, budget=budget), score

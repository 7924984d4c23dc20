"""Small tensors of a decode step that need not be made anew for every token."""

from __future__ import annotations

import functools
import weakref

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.attention_stats import Statistic
from kvkeep.backends import Repeat
from kvkeep.kv.block import Block
from kvkeep.policies.base import Policy
from kvkeep.types import AttentionOptions, Budget, View


class CachedStatistic:
    """The statistic that a policy wants, remembered on a CPU where the policy says that it is steady.

    A recorded graph would remember it for ever, so on a GPU the policy is asked in each step.

    Args:
        policy: the policy to ask.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._steady = _is_steady(policy)
        self._last: tuple[Tensor, Budget, list[int], Statistic] | None = None

    def by(self, view: View) -> Statistic:
        """The statistic of this step."""
        numbers = [tensor for tensor in (view.prompt, view.budget) if isinstance(tensor, Tensor)]
        if not self._steady or any(not tensor.is_cpu or tensor.is_inference() for tensor in numbers):
            return self._policy.wants(view)  # tensors of inference mode do not count the writes into them
        versions = [tensor._version for tensor in numbers]
        if self._last is not None:
            prompt, budget, before, statistic = self._last
            if prompt is view.prompt and budget is view.budget and before == versions:
                return statistic
        statistic = self._policy.wants(view)
        self._last = view.prompt, view.budget, versions, statistic
        return statistic

    def remembers(self, prompt: Tensor, budget: Budget) -> bool:
        """Whether the statistic of a step with such a view is the last one."""
        last = self._last
        if last is None or last[0] is not prompt or last[1] is not budget:
            return False
        return last[2] == [one._version for one in (prompt, budget) if isinstance(one, Tensor)]

    def __reduce__(self) -> tuple[type[CachedStatistic], tuple[Policy]]:
        """A copy remembers nothing: versions count the writes into a tensor, and those of its copy begin at 0."""
        return CachedStatistic, (self._policy,)


def _is_steady(policy: Policy) -> bool:
    """Whether all tokens that are generated after a prompt ask for the same statistic."""
    options = None if policy.sums is None else policy.sums.steady
    return options is not None and all(getattr(policy, name) == value for name, value in options.items())


def one_each(rows: int, device: torch.device) -> Int[Tensor, " B"]:
    """One new token per row. The tensor is shared and must not be written."""
    if device.type == "cpu":
        return _ones(rows)
    return torch.ones(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _ones(rows: int) -> Int[Tensor, " B"]:
    with torch.inference_mode(False):
        return torch.ones(rows, dtype=torch.int64)


# A decode step that is told nothing but the new tokens, as long as all else is what it was in the step before.


class Repeating:
    """The last decode step of a layer. It keeps no memory alive, and copies of it are ``None``: they have other blocks.

    Args:
        call: the step for other tokens.
        options: what the model's attention asked for.

    Attributes:
        call: appends, attends, observes and evicts, see `kvkeep.cache.eviction.fused`.
    """

    def __init__(self, call: Repeat, options: AttentionOptions) -> None:
        self.call, self._asked, self._held = call, _asked(options), False

    def hold(self, block: Block) -> None:
        """Note on which block, with one budget for all rows, the step has worked.

        Later calls change nothing: steps of another kind may follow on a block whose tensors have been replaced.
        """
        if self._held:
            return
        self._block, self._store, self._budget = weakref.ref(block), weakref.ref(block.store), block.budget
        self._seen = weakref.ref(block.seen)  # a kernel writes it
        self._held = True

    def is_same(self, block: Block, options: AttentionOptions) -> bool:
        """Whether a step on this block with these options may differ from the last one in its tokens alone."""
        if self._block() is not block or self._store() is not block.store or block.budget != self._budget:
            return False
        if self._seen() is not block.seen:
            return False
        return block.pins is None and _asked(options) == self._asked

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _asked(options: AttentionOptions) -> tuple[object, ...]:
    return options.scaling, options.window, options.softcap, options.sinks, options.top

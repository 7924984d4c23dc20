"""The path of a decode step: the last step again with other tokens, one fused call, or one operator after the other.

`Layer.step` and `Layer._decode` take the first one that can be taken. `DecodePaths` says what speaks against each;
`DecodePaths.path` and `DecodePaths.why` say which one the last step has taken, and why it was no faster one.
"""

from __future__ import annotations

import enum
import functools
import weakref

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.attention_stats import Nothing, Statistic
from kvkeep.backends.base import Backend, Repeat
from kvkeep.budget import column
from kvkeep.kv.block import Block
from kvkeep.policies._keep_prompt import keeps_share
from kvkeep.policies.base import Policy
from kvkeep.types import AttentionOptions, Budget, View


class DecodePath(enum.Enum):
    """A path of a decode step. A layer takes the first one that can take the step, in this order."""

    REPLAY = "replay"
    """The last fused step again for other tokens: neither the policy nor the backend is asked anything."""
    FUSED = "fused"
    """Append, attend, observe and evict in one call of the backend, which applies the policy's rule itself."""
    PLAIN = "plain"
    """One after the other, each by the policy's own methods. It takes every step."""


class DecodePaths:
    """What a layer knows of the paths of its decode steps: what speaks against each, and which one it took.

    Each ``why_not`` method returns the reason against a path, or ``None`` if it may be tried. A backend may still
    decline; then nothing has changed, and the next path is tried.

    Args:
        policy: the layer's policy.

    Attributes:
        path: the path that the last decode step has taken; ``None`` before the first one.
        why: why it was no faster one.
        statistic: what the policy wants attention to report.
        recorded: the last fused step, if the next one may be the same for other tokens.
    """

    def __init__(self, policy: Policy) -> None:
        self.statistic = CachedStatistic(policy)
        self.path: DecodePath | None = None
        self.why = ""
        self.recorded: Repeating | None = None
        self._policy, self._rests = policy, rests(policy)
        self._not_replayed = _NOT_RECORDED
        self._not_fused: str | None = "the layer has no slots yet"

    def begin(self, backend: Backend, *, window: int | None, even: bool) -> None:
        """Start working on another block: decide anew whether steps on it can be fused, and drop the recorded step.

        Args:
            backend: works on the block.
            window: sliding window of the layer.
            even: whether all heads of a row have the same budget.
        """
        self.forget(_NOT_RECORDED)
        self._not_fused = why_not_fused(self._policy, backend, window=window, even=even)

    def forget(self, why: str) -> None:
        """Drop the recorded step, and keep the reason, which `took` will report for steps on the fused path."""
        self.recorded, self._not_replayed = None, why

    def took(self, path: DecodePath, why: str | None = None) -> None:
        """Set `path` after a step, and `why` it was no faster one: by default the reason for which there was no
        replay; after a replay nothing.

        Do nothing while a compiler traces.
        """
        if not torch.compiler.is_compiling():  # a trace would be made anew whenever the reason changes
            self.path = path
            self.why = "" if path is DecodePath.REPLAY else self._not_replayed if why is None else why

    def why_not_replayed(self, block: Block, options: AttentionOptions) -> str | None:
        """Return the reason why the recorded step cannot be replayed on a block; ``None`` if it may be tried."""
        recorded = self.recorded
        if recorded is None:
            return _NOT_RECORDED
        if torch.is_grad_enabled():
            return "autograd wants to see every operator"
        if torch.compiler.is_compiling():
            return "a compiler's trace has no addresses"
        if not self.statistic.remembers(block.prompt, block.budget):
            return "the policy wants another statistic"
        return None if recorded.is_same(block, options) else "the block or the model's options have changed"

    def why_not_fused(self, block: Block) -> str | None:
        """Return the reason why a step on a block cannot be fused; ``None`` if it may be tried."""
        if self._rests:  # a kernel evicts nothing, and so protects nothing
            return self._not_fused
        if not _knows_pins(block) or (keeps_share(self._policy) and not block.lead):
            return "a row has pins, of which a kernel knows nothing"
        return self._not_fused

    def may_record(self, block: Block) -> bool:
        """Return whether this step may be recorded: whether the next one can be the same with other tokens."""
        if not self._rests and (self._policy.grows or self._policy.bursts or not _knows_pins(block)):
            return False  # the number of slots that stay may differ next time
        return not torch.compiler.is_compiling() and self.statistic.remembers(block.prompt, block.budget)


def until_burst(policy: Policy, block: Block) -> Int[Tensor, " B"] | None:
    """Return how many tokens each row will have seen when its budget is full, so that the token after them brings a
    burst, under a policy that `rests`; ``None`` for other policies.
    """
    if not rests(policy):
        return None
    return block.seen + column(block.budget, block.seen) - block.held().amax(dim=1)


def _knows_pins(block: Block) -> bool:
    """Return whether a kernel, which protects first and newest positions, protects all pins of a block as well."""
    return block.pins is None or block.lead > 0


def why_not_fused(policy: Policy, backend: Backend, *, window: int | None = None, even: bool = True) -> str | None:
    """Return the reason why a backend cannot apply a policy's rule within attention; ``None`` if it can.

    Args:
        policy: the policy.
        backend: the backend.
        window: sliding window of the layer.
        even: whether all heads of a row have the same budget.
    """
    if not backend.fuses:
        return f"the backend {backend.name} has no fused step"
    if policy.focuses is not None or policy.cascades or policy.near is not None:
        return "the policy attends to a part of the slots, or its heads do not each decide by its rule"
    if any(policy.slots.values()):
        return "a new token's state is not 0, with which the kernel starts"
    if policy.tally is not None:
        if not backend.tallies:
            return f"the backend {backend.name} knows no ring of bits"
        if policy.bursts is None or not policy.bursts.waits or window is not None or not even:
            return "heads may differ in the number of their tokens"  # in a window they do
        return None if _is_told(type(policy), "tally", "observe", "wants", "bursts") else _OVERRIDDEN
    rule = policy.sums
    # a kernel updates two sums at most, see `kvkeep.backends.base.Added`
    if rule is None or policy.bursts is not None or len(policy.slots) > 2:
        return None if rests(policy) else "the policy's rule is no sum of attention mass"
    if rule.score is not None and rule.score not in policy.slots:
        return "the policy's score is none of its sums"
    if not _is_told(type(policy), "sums", "observe", "score", "wants"):
        return _OVERRIDDEN
    holds = all(getattr(policy, name) == value for name, value in rule.only.items())
    return None if holds else "the policy's options make its rule another one"


def rests(policy: Policy) -> bool:
    """Return whether a policy does nothing between bursts: it has no state and asks nothing of attention. A kernel then
    makes the whole step until a burst is due.
    """
    if policy.bursts is None or not policy.bursts.waits or policy.slots or policy.summaries:
        return False
    plain = all(getattr(type(policy), name) is getattr(Policy, name) for name in ("observe", "wants"))
    return plain and isinstance(policy.statistic, Nothing) and policy.tally is None and policy.sums is None


_NOT_RECORDED = "there is no recorded step"
_OVERRIDDEN = "a subclass has overridden the rule that the kernel would apply"


@functools.cache
def _is_told(kind: type[Policy], ability: str, *names: str) -> bool:
    """Return whether a policy's ability, such as ``sums``, still describes its methods of these names.

    It does unless a subclass of the class that declares the ability overrides one of them.
    """

    def owner(name: str) -> type:
        """Return the class that defines the attribute of this name."""
        return next(base for base in kind.__mro__ if name in vars(base))

    return all(issubclass(owner(ability), owner(name)) for name in names)


# Small tensors of a decode step that need not be made anew for every token.


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
        """Return the statistic that the policy wants for this step: the cached one if it is steady and the tensors of
        prompt and budget were not written since; otherwise the policy is asked.
        """
        numbers = [tensor for tensor in (view.prompt, view.budget) if isinstance(tensor, Tensor)]
        if not self._steady or any(not tensor.is_cpu or tensor.is_inference() for tensor in numbers):
            return self._policy.wants(view)  # tensors of inference mode do not count the writes into them
        # torch increments the version with each write, so an unchanged number means an unchanged tensor without reading
        # it
        versions = [tensor._version for tensor in numbers]
        if self._last is not None:
            prompt, budget, before, statistic = self._last
            if prompt is view.prompt and budget is view.budget and before == versions:
                return statistic
        statistic = self._policy.wants(view)
        self._last = view.prompt, view.budget, versions, statistic
        return statistic

    def remembers(self, prompt: Tensor, budget: Budget) -> bool:
        """Return whether a statistic is cached that was made for these tensors of prompt and budget, and these have not
        been written since.
        """
        last = self._last
        if last is None or last[0] is not prompt or last[1] is not budget:
            return False
        return last[2] == [tensor._version for tensor in (prompt, budget) if isinstance(tensor, Tensor)]

    def __reduce__(self) -> tuple[type[CachedStatistic], tuple[Policy]]:
        """Return how to make a copy, which has nothing cached: a copied tensor counts its writes from 0 again."""
        return CachedStatistic, (self._policy,)


def _is_steady(policy: Policy) -> bool:
    """Return whether a policy wants one and the same statistic for all decode steps after a prompt."""
    options = None if policy.sums is None else policy.sums.steady
    if rests(policy):
        return True
    return options is not None and all(getattr(policy, name) == value for name, value in options.items())


def one_each(rows: int, device: torch.device) -> Int[Tensor, " B"]:
    """Return how many new tokens each row has: one each, as a tensor. On a CPU the tensor is shared and must not be
    written.
    """
    if device.type == "cpu":
        return _ones(rows)
    return torch.ones(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _ones(rows: int) -> Int[Tensor, " B"]:
    """Return a shared tensor of ones, usable in inference mode and out of it."""
    with torch.inference_mode(False):
        return torch.ones(rows, dtype=torch.int64)


# A decode step that is told nothing but the new tokens, as long as all else is what it was in the step before.


class Repeating:
    """The last decode step of a layer. It keeps no memory alive, and copies of it are ``None``: they have other blocks.

    Args:
        call: the step for other tokens.
        options: what the model's attention asked for.
        until: tokens that each row may have seen before a burst is due, which no replay makes; ``None``: any number.

    Attributes:
        call: appends, attends, observes and evicts, see `kvkeep.cache.eviction.fused`.
    """

    def __init__(self, call: Repeat, options: AttentionOptions, until: Int[Tensor, " B"] | None = None) -> None:
        self.call, self._asked, self._held, self._until = call, _asked(options), False, until

    def hold(self, block: Block) -> None:
        """Remember, through weak references, the block on which the step has worked.

        Only the first call has an effect: steps of another kind may follow on a block whose tensors have been replaced.
        """
        if self._held:
            return
        self._block, self._store, self._lead = weakref.ref(block), weakref.ref(block.store), block.lead
        self._seen = weakref.ref(block.seen)  # a kernel writes it in each step, so its version tells nothing
        self._budget = None if isinstance(block.budget, Tensor) else block.budget
        self._numbers = [(weakref.ref(tensor), _version(tensor)) for tensor in _numbers(block)]
        self._held = True

    def is_same(self, block: Block, options: AttentionOptions) -> bool:
        """Return whether the recorded step fits this block and these options, so that only the tokens differ."""
        if self._block() is not block or self._store() is not block.store or self._seen() is not block.seen:
            return False
        now = _numbers(block)
        if len(now) != len(self._numbers) or (self._budget is not None and self._budget != block.budget):
            return False
        for tensor, (known, version) in zip(now, self._numbers, strict=True):
            if known() is not tensor or version is None or tensor._version != version:
                return False
        if self._until is not None:
            return bool((block.seen < self._until).all()) and _asked(options) == self._asked
        return _knows_pins(block) and block.lead == self._lead and _asked(options) == self._asked

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _numbers(block: Block) -> list[Tensor]:
    """Return the tensors of a block whose content a recorded step has taken in: where prompts end, which slots belong
    to which head, and budgets if rows or heads have their own.
    """
    budget = block.budget
    return [block.prompt, *block.store.tables(), *((budget,) if isinstance(budget, Tensor) else ())]


def _version(tensor: Tensor) -> int | None:
    """Return the number of writes into a tensor; ``None`` for tensors of inference mode, which do not count them."""
    return None if tensor.is_inference() else tensor._version


def _asked(options: AttentionOptions) -> tuple[object, ...]:
    """Return the options on which a fused step depends."""
    return options.scaling, options.window, options.softcap, options.sinks, options.top

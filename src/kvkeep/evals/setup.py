"""How the caches of a run are made, beside policy and budget."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep import budget as budgets
from kvkeep.cache import BoundedCache
from kvkeep.errors import BudgetError
from kvkeep.models.load import Checkpoint
from kvkeep.policies.base import Policy
from kvkeep.rotary.embedding import rotation_for


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What `BoundedCache` is given beside policy and budget; by default nothing.

    Attributes:
        positions: ``true`` or ``slot``; ``None`` for the policy's own mode.
        layer_budget: how the budget is spread over the layers; ``None`` for the policy's own rule.
        prefill_chunk: tokens of a prompt that are taken at once; ``None`` for all.

    Raises:
        BudgetError: there is no such rule for layers, or a number is out of range.
    """

    positions: str | None = None
    layer_budget: str | tuple[float, ...] | None = None
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer_budget, str):
            budgets.per_layer(self.layer_budget, budget=1, layers=1)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise BudgetError(f"The prefill chunk {self.prefill_chunk} takes no token; give 1 or more.")

    def cache(self, checkpoint: Checkpoint, policy: Policy, numbers: Sequence[int], *, first: int = 0) -> BoundedCache:
        """An unused cache for one batch.

        Args:
            checkpoint: the model that is meant.
            policy: the eviction policy.
            numbers: tokens kept per layer and head, one number per row.
            first: identity of the first row for policies with randomness; the others count up from it.
        """
        return BoundedCache(
            checkpoint.config,
            policy,
            list(numbers),
            prefill_chunk=self.prefill_chunk,
            sequences=list(range(first, first + len(numbers))),
            layer_budget=self.layer_budget,
            positions=self.positions,
        )

    def differences(self, checkpoint: Checkpoint, policy: Policy) -> str:
        """What is not as the policy has it by itself on this model: ``positions=slot,layer-budget=ramp:0.2``.

        Raises:
            UnsupportedModelError: slot positions were asked for, and the model cannot have them.
        """
        rule = policy.defaults.layer_budget
        found = {
            "positions": (_mode(checkpoint, self.positions, policy), _mode(checkpoint, None, policy)),
            "layer-budget": (_rule(self.layer_budget or rule), _rule(rule)),
            "prefill-chunk": (str(self.prefill_chunk), str(None)),
        }
        return ",".join(f"{name}={asked}" for name, (asked, own) in found.items() if asked != own)


PLAIN = Setup()
"""Everything as the policy has it by itself."""


def _mode(checkpoint: Checkpoint, asked: str | None, policy: Policy) -> str:
    return "true" if rotation_for(checkpoint.config, asked, own=policy.defaults.positions) is None else "slot"


def _rule(how: str | tuple[float, ...]) -> str:
    """A rule with its parameter written out; weights by a hash, since there is one for each layer."""
    if not isinstance(how, str):
        return f"calibrated:{hashlib.sha256(repr(how).encode()).hexdigest()[:8]}"
    name, _, number = how.partition(":")
    return name if name == "uniform" else f"{name}:{float(number or budgets.RULES[name]):g}"

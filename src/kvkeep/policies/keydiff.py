"""Keeps the keys that differ most from the average direction of all held keys; it ignores attention.

Source: Park et al., arXiv:2504.15364; cf. kvpress `KeyDiffPress`.
Differs: applied in every step; `recent` and `sinks` can be protected, and keys compared before their rotation, which
  turns all slots back in each step.
Fails when: the keys of important tokens look like all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Cosine to the mean of the unit keys."""

    recent: int = option(0, "newest tokens that are never evicted")
    sinks: int = option(0, "first tokens that are never evicted")
    rotated: bool = option(True, "compare keys as attention sees them; false: without their positions")

    presets: ClassVar[Mapping[str, str]] = {
        "later": "recent=8,sinks=4",
        "document": "recent=8,sinks=4,rotated=false",
    }

    bibtex: ClassVar[str] = """@article{park2025keydiff,
  title   = {{KeyDiff}: Key Similarity-Based {KV} Cache Eviction for Long-Context {LLM} Inference in
             Resource-Constrained Environments},
  author  = {Junyoung Park and Dalton Jones and Matthew J. Morse and Raghavv Goel and Mingu Lee and Chris Lott},
  journal = {arXiv preprint arXiv:2504.15364},
  year    = {2025},
}"""

    @property
    def unrotates(self) -> bool:
        """Return whether keys are compared before their rotation, as they are under ``rotated=false``."""
        return not self.rotated

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, self.recent

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return minus the cosine between a key and the mean of the unit keys."""
        keys = view.keys if self.rotated else view.unrotated
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        # an empty slot may hold NaN, and NaN times 0 is NaN
        unit = unit.masked_fill((view.positions < 0)[..., None], 0.0)
        # a key that is no number is not in the mean, and goes first
        mean = unit.nan_to_num(0.0).sum(dim=2, keepdim=True)
        return -(unit * torch.nn.functional.normalize(mean, dim=-1)).sum(dim=-1)

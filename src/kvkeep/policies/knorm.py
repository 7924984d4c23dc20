"""Keeps the keys with the smallest norm; it ignores attention.

Source: Devoto et al., arXiv:2406.11430; cf. kvpress `KnormPress`.
Differs: applied in every step; `recent` and `sinks` can be protected (the authors skip the first two layers instead).
Fails when: small keys do not belong to important tokens, as in models with normalised keys (Qwen3).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """Norm of the key."""

    recent: int = option(0, "newest tokens that are never evicted")
    sinks: int = option(0, "first tokens that are never evicted")

    bibtex: ClassVar[str] = """@inproceedings{devoto2024knorm,
  title     = {A Simple and Effective {$L_2$} Norm-Based Strategy for {KV} Cache Compression},
  author    = {Alessio Devoto and Yu Zhao and Simone Scardapane and Pasquale Minervini},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2024},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, self.recent

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return minus the norm of the key, which rotation does not change."""
        norm: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return -norm

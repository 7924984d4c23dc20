"""Keeps the keys that a head's mean query would meet at many later positions, for long generations.

Source: TriAttention, arXiv:2604.04921; official code WeianMao/triattention, `methods/pruning_utils.py`.
Differs: the mean query is that of the prompt, where no calibration file is given, with the queries of a group as one;
  a key's score is the mean over the group; sinks and recent tokens stay; a prompt's tokens compete (official: all stay;
  pin them); the buffer is part of the budget.
Fails when: the prompt's queries are unlike those of the answer; what matters is told by content and not by distance.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies._queries import MeanQueries, half_of, met, paired, pairs
from kvkeep.policies.base import option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class TriAttention(MeanQueries):
    """The logit of the mean query, averaged over distances of 1, 2, 4, ..., and a part for the queries' spread."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")
    octaves: int = option(16, "the largest distance is 2 to this power", within=(0, 24))

    bibtex: ClassVar[str] = """@article{mao2026triattention,
  title   = {{TriAttention}: Efficient Long Reasoning with Trigonometric {KV} Compression},
  author  = {Weian Mao and others},
  journal = {arXiv preprint arXiv:2604.04921},
  year    = {2026},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the logit that each key is expected to have: with the mean query, averaged over distances, plus a
        part for the spread of the queries.
        """
        means, half = self.means(view, state), half_of(view)
        ahead = 2 ** torch.arange(self.octaves + 1, device=view.keys.device)
        # keys that are stored rotated already have the factor of YaRN that queries also get
        scaling = 1.0 if view.rotation is None else view.rotation.scaling ** (1 if view.turned else 2)
        logits = (met(view, ahead) * means.query[:, :, None]).sum(dim=-1)
        return logits + scaling * (pairs(paired(view, view.keys).float(), half) * means.excess[:, :, None]).sum(dim=-1)

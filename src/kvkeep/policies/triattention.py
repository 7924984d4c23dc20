"""Keeps the keys that a head's mean query would meet at many later positions, for long generations.

Source: TriAttention, arXiv:2604.04921; official code WeianMao/triattention, `methods/pruning_utils.py`.
Differs: the mean query is that of the prompt, where no calibration file is given, with the queries of a group as one;
  a key's score is the mean over the group; sinks and recent tokens stay; a prompt's tokens compete (official: all stay;
  pin them); the buffer is part of the budget.
Fails when: the prompt's queries are unlike those of the answer; what matters is told by content and not by distance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.policies._expected import met
from kvkeep.policies._rounds import Rounds
from kvkeep.policies._trigonometry import Means, heads_of, pairs, read
from kvkeep.policies.base import option
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class TriAttention(Rounds):
    """The logit of the mean query, averaged over distances of 1, 2, 4, ..., and a part for the queries' spread."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most a quarter of the budget")
    octaves: int = option(16, "the largest distance is 2 to this power", within=(0, 24))
    calibration: str | None = option(None, "file with the mean queries of this model, made by the official code")

    summaries: ClassVar[Mapping[str, str]] = {"query": "D", "length": "D", "count": ""}
    asks: ClassVar[bool] = True
    bibtex: ClassVar[str] = """@article{mao2026triattention,
  title   = {{TriAttention}: Efficient Long Reasoning with Trigonometric {KV} Compression},
  author  = {Weian Mao and others},
  journal = {arXiv preprint arXiv:2604.04921},
  year    = {2026},
}"""

    @property
    def unrotates(self) -> bool:
        """Queries at later positions follow from those without rotation."""
        return True

    @property
    def needs_rotary(self) -> bool:
        """Scores are made of angles."""
        return True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The sinks and the recent window."""
        return self.sinks, self.quarter(budget, self.recent)

    def check(self, budget: int) -> None:
        """Refuse a small budget, and a file that is no calibration."""
        super().check(budget)
        if self.calibration is not None:
            heads_of(self.calibration)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add a prompt's queries to their mean."""
        if view.queries is None:
            return state
        queries, positions = view.queries
        vectors = queries.float().unflatten(1, (view.keys.shape[1], -1))
        counts = (positions >= 0)[:, None, None, :, None]
        lengths = pairs(vectors, _half(view))
        number = counts.sum(dim=(2, 3, 4)) * vectors.shape[2]
        total = state["count"] + number
        weight = 1.0 / total.clamp(min=1.0)[..., None]

        def mean(before: Tensor, new: Tensor) -> Tensor:
            added = new.masked_fill(~counts, 0.0).nan_to_num(0.0, 0.0, 0.0).sum(dim=(2, 3))
            return before + (added - before * number[..., None]) * weight

        return state | {
            "query": mean(state["query"], vectors),
            "length": mean(state["length"], lengths),
            "count": total.float(),
        }

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The expected logit of each key."""
        means, half = self._means(view, state), _half(view)
        ahead = 2 ** torch.arange(self.octaves + 1)
        scaling = 1.0 if view.rotation is None else view.rotation.scaling ** (1 if view.turned else 2)
        logits = (met(view, ahead) * means.query[:, :, None]).sum(dim=-1)
        return logits + scaling * (pairs(view.keys.float(), half) * means.excess[:, :, None]).sum(dim=-1)

    def _means(self, view: View, state: State) -> Means:
        """Those of the file, or of the prompts so far.

        Raises:
            PolicyError: the file belongs to another model.
        """
        if self.calibration is None:
            query = state["query"]
            return Means(query, (state["length"] - pairs(query, _half(view))).clamp(min=0.0))
        found, (_, heads, _, dim) = read(self.calibration, view.layer), view.keys.shape
        if found.query.shape[1] != dim or len(found.query) % heads or 2 * _half(view) != dim:
            raise PolicyError(
                f"calibration={self.calibration}: the file has {len(found.query)} heads of {found.query.shape[1]} dims "
                f"per layer, which does not go with this model's {heads} KV heads of {dim}."
            )
        query, excess = (
            part.unflatten(0, (heads, -1)).mean(dim=1).to(view.keys.device)[None]
            for part in (found.query, found.excess)
        )
        return Means(query, excess)


def _half(view: View) -> int:
    """The number of pairs that are rotated."""
    return 0 if view.rotation is None else len(view.rotation.frequencies)

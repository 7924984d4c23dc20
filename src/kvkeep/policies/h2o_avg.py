"""Keeps the tokens with the largest attention per query that could see them, and the recent ones.

Source: Zhang et al., arXiv:2306.14048, Appendix B.2, a negative result there; cf. kvpress `ObservedAttention`.
Differs: the count of queries is derived (tokens seen since the token came) instead of stored beside the sum.
Fails when: the average of a young token is dominated by its own, always large, first attention.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies._mass import HeavyHitters
from kvkeep.policies.h2o import H2O
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class H2OAvg(HeavyHitters):
    """Accumulated attention mass divided by the number of query rows."""

    bibtex: ClassVar[str] = H2O.bibtex

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the mass per row: a token at position p has been visible to ``seen - p`` rows."""
        rows = view.seen[:, None, None] - view.positions
        return state["mass"] / rows.clamp(min=1)

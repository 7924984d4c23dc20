"""Keeps the tokens that the newest query attends to; the weakest goes, even if it is the newest.

Source: Oren et al., arXiv:2401.06104, §3; official code schwartz-lab-NLP/TOVA, `tova_cache.py`.
Differs: `protect_last` and `per_head` are extras; by default one set is shared by the heads of a layer, as there.
Fails when: a token matters later but not to the query at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Attention of the last query row."""

    protect_last: bool = option(False, "never evict the newest token")
    per_head: bool = option(False, "rank in each KV head on its own instead of averaging over all heads")

    statistic: ClassVar[Statistic] = Mass(rows=1)
    slots: ClassVar[Mapping[str, float]] = {"last": 0.0}
    end_rows: ClassVar[int] = 1
    bibtex: ClassVar[str] = """@inproceedings{oren2024tova,
  title     = {Transformers are Multi-State {RNN}s},
  author    = {Matanel Oren and Michael Hassid and Nir Yarden and Yossi Adi and Roy Schwartz},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2024},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and 0 or 1."""
        return 0, int(self.protect_last)

    @property
    def shares_heads(self) -> bool:
        """Return whether all heads keep the same tokens, which they do unless ``per_head``."""
        return not self.per_head

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the last row's attention, averaged over the heads unless ``per_head``."""
        if self.per_head:
            return {"last": report.mass}
        return {"last": view.heads.all(report.mass).mean(dim=1, keepdim=True).expand_as(report.mass)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the attention of the last row."""
        return state["last"]

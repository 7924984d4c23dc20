"""Keeps everything; a generated token attends to the largest probabilities alone. An oracle, not an eviction.

Source: FlexLLMGen (arXiv:2303.06865), sparse attention, `pytorch_backend.py`; a reading of "Top-K" in H2O, Table 8.
Differs: nothing; `renormalise` scales what is used up to 1, which the code does not do.
Fails when: memory is short: it holds the full cache, and with `share=1` it is the full cache.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import Focus, Policy, option
from kvkeep.types import State, Top, View


@final
@dataclass(frozen=True, kw_only=True)
class TopKDynamic(Policy):
    """The best set of each row, known only in hindsight."""

    share: float = option(1.0, "share of the tokens that a generated token attends to, beside itself", within=(0, 1))
    renormalise: bool = option(False, "scale the probabilities that are used up to a sum of 1")

    evicts: ClassVar[bool] = False
    bibtex: ClassVar[str] = """@inproceedings{sheng2023flexgen,
  title     = {{FlexGen}: High-Throughput Generative Inference of Large Language Models with a Single {GPU}},
  author    = {Ying Sheng and Lianmin Zheng and Binhang Yuan and Zhuohan Li and Max Ryabinin and Beidi Chen and
               Percy Liang and Christopher R{\\'e} and Ion Stoica and Ce Zhang},
  booktitle = {International Conference on Machine Learning},
  year      = {2023},
}"""

    @cached_property
    def focuses(self) -> Focus | None:  # type: ignore[override]  # depends on an option
        """Return the rule that limits a generated token's attention to a share of the older tokens; ``None`` if it
        sees all of them.
        """
        return Focus(TopKDynamic.top) if self.share < 1.0 else None

    def top(self, view: View) -> Top:
        """Return how many older tokens of each row a generated token attends to, ``share`` of them rounded down, and
        whether their probabilities are scaled up to 1.
        """
        older = (view.positions[:, 0] >= 0).sum(dim=-1) - 1
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        return Top((self.share * older.double() + 1e-9).long(), self.renormalise)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the position. It decides nothing, because nothing is evicted."""
        return view.positions.float()

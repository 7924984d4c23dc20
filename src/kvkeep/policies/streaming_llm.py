"""Keeps the first tokens (attention sinks) and the newest ones, and evicts the middle.

Source: Xiao et al., arXiv:2309.17453, §3; official code mit-han-lab/streaming-llm, `kv_cache.py`.
Differs: nothing; models without rotary embeddings, and some newer ones unless asked, keep true positions.
Fails when: the answer lies in the middle of the text.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import Defaults, MassSums, Policy, option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Sinks and a sliding window."""

    sinks: int = option(4, "first tokens that are never evicted")

    defaults: ClassVar[Defaults] = Defaults(positions="slot")
    sums: ClassVar[MassSums | None] = MassSums(steady={})
    bibtex: ClassVar[str] = """@inproceedings{xiao2024streamingllm,
  title     = {Efficient Streaming Language Models with Attention Sinks},
  author    = {Guangxuan Xiao and Yuandong Tian and Beidi Chen and Song Han and Mike Lewis},
  booktitle = {International Conference on Learning Representations},
  year      = {2024},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and 0."""
        return self.sinks, 0

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the position: newer tokens are worth more."""
        return view.positions.float()

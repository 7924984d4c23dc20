"""Keeps the tokens that the newest rows attend to and whose keys are unlike those of the others, for long generations.

Source: Cai et al., R-KV, arXiv:2505.24133; official code Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`.
Differs: probabilities are those of attention, mean over the group (official: softmax of the largest logits of a group);
  the buffer is part of the budget; a token that resembles no other passes nothing on (official: to the first token).
  Under slot positions keys are compared before their rotation.
  Before the first round after a prompt, rows of the prompt count as well.
Fails when: the tokens that matter are alike; a prompt's tokens compete with the generated ones (pin them).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.kv import ranking
from kvkeep.policies._rounds import NewestRows, redundancy
from kvkeep.policies.base import option
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class RKV(NewestRows):
    """``balance · attention - (1 - balance) · redundancy``."""

    kernel: int = option(7, "width of the pooling over the older tokens, an odd number; 1 for none", odd=True)
    balance: float = option(0.07, "weight of attention; the rest is the weight of redundancy", within=(0, 1))
    threshold: float = option(0.5, "cosine above which two keys are alike", within=(-1, 1))

    bibtex: ClassVar[str] = """@article{cai2025rkv,
  title   = {{R-KV}: Redundancy-aware {KV} Cache Compression for Reasoning Models},
  author  = {Zefan Cai and Wen Xiao and Hanshi Sun and Cheng Luo and Yikai Zhang and Ke Wan and Yucheng Li and
             Yeyang Zhou and Li-Wen Chang and Jiuxiang Gu and Zhen Dong and Anima Anandkumar and Abedelkadir Asi and
             Junjie Hu},
  journal = {arXiv preprint arXiv:2505.24133},
  year    = {2025},
}"""

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return ``balance`` times the mean attention of the newest rows, pooled over the older tokens, minus
        ``1 - balance`` times the redundancy of the keys.
        """
        # rows of which the state has the mass: fewer than the window while the text is shorter
        rows = view.seen.clamp(min=1, max=self.window)[:, None, None]
        older = (view.positions >= 0) & ~ranking.protects(
            view.positions, view.seen, recent=self.protected(view.budget)[1]
        )
        attention = ranking.pooled(self.mass(state), view.positions, older, kernel=self.kernel, kind="max") / rows
        alike = redundancy(view.keys, view.positions, self.threshold)
        return self.balance * attention - (1.0 - self.balance) * alike

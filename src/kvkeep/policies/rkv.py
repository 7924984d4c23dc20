"""Keeps the tokens that the newest rows attend to and whose keys are unlike those of the others, for long generations.

Source: Cai et al., R-KV, arXiv:2505.24133; official code Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`.
Differs: probabilities are those of attention, mean over the group (official: softmax of the largest logits of a group);
  the buffer is part of the budget; a token that resembles no other passes nothing on (official: to the first token).
  Before the first round after a prompt, rows of the prompt count as well.
Fails when: what repeats itself is what matters; a prompt's tokens compete with the generated ones (pin them).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep import scores
from kvkeep.policies._rounds import Rounds
from kvkeep.policies._similar import redundancy
from kvkeep.policies.base import option
from kvkeep.statistic import Mass, RowMasses, Statistic
from kvkeep.types import Budget, Phase, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class RKV(Rounds):
    """``balance · attention - (1 - balance) · redundancy``."""

    window: int = option(8, "newest rows whose attention counts; their tokens stay", within=(1, 64))
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

    @property
    def slots(self) -> Mapping[str, float]:  # type: ignore[override]  # a longer window needs more
        """The mass of each of the newest rows; row ``i`` has the place ``i % window``."""
        return {f"row{place}": 0.0 for place in range(self.window)}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The window, at most a quarter of the budget."""
        return 0, self.quarter(budget, self.window)

    def wants(self, view: View) -> Statistic:
        """The mass of each of a prompt's last rows, or of a generated token's row."""
        return Mass() if view.is_decode else RowMasses(rows=self.window, places=self.window)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Replace the masses of the oldest rows; elsewhere than on a CPU it costs less to ask for all of them."""
        if view.phase is Phase.PROBE:
            return state
        places = torch.arange(self.window, device=view.seen.device)
        fresh = (view.seen[:, None] - 1 - places) % self.window < view.new[:, None]
        changes: list[bool] = fresh.any(dim=0).tolist() if fresh.is_cpu else [True] * self.window
        found = {
            name: torch.where(fresh[:, place, None, None], report.mass if view.is_decode else report.sums[name], old)
            for place, (name, old) in enumerate((name, state[name]) for name in self.slots)
            if changes[place]
        }
        return state | found

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """The attention of the newest rows, pooled over the older tokens, against the likeness of the keys."""
        rows = view.seen.clamp(min=1, max=self.window)[:, None, None]
        recent = torch.as_tensor(self.protected(view.budget)[1], device=view.seen.device).view(-1, 1)
        older = (view.positions >= 0) & (view.positions < (view.seen[:, None] - recent)[:, :, None])
        mass = torch.stack([state[name] for name in self.slots]).sum(dim=0) / rows
        attention = scores.pooled(mass, view.positions, older, kernel=self.kernel, kind="max")
        alike = redundancy(view.keys, view.positions, self.threshold)
        return self.balance * attention - (1.0 - self.balance) * alike

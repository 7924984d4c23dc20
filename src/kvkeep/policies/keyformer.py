"""Keeps recent tokens and tokens with the largest accumulated attention under Gumbel noise and a rising temperature.

Source: Adnan et al., arXiv:2403.09054; official code d-matrix-ai/keyformer-llm.
Differs: the token before the recent window competes (official: always goes, `release_quirk`); counter-based noise.
Fails when: the noise drowns small but steady attention, or early tokens have collected mass for long, as in H2O.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.noise import Gumbel
from kvkeep.policies._mass import HeavyHitters
from kvkeep.policies.base import option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Keyformer(HeavyHitters):
    """Accumulated Gumbel-softmax."""

    recent: int | None = option(None, "newest tokens that are never evicted; 30 % of the budget if not given")
    tau_start: float = option(1.0, "temperature in the prompt", within=(0.01, 100))
    tau_end: float = option(2.0, "temperature after max_new_tokens tokens, and from then on", within=(0.01, 100))
    max_new_tokens: int = option(256, "generated tokens over which the temperature rises")
    noise: bool = option(True, "add the noise")
    seed: int = option(0, "seed of the noise")
    release_quirk: bool = option(False, "the token before the recent window always goes, as in the released code")

    stochastic: ClassVar[bool] = True
    bibtex: ClassVar[str] = """@inproceedings{adnan2024keyformer,
  title     = {Keyformer: {KV} Cache Reduction through Key Tokens Selection for Efficient Generative Inference},
  author    = {Muhammad Adnan and Akhil Arunkumar and Gaurav Jain and Prashant J. Nair and Ilya Soloveychik and
               Purushotham Kamath},
  booktitle = {Proceedings of Machine Learning and Systems},
  year      = {2024},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, budget * 3 // 10 if self.recent is None else self.recent

    def wants(self, view: View) -> Statistic:
        """Return the statistic that the policy needs: the mass of the noisy, tempered softmax."""
        # max_new_tokens=0: the temperature never rises
        step = (view.seen - view.prompt).clamp(max=self.max_new_tokens) / max(1, self.max_new_tokens)
        tau = self.tau_start + (self.tau_end - self.tau_start) * step
        noise = Gumbel(self.seed, view.layer, view.sequences, view.heads) if self.noise else None
        return Mass(gain=1.0 / tau.float(), noise=noise)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the accumulated mass. Under the quirk, the token before the recent window is evicted first."""
        if not self.release_quirk:
            return state["mass"]
        _, recent = self.protected(view.budget)
        leaves = view.positions == (view.seen[:, None] - recent - 1)[:, :, None]
        return state["mass"].masked_fill(leaves, -1.0)  # below every sum of masses

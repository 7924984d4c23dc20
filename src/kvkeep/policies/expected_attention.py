"""Keeps the tokens that queries still to come are expected to attend to, judged by the spread of the prompt's queries.

Source: Devoto et al., arXiv:2510.00636; cf. kvpress `ExpectedAttentionPress`.
Differs: `recent` tokens are protected, too; with chunks each chunk's own queries count; logits are divided by √d.
Fails when: the question is unlike the text; every fact needs its own matching query, and the average is none of them.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies._prefill import SLIDING, slide
from kvkeep.policies._queries import met, moments, paired
from kvkeep.policies.base import MassSums, Policy, option
from kvkeep.types import Budget, Queries, State, View


@final
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Expected attention times the size of the value."""

    sinks: int = option(4, "first tokens that are never evicted and do not count")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")
    future: int = option(512, "number of the next positions over which is averaged", within=(1, 2**16))
    epsilon: float = option(0.01, "added to the probability before the value's size multiplies it")

    asks: ClassVar[bool] = True
    sums: ClassVar[MassSums | None] = SLIDING

    @property
    def unrotates(self) -> bool:
        """Return ``True``: the policy needs queries before their rotation, to turn them to later positions itself."""
        return True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return ``(p + epsilon) · ‖v‖`` in a prompt; for generated tokens an order that keeps the chosen tokens."""
        if view.queries is None:
            return slide(view, self.protected(view.budget)[1])
        keys = met(view, torch.arange(self.future, device=view.keys.device))
        scale = 1.0 / math.sqrt(keys.shape[-1])
        queries = Queries(paired(view, view.queries.vectors), view.queries.positions)
        mean, spread = moments(queries, keys.shape[1], self.sinks)
        # the mean of exp(x) over a normal x: half of the variance is added to the mean of x
        logits = scale * mean @ keys.mT + 0.5 * scale**2 * ((keys[:, :, None] @ spread) * keys[:, :, None]).sum(dim=-1)
        shown = (view.positions >= self.sinks)[:, :, None]
        # not - infinity, with which a head that shows no token would be NaN
        share = logits.masked_fill(~shown, torch.finfo(torch.float32).min).softmax(dim=-1).mean(dim=2)
        sizes: Tensor = view.values.float().norm(dim=-1)
        return (share + self.epsilon) * sizes

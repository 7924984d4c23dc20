"""Leverage: how far a key stands out from all keys of its head, and a base of policies that keep such keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies._prefill import slide
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, Phase, Report, State, View

_ROUNDING = 1e-5
"""Error of a float32 sum of squares, as a share of the sum."""


@dataclass(frozen=True, kw_only=True)
class Leverages(Policy):
    """Adds up the mean and the scatter of a prompt's keys in each head. Keys that were evicted remain in both.

    Generated tokens do not compete: they slide beside the chosen ones.
    """

    sinks: int = option(4, "first tokens that are never evicted and do not count")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")
    ridge: float = option(0.01, "added to the scatter in every direction")
    rotated: bool = option(False, "compare keys as attention sees them; false: without their positions")

    summaries: ClassVar[Mapping[str, str]] = {"scatter": "D D", "mean": "D", "count": ""}

    @property
    def unrotates(self) -> bool:
        """Return whether keys are compared before their rotation, as they are without ``rotated=true``."""
        return not self.rotated

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and `recent`, at most half of what
        sinks leave of the budget.
        """
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with a prompt's new keys added to the mean and the scatter of all keys (Chan et al.,
        1979). Other tokens change nothing.
        """
        if view.phase is not Phase.PREFILL:
            return state
        number, mean, scatter = self._added(view)
        total = (state["count"] + number).clamp(min=1.0)
        apart = mean - state["mean"]
        of_means = apart[..., :, None] * apart[..., None, :] * (state["count"] * number / total)[..., None, None]
        return state | {
            "scatter": state["scatter"] + scatter + of_means,
            "mean": state["mean"] + apart * (number / total)[..., None],
            "count": state["count"] + number,
        }

    def _added(self, view: View) -> tuple[Float[Tensor, "B Hk"], Float[Tensor, "B Hk D"], Float[Tensor, "B Hk D D"]]:
        """Return the number, the mean and the scatter of the step's new keys, without those of sinks and those that are
        not finite.
        """
        keys, counts = self._keys(view), self._counts(view)
        # nearly always the new keys are the last slots of every head: a slice of finite keys needs no mask
        if keys.is_cpu:  # elsewhere the question would take a wait
            start = counts.shape[-1] - int(counts.sum(dim=-1).amax())
            if start < counts.shape[-1] and bool(counts[..., start:].all()):
                new = keys[:, :, start:]
                mean = new.mean(dim=2)
                centred = new - mean[:, :, None]
                if bool(mean.isfinite().all()):
                    return mean.new_full(mean.shape[:2], new.shape[2]), mean, centred.mT @ centred
        counts = counts & keys.isfinite().all(dim=-1)
        number, weights = counts.sum(dim=-1).float(), counts.float()[:, :, None]
        # a weight of 0 does not remove NaN from a product
        keys = keys.nan_to_num(0.0, 0.0, 0.0)
        mean = (weights @ keys).squeeze(2) / number.clamp(min=1.0)[..., None]
        centred = (keys - mean[:, :, None]).mul_(weights.mT)
        return number, mean, centred.mT @ centred

    def later(self, view: View) -> Float[Tensor, "B Hk S"]:
        """Return the score in decode: the tokens chosen at the end of the prompt stay, and of the others the oldest
        go first.
        """
        return slide(view, self.protected(view.budget)[1])

    def leverage(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the leverage of each key among the keys that the state has added up: 0 for the mean key, about 1 for a
        key in a direction of its own.
        """
        apart = self._keys(view) - state["mean"][:, :, None]
        lengths: Tensor = torch.linalg.vector_norm(apart @ _whitening(state["scatter"], self.ridge), dim=-1)
        return lengths.square_()

    def _keys(self, view: View) -> Float[Tensor, "B Hk S D"]:
        """Return the keys that are compared, in float32."""
        return (view.keys if self.rotated else view.unrotated).float()

    def _counts(self, view: View) -> Bool[Tensor, "B Hk S"]:
        """Return a mask of the slots whose key is new and no sink's."""
        return view.positions >= (view.seen - view.new).clamp(min=self.sinks)[:, None, None]


def _whitening(scatter: Float[Tensor, "B Hk D D"], ridge: float) -> Float[Tensor, "B Hk D D"]:
    """Return a matrix W for which ``Wᵀ (scatter + ridge) W`` is the identity, although the scatter may be singular:
    ``x @ W`` has the length of ``x`` by this scatter.
    """
    # in float32 the factorisation fails for scatters that are nearly singular
    wide = scatter.double()
    one = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    sums = wide.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    factor, fails = torch.linalg.cholesky_ex(wide + ridge * one)
    # on a device the question would wait for it, so both factors are computed there
    if not fails.is_cpu or bool(fails.any()):
        # rounding in the sums can make a singular scatter slightly negative, so as much is added; tiny: to a scatter of
        # zeros without a ridge, too
        safe, _ = torch.linalg.cholesky_ex(wide + (ridge + _ROUNDING * sums + torch.finfo(torch.float32).tiny) * one)
        factor = torch.where((fails == 0)[..., None, None], factor, safe)
    inverse: Tensor = torch.linalg.solve_triangular(factor, one, upper=False)
    return inverse.mT.float()

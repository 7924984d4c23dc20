"""Keeps the tokens without which the attention output of a prompt's end would change most.

Source: An et al., ReST-KV (ICLR 2026); official code an-yongqi/rest-kv.
Differs: group means; errors before the output projection, which a cache does not know; pooling of a fixed width
  (official: adaptive); one budget for all heads. Under decode=score generated tokens compete by their attention.
Fails when: the question comes in a later turn, so that the end of the prompt does not show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies._prefill import ObservationWindow
from kvkeep.policies.base import option
from kvkeep.types import View


@final
@dataclass(frozen=True, kw_only=True)
class ReSTKV(ObservationWindow):
    """The change of the window's mean output if a token went: ``a / (1 - a) · ‖o - v‖``, pooled."""

    decay: float = option(0.7, "weight of a row of the window relative to the next one", within=(0, 1))

    presets: ClassVar[Mapping[str, str]] = {"late": "kernel=13"}

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """The error that a token's eviction would cause, pooled in the order of positions."""
        share = mass / mass.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        values = view.values.to(mass.dtype).masked_fill((view.positions < 0)[..., None], 0.0)
        output = share[:, :, None] @ values
        error = (output - values).norm(dim=-1) * share / (1.0 - share).clamp(min=1e-6)
        return super().rate(view, error)

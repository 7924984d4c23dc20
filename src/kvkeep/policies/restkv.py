"""Keeps the tokens without which a layer's output at the end of the prompt would change most.

Source: An et al., ReST-KV (ICLR 2026); official code an-yongqi/rest-kv.
Differs: the attention is the mean over a group's query heads; pooling of a fixed width (official: adaptive); one budget
  for all heads. Under decode=score generated tokens compete by their attention. Where the output projection cannot be
  read (quantised, fused, in another module), the change is that of the heads' own output.
Fails when: the question comes in a later turn, so that the end of the prompt does not show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies._prefill import ObservationWindow, lengths
from kvkeep.policies.base import option
from kvkeep.types import View


@final
@dataclass(frozen=True, kw_only=True)
class ReSTKV(ObservationWindow):
    """The change of the layer's mean output in the window if a token went: ``a / (1 - a) · ‖W(o - v)‖``, pooled."""

    decay: float = option(0.7, "weight of a row of the window relative to the next one", within=(0, 1))

    presets: ClassVar[Mapping[str, str]] = {"late": "kernel=13"}
    projects: ClassVar[bool] = True

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the error in the layer's output that a token's eviction would cause, pooled over neighbouring
        positions, and 0 for tokens of the window.
        """
        share = mass / mass.sum(dim=-1, keepdim=True).clamp(min=1e-30)  # shares of no mass are 0, not NaN
        # an empty slot may hold NaN, and NaN times 0 is NaN
        values = view.values.to(mass.dtype).masked_fill((view.positions < 0)[..., None], 0.0)
        output = share[:, :, None] @ values
        # 1e-6: of one token that has all of the mass, the error is large, but finite
        error = lengths(view, output - values) * share / (1.0 - share).clamp(min=1e-6)
        return super().rate(view, error)

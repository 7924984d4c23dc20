"""Keeps the keys that stand out most from all keys of their head, so that a text can be asked about later.

Source: statistical leverage of unrotated keys, a rule of kvkeep; cf. Compactor (arXiv:2507.08143) and KeyDiff.
Differs: no attention and no sampling; one scatter matrix per head, to which each chunk of a prompt adds its keys. The
  matrix takes the memory of D tokens in bfloat16, of D / 2 in float32, where D is the head dimension.
Fails when: the keys of important tokens look like the others (lists, tables); an answer needs its near past most; or
  a later question has more tokens than `recent`, so that its own keys compete.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies._leverage import Leverages
from kvkeep.policies._prefill import SLIDING
from kvkeep.policies.base import MassSums
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class Leverage(Leverages):
    """Leverage of a key, ``xᵀ (XᵀX + ridge)⁻¹ x``, where X are the centred keys of the prompt so far."""

    sums: ClassVar[MassSums | None] = SLIDING

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the leverage in a prompt; for generated tokens an order that keeps the chosen tokens."""
        return self.later(view) if view.is_decode else self.leverage(view, state)

"""Keeps the newest tokens and a grid of older ones, every s-th of the sequence: strided sparse attention as a policy.

Source: Child et al., arXiv:1904.10509; as a baseline in H2O (arXiv:2306.14048), Table 2, without its parameters.
Differs: the grid is absolute; the paper's moves with the query, so a dropped key would be needed again.
Fails when: important tokens lie between the grid's lines.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvkeep.policies._mass import Pattern
from kvkeep.policies.base import option
from kvkeep.types import View


@final
@dataclass(frozen=True, kw_only=True)
class SparseStrided(Pattern):
    """Half of the share is local, half a grid."""

    stride: int | None = option(
        None, "distance of the grid's lines; by default the prompt fills half", within=(1, math.inf)
    )

    bibtex: ClassVar[str] = """@article{child2019sparse,
  title   = {Generating Long Sequences with Sparse Transformers},
  author  = {Rewon Child and Scott Gray and Alec Radford and Ilya Sutskever},
  journal = {arXiv preprint arXiv:1904.10509},
  year    = {2019},
}"""

    def local(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return which slots hold the newest tokens, as many as half of the share, rounded down, and at least one."""
        return view.positions >= view.seen[:, None, None] - (share // 2).clamp(min=1)

    def marks(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return which slots hold every ``stride``-th position; by default the stride with which the prompt has as many
        of them as half of the share. For an empty slot the result means nothing.
        """
        stride = -(-2 * view.prompt[:, None, None] // share.clamp(min=1)) if self.stride is None else self.stride
        # 2: a grid of all positions would only be a longer local part
        return (view.positions + 1) % torch.as_tensor(stride).clamp(min=1 if self.stride else 2) == 0

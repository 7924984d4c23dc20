"""Keeps the current block of tokens and the last tokens of every finished block: fixed sparse attention as a policy.

Source: Child et al., arXiv:1904.10509; as a baseline in H2O (arXiv:2306.14048), Table 2, without its parameters.
Differs: when the summaries outgrow their share the oldest goes; the summary is the same for all heads.
Fails when: important tokens are not at the end of a block.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvkeep.policies._mass import Pattern
from kvkeep.policies.base import option
from kvkeep.policies.sparse_strided import SparseStrided
from kvkeep.types import View


@final
@dataclass(frozen=True, kw_only=True)
class SparseFixed(Pattern):
    """Blocks of half of the share; the other half are summaries."""

    summary: int | None = option(None, "last tokens of a finished block that stay; by default they fill half")

    bibtex: ClassVar[str] = SparseStrided.bibtex

    def local(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return which slots lie in the block of the newest token, where the text is cut into blocks of half of the
        share.

        For an empty slot the result means nothing.
        """
        block = (share // 2).clamp(min=1)
        return view.positions // block == (view.seen[:, None, None] - 1) // block

    def marks(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return which slots are among the last ``summary`` positions of a block, which is half of the share long.

        Without ``summary`` so many are taken of each block that, at the prompt's end, they fill half of the share.
        """
        block = (share // 2).clamp(min=1)
        # share: a row without a prompt has 0, by which nothing can be divided, and a short prompt fits anyway
        n = torch.maximum(view.prompt[:, None, None], share)
        # half of the share, divided by the number of blocks: n / block
        fitting = (share * block / (2 * n)).round().long().clamp(min=1)
        return view.positions % block >= block - (fitting if self.summary is None else self.summary)

"""Attention over unordered slots that reports what the policy asked for.

`attend` is the implementation that the cache uses: Triton's kernels on CUDA, the native kernel for one token per row on
a CPU, plain torch for everything else. `reference` is the definition that every implementation is tested against.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention import cpu, kernel
from kvkeep.attention.triton import attend as by_triton
from kvkeep.attention.triton import switch
from kvkeep.statistic import Statistic
from kvkeep.types import AttentionOptions, Report

__all__ = ["attend"]


def attend(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B #Hk S"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Attend over occupied slots and reduce the policy's statistic on the way; see `cpu.attend` for the arguments."""
    tensors = (query, keys, values, query_positions, key_positions)
    if switch.runs(query) and (done := by_triton(*tensors, statistic=statistic, options=options)) is not None:
        return done
    if query.shape[2] == 1 and (done := kernel.attend(*tensors, statistic=statistic, options=options)) is not None:
        return done
    return cpu.attend(*tensors, statistic=statistic, options=options)

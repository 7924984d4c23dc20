"""kvkeep's kernels for CUDA, in Triton: the only room that imports it, and only when a kernel is wanted.

`switch` says whether they run. `decode` and `slots` hold the kernels of a decode step, `fuse` the one that evicts in
the same pass, `tiles` what they share, `blocks` their sizes; `ops` are their functions on tensors. What they do, what
they move and how exact they are stands in their docstrings and in ``docs/gpu.md``.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention import kernel
from kvkeep.attention.triton import ops, prefill_ops, switch
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
) -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """The same as `cpu.attend`; ``None``, with a notice in the log, if there is no kernel for what is asked.

    Differs in what nobody may look at: a padded query, and one that sees nothing, give zeros.
    """
    tensors = (query, keys, values, query_positions, key_positions)
    if query.shape[2] > 1:
        return prefill_ops.attend(*tensors, statistic=statistic, options=options)
    if options.top is not None or not kernel.is_known(statistic):
        switch.notice(
            f"it uses only its largest probabilities, or reports {type(statistic).__name__} with what it needs"
        )
        return None
    wanted = kernel.wanted(statistic)
    found = ops.attend(*tensors, options=options, wanted=wanted)
    if found is None:
        return None
    out, *sums = found
    return out, Report(dict(zip(statistic.fields, sums, strict=False)))

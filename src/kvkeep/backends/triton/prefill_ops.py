"""Attention of many query rows on a GPU: which kernels run, with which tiles, and what the report is made of.

The output is one pass of `prefill.forward`, or torch's own attention where that can compute it and is wanted; the
report is `prefill.columns` over the rows that count. Nothing here waits for the device, except one look for padding
before torch's attention is used.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.backends.triton import switch
from kvkeep.backends.triton.blocks import MAX_DIM
from kvkeep.backends.triton.launch import TYPES
from kvkeep.backends.triton.prefill_launch import Prefill
from kvkeep.statistic import Low, LowRows, Mass, MassAndLast, Nothing, Statistic
from kvkeep.types import AttentionOptions, Report

Output = Literal["auto", "torch", "triton"]


def attend(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B #Hk S"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
    output: Output = "auto",
) -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """The same as `Backend.attend`; ``None`` if the kernels do not know what is asked, see `unknown`.

    Args:
        query: see `Backend.attend`.
        keys: of its slots.
        values: of its slots.
        query_positions: its ``now``.
        key_positions: of its slots.
        statistic: what to report.
        options: of the model's attention; ``top``, which is for generated tokens, is not known here.
        output: who computes the output. ``torch``: its own attention (flash attention, where torch has it), which can
            do it for a whole prompt without padding, soft cap, sinks and window; ours does the rest. ``triton``: our
            kernel. ``auto``: torch for a long prompt of which few rows count.

    Returns:
        What `Backend.attend` does; at a gain of exactly 0 a sliding window hides its keys from the report, too.

    Cost:
        what `prefill.forward` and `prefill.columns` say; with a gain, or torch's output, the logits of the counted
        rows once more. Extra memory: the sums, and a number per query head and row.
    """
    if (reason := unknown(query, keys, values, statistic, options)) is not None:
        switch.notice(reason)
        return None
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    work = Prefill(query, keys, values, query_positions.contiguous(), key_positions.contiguous(), options)
    lse = None
    if work.fits_torch() if output == "torch" else output == "auto" and work.prefers_torch(statistic):
        out = work.by_torch()
    else:
        out, lse = work.forward()
    return out, Report(_sums(work, statistic, lse))


def unknown(query: Tensor, keys: Tensor, values: Tensor, statistic: Statistic, options: AttentionOptions) -> str | None:
    """What about this the kernels cannot do, or ``None``."""
    if options.top is not None:
        return "attention to the largest probabilities only"
    if type(statistic) not in (Nothing, Low, LowRows, Mass, MassAndLast):
        return f"the statistic {type(statistic).__name__}"
    if isinstance(statistic, Mass) and statistic.noise is not None:
        return "noise on the logits"
    if query.dtype not in TYPES or not query.dtype == keys.dtype == values.dtype:
        return f"elements of {query.dtype}, {keys.dtype} and {values.dtype}"
    if max(query.shape[-1], values.shape[-1]) > MAX_DIM:
        return f"heads of more than {MAX_DIM} dimensions"
    return None


def _sums(work: Prefill, statistic: Statistic, lse: Tensor | None) -> dict[str, Float[Tensor, "B Hk S"]]:
    """The fields of the statistic; ``lse`` is that of all rows under the model's own softmax, if it is known."""
    if isinstance(statistic, Nothing):
        return {}
    queries = work.query_positions
    selected = statistic.selects(queries)
    bounds = bounds_of(selected)
    gain = _gain(statistic, queries) if isinstance(statistic, Mass) else None
    if gain is not None or lse is None:
        lse = work.log_sum_exp(bounds, gain)
    if isinstance(statistic, Low):
        n = work.visible() if statistic.live else (queries + 1)[:, None]
        if isinstance(statistic, LowRows):
            return _rows(work, statistic, lse, shares=n * statistic.theta)
        fields = work.columns(lse, selected.float(), bounds, shares=n * statistic.theta)
        return {"mass": fields[0], "low": fields[1]}
    mass = cast(Mass, statistic)
    (found,) = work.columns(lse, mass.weights(selected, queries), bounds, gain=gain)
    if not isinstance(statistic, MassAndLast):
        return {"mass": found}
    newest = selected & (queries == torch.as_tensor(statistic.last, device=queries.device).view(-1, 1))
    (last,) = work.columns(lse, mass.weights(newest, queries), bounds_of(newest), gain=gain)
    return {"mass": found, "last": last}


def _gain(statistic: Mass, queries: Int[Tensor, "B T"]) -> Float[Tensor, " B"] | None:
    """One factor per row of the batch; ``None`` for the model's own softmax."""
    if isinstance(statistic.gain, float) and statistic.gain == 1.0:
        return None
    return torch.as_tensor(statistic.gain, dtype=torch.float32, device=queries.device).expand(len(queries)).contiguous()


def _rows(
    work: Prefill, statistic: LowRows, lse: Tensor, *, shares: Float[Tensor, "B #Hk T"]
) -> dict[str, Float[Tensor, "B Hk S"]]:
    """The fields, each from its own rows: a word's sum of different bits is exact, whatever the order."""
    weights = statistic.weights(statistic.selects(work.query_positions), work.query_positions)
    found = {name: work.columns(lse, one, bounds_of(one != 0), shares=shares) for name, one in weights.items()}
    return {name: sums[0] if name in ("mass", "due") else sums[1] for name, sums in found.items()}


def bounds_of(selected: Bool[Tensor, "B T"]) -> Int[Tensor, "B 2"]:
    """The first of the counted rows and the one after the last; ``(T, 0)`` if none counts."""
    T = selected.shape[1]
    rows = torch.arange(T, dtype=torch.int32, device=selected.device)
    first = torch.where(selected, rows, T).amin(dim=1)
    end = torch.where(selected, rows + 1, 0).amax(dim=1)
    return torch.stack([first, end], dim=1)

"""Torch's own causal attention, and the log-sum-exp of its rows where torch has it.

Torch has the numbers from its fused kernels, under operators that are not part of its public interface. So they are
tried once for each device and kind of kernel, against the definition; where they do not give what they should, or do
not exist, there is no log-sum-exp, and our kernel works it out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

LOG2E = math.log2(math.e)
MOST_WRONG = 1e-3
"""Largest error of a log-sum-exp of the trial, in half precision: a wrong base or layout errs by far more."""


def causal(
    query: Float[Tensor, "B Hq T D"], keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T D"], scaling: float
) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"] | None]:
    """Attention of a whole prompt by torch, which chooses among its kernels; and the log-sum-exp in base 2, if known.

    Returns:
        the output, and for each row the logarithm in base 2 of its sum of exponentials.
    """
    kind = _kind(query, keys, values, scaling)
    if kind is not None and _is_right(kind, query.device, query.dtype):
        out, lse = _CALLS[kind](query, keys, values, scaling)
        return out, lse.reshape(query.shape[:3]) * LOG2E
    return _plain(query, keys, values, scaling), None


def gives_sums(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> bool:
    """Whether `causal` gives the log-sum-exp, too, from a kernel that is faster than ours."""
    kind = _kind(query, keys, values, scaling)
    return kind == SDPBackend.CUDNN_ATTENTION.value and _is_right(kind, query.device, query.dtype)


def _plain(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    out: Tensor = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return out


def _kind(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> int | None:
    """The kernel that torch would take, if it is one of those that know the log-sum-exp."""
    choice = getattr(torch, "_fused_sdp_choice", None)
    if choice is None or not query.is_cuda:
        return None
    try:
        found = int(choice(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True))
    except (RuntimeError, TypeError):
        return None
    return found if found in _CALLS else None


def _by_cudnn(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = call(query, keys, values, None, True, 0.0, True, False, scale=scaling)
    return out, lse


def _by_flash(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = call(query, keys, values, 0.0, True, False, scale=scaling)
    return out, lse


_CALLS: dict[int, Callable[[Tensor, Tensor, Tensor, float], tuple[Any, Any]]] = {
    SDPBackend.CUDNN_ATTENTION.value: _by_cudnn,
    SDPBackend.FLASH_ATTENTION.value: _by_flash,
}


@functools.cache
def _is_right(kind: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel's log-sum-exp is that of the definition, in natural logarithms; the host waits, once."""
    with torch.inference_mode(), torch.random.fork_rng([]):
        generator = torch.Generator().manual_seed(0)
        query, keys, values = (
            torch.randn((1, heads, 128, 64), generator=generator).to(device, dtype) for heads in (4, 2, 2)
        )
        try:
            out, lse = _CALLS[kind](query, keys, values, 0.1)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        if lse.numel() != 4 * 128 or out.shape != query.shape:
            return False
        logits = query.float() @ keys.float().repeat_interleave(2, dim=1).mT * 0.1
        hidden = torch.ones(128, 128, dtype=torch.bool, device=device).triu(1)
        want = logits.masked_fill(hidden, -math.inf).logsumexp(dim=-1)
        return bool(((lse.reshape(want.shape) - want).abs() <= MOST_WRONG).all())

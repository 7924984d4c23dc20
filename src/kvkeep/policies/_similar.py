"""How much the keys of a head resemble each other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_BYTES = 2**23
"""Size of one block of cosines."""


def redundancy(
    keys: Float[Tensor, "B Hk S D"], positions: Int[Tensor, "B Hk S"], threshold: float
) -> Float[Tensor, "B Hk S"]:
    """A softmax over each head's tokens: of the mean cosine of a token's key with those of all tokens.

    Of all keys whose cosine with a key is above the threshold, the newest gets nothing from it, nor does the key
    itself. So of many keys that are alike, the newest one counts as the least redundant. A key that is no number gets
    NaN.
    """
    there = positions >= 0
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    broken = ~unit.isfinite().all(dim=-1)
    unit = unit.masked_fill((broken | ~there)[..., None], 0.0)
    total = torch.zeros(positions.shape, dtype=unit.dtype, device=unit.device)
    S, places = positions.shape[-1], torch.arange(positions.shape[-1], device=positions.device)
    rows = max(1, BLOCK_BYTES // (unit.element_size() * positions.numel()))
    for start in range(0, S, rows):
        cosines = unit[:, :, start : start + rows] @ unit.mT
        cosines.masked_fill_(places[start : start + rows, None] == places, 0.0)
        alike = torch.where(cosines > threshold, positions[:, :, None], -1)
        newest = alike.amax(dim=-1, keepdim=True)
        total += cosines.masked_fill_((alike == newest) & (newest >= 0), 0.0).sum(dim=2)
    mean = total / there.sum(dim=-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, torch.finfo(mean.dtype).min).softmax(dim=-1).masked_fill(broken & there, torch.nan)

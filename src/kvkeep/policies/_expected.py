"""What queries that are still to come would attend to, if they were spread like those of the prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.types import Queries, Turning, View


def moments(queries: Queries, heads: int, sinks: int) -> tuple[Float[Tensor, "B Hk G D"], Float[Tensor, "B Hk G D D"]]:
    """The mean of each head's queries and their covariance; padding and the first ``sinks`` tokens do not count."""
    vectors = queries.vectors.float().unflatten(1, (heads, -1))
    counts = (queries.positions >= sinks)[:, None, None, :, None]
    number = counts.sum(dim=3).clamp(min=1)
    mean = vectors.masked_fill(~counts, 0.0).sum(dim=3) / number
    apart = (vectors - mean[:, :, :, None]).masked_fill(~counts, 0.0)
    return mean, apart.mT @ apart / number[..., None]


def met(view: View, ahead: Int[Tensor, " n"]) -> Float[Tensor, "B Hk S D"]:
    """The keys as unrotated queries meet them, on average over positions so far ahead of the next one."""
    if view.rotation is None:
        return view.keys.float()
    far = view.seen[:, None, None] - (0 if view.turned else view.positions)
    cos, sin = _average(view.rotation, far, ahead)
    half = cos.shape[-1]
    keys = view.keys.float() * view.rotation.scaling ** (1 if view.turned else 2)
    one, two, rest = keys[..., :half], keys[..., half : 2 * half], view.keys.float()[..., 2 * half :]
    return torch.cat([one * cos + two * sin, two * cos - one * sin, rest], dim=-1)


def _average(
    rotation: Turning, far: Int[Tensor, "B #Hk #S"], ahead: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "B #Hk #S F"], Float[Tensor, "B #Hk #S F"]]:
    """Cosines and sines of the angles at these distances, averaged over those that are so much larger."""
    frequencies = rotation.on(far.device)
    start = torch.polar(torch.ones_like(frequencies), far[..., None].float() * frequencies)
    steps = ahead[:, None] * frequencies
    turn = start * torch.polar(torch.ones_like(steps), steps).mean(dim=0)
    return turn.real, turn.imag

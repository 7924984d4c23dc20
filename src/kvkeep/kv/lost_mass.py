"""How much attention evicted tokens carried, as shares of the mass that a policy's statistic reports.

A block adds up four numbers for each row and KV head: the mass of the tokens that cuts of the prompt evicted, the mass
of all tokens there, and both again for generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.types import Phase, Report


@dataclass(frozen=True)
class LostMass:
    """The share of attention mass that evicted tokens carried, averaged over layers and KV heads.

    Attributes:
        prompt: at the cuts of the prompt, of the mass in the rows that the policy's statistic counts.
        decode: at the steps of generated tokens, of the mass in each step's own row; a running mean.

    Each is ``None`` where the policy's statistic shows no mass.
    """

    prompt: float | None = None
    decode: float | None = None


@dataclass(frozen=True, eq=False)
class LostShares:
    """`LostMass` of each row and KV head, of one layer or of several; NaN where the policy's statistic shows no mass.

    Attributes:
        prompt: at the cuts of the prompt.
        decode: at the steps of generated tokens.
    """

    prompt: Float[Tensor, "*heads"]
    decode: Float[Tensor, "*heads"]


def count(
    lost: Float[Tensor, "B Hk 4"],
    report: Report,
    stays: Bool[Tensor, "B Hk S"],
    *,
    phase: Phase,
    among: Bool[Tensor, "B Hk S"] | None = None,
) -> None:
    """Add to ``lost`` the mass of a step's evicted tokens, and that of all its tokens: in a prefill to its first two
    numbers, otherwise to its last two.

    Do nothing if the policy's statistic has no mass.

    Args:
        lost: the sums of a block, which are changed.
        report: the statistic of the step, of which only the field ``mass`` is read.
        stays: whether each slot's token stays.
        phase: the kind of the step's tokens.
        among: slots that count; the others hold tokens that a sliding window has passed. ``None``: all.
    """
    if (mass := report.sums.get("mass")) is None:
        return
    if among is not None:
        mass = mass.masked_fill(~among, 0.0)
    sums = lost[..., :2] if phase is Phase.PREFILL else lost[..., 2:]
    sums[..., 0] += of_evicted(mass, stays)
    sums[..., 1] += mass.sum(dim=-1)


def of_evicted(mass: Float[Tensor, "B Hk S"], stays: Bool[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk"]:
    """Return the sum of the mass of the tokens that do not stay, for each row and head."""
    found: Tensor = torch.linalg.vecdot(mass, (~stays).to(mass.dtype))
    return found


def shares(lost: Float[Tensor, "*heads 4"]) -> LostShares:
    """Return the share of lost mass of each head in prompts and in decoding, from a block's sums; NaN where no mass
    was counted.
    """
    return LostShares(lost[..., 0] / lost[..., 1], lost[..., 2] / lost[..., 3])


def mean(layers: Sequence[Float[Tensor, "Hk 4"]]) -> LostMass:
    """Return the shares of one row, averaged over layers and KV heads; those without a mass are left out.

    Args:
        layers: each layer's sums of this row.

    Returns:
        Shares that are ``None`` where no head has a mass.
    """
    if not layers:
        return LostMass()
    # layers of one model may be on several devices
    found = shares(torch.cat([lost.cpu() for lost in layers]).double())
    return LostMass(_mean(found.prompt), _mean(found.decode))


def _mean(found: Tensor) -> float | None:
    """Return the mean of all numbers but NaN; ``None`` if there are no others."""
    value = float(found.nanmean())
    return value if math.isfinite(value) else None

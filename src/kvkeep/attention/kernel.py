"""Attention of one token per row in the native kernel, where that applies."""

from __future__ import annotations

from typing import cast

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.native import ops
from kvkeep.statistic import Low, Mass, MassAndLast, Nothing, Statistic
from kvkeep.types import AttentionOptions, Report


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    query_positions: Int[Tensor, "B 1"],
    key_positions: Int[Tensor, "B #Hk S"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "B Hq 1 E"], Report] | None:
    """The same as `cpu.attend` for ``T == 1``; ``None`` if the kernel is not there or does not know what is asked.

    Differs in what nobody may look at: a padded query, and one that sees nothing, give zeros.

    Cost:
        reads the visible part of ``B·Hk·S·(D + E)`` elements once.
    """
    if options.top is not None or not is_known(statistic):
        return None
    found = ops.attend(
        query,
        keys,
        values,
        query_positions,
        key_positions,
        options=options,
        wanted=wanted(statistic),
    )
    if found is None:
        return None
    out, *sums = found
    return out, Report(dict(zip(statistic.fields, sums, strict=False)))


def is_known(statistic: Statistic) -> bool:
    """Whether the kernels, native and Triton's, can report it."""
    kind = type(statistic)
    return kind is Nothing or kind is Low or (kind in (Mass, MassAndLast) and cast(Mass, statistic).noise is None)


def wanted(statistic: Statistic) -> ops.Wanted | None:
    """A statistic in the kernels' words."""
    if isinstance(statistic, Mass):
        second = "last" if isinstance(statistic, MassAndLast) else None
        plain = isinstance(statistic.gain, float) and statistic.gain == 1.0
        gain = None if plain else statistic.gain
        return ops.Wanted(second, statistic.rows, gain, statistic.decay, statistic.last)
    if isinstance(statistic, Low):
        return ops.Wanted("low", statistic.rows, theta=statistic.theta, live=statistic.live)
    return None

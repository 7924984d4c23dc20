"""A policy's statistic as numbers that compiled kernels take."""

from __future__ import annotations

from typing import NamedTuple, cast

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.statistic import Low, Mass, MassAndLast, Nothing, Statistic


class Wanted(NamedTuple):
    """The report of one decode step.

    Attributes:
        second: the field beside the mass: ``last``, ``low`` or none.
        counts: whether a row counts: one number per row, above 0 if it does, or one for all, 0 if none does.
        gain: factor on the logits before the reported softmax; ``None`` to report attention's own probabilities.
        decay: weight of a row relative to the one after it.
        last: newest position; decay counts from it, and ``last`` reports its row.
        theta: divides the threshold of ``low``.
        live: whether the threshold of ``low`` follows from the number of visible keys; otherwise from the position.
    """

    second: str | None = None
    counts: int | Int[Tensor, " B"] = -1
    gain: float | Float[Tensor, " B"] | None = None
    decay: float = 1.0
    last: int | Int[Tensor, " B"] = 0
    theta: float = 1.0
    live: bool = False


def is_known(statistic: Statistic) -> bool:
    """Whether the decode kernels, native and Triton's, can report the statistic."""
    kind = type(statistic)
    return kind is Nothing or kind is Low or (kind in (Mass, MassAndLast) and cast(Mass, statistic).noise is None)


def wanted(statistic: Statistic) -> Wanted | None:
    """The report that a known statistic asks for; ``None`` if it asks for none."""
    if isinstance(statistic, Mass):
        second = "last" if isinstance(statistic, MassAndLast) else None
        plain = isinstance(statistic.gain, float) and statistic.gain == 1.0
        gain = None if plain else statistic.gain
        return Wanted(second, statistic.rows, gain, statistic.decay, statistic.last)
    if isinstance(statistic, Low):
        return Wanted("low", statistic.rows, theta=statistic.theta, live=statistic.live)
    return None

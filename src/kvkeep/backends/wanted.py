"""A policy's statistic in the words of compiled kernels."""

from __future__ import annotations

from typing import NamedTuple, cast

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.statistic import Low, Mass, MassAndLast, Nothing, Statistic


class Wanted(NamedTuple):
    """What attention reports beside its output.

    Attributes:
        second: what is reported beside the mass: ``last``, ``low`` or nothing.
        counts: whether a row counts: a number, or one per row; above 0 it does, and a negative number is all.
        gain: factor on the logits of what is reported; ``None`` for the probabilities that attention uses.
        decay: weight of a row relative to the one after it.
        last: newest position, from which decay counts and which ``last`` asks for.
        theta: divides the threshold of ``low``.
        live: the threshold of ``low`` follows from the number of visible keys, not from the query's position.
    """

    second: str | None = None
    counts: int | Int[Tensor, " B"] = -1
    gain: float | Float[Tensor, " B"] | None = None
    decay: float = 1.0
    last: int | Int[Tensor, " B"] = 0
    theta: float = 1.0
    live: bool = False


def is_known(statistic: Statistic) -> bool:
    """Whether the kernels, native and Triton's, can report it."""
    kind = type(statistic)
    return kind is Nothing or kind is Low or (kind in (Mass, MassAndLast) and cast(Mass, statistic).noise is None)


def wanted(statistic: Statistic) -> Wanted | None:
    """A statistic in the kernels' words; ``None`` if nothing is to be reported."""
    if isinstance(statistic, Mass):
        second = "last" if isinstance(statistic, MassAndLast) else None
        plain = isinstance(statistic.gain, float) and statistic.gain == 1.0
        gain = None if plain else statistic.gain
        return Wanted(second, statistic.rows, gain, statistic.decay, statistic.last)
    if isinstance(statistic, Low):
        return Wanted("low", statistic.rows, theta=statistic.theta, live=statistic.live)
    return None

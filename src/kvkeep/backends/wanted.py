"""A policy's statistic as numbers that compiled kernels take."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import Low, LowRows, Mass, MassAndLast, Nothing, RowMasses, Statistic


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


class Sums(NamedTuple):
    """The report of many rows: sums over rows, each with a weight per row.

    Attributes:
        masses: weights of the sums of probabilities.
        lows: weights of the sums that count keys below their share.
        gain: factor on the logits of the probabilities that are summed, per row of the batch; ``None`` for 1.
        theta: see `Low`.
        live: see `Low`.
    """

    masses: list[Float[Tensor, "B T"]]
    lows: list[Float[Tensor, "B T"]]
    gain: Float[Tensor, " B"] | None = None
    theta: float = 1.0
    live: bool = False


def sums_wanted(statistic: Statistic, queries: Int[Tensor, "B T"]) -> Sums | None:
    """What a statistic sums over rows at these positions, in the order of its fields; ``None`` for another kind."""
    kind, selected = type(statistic), statistic.selects(queries)
    if kind is Nothing:
        return Sums([], [])
    if isinstance(statistic, LowRows):
        masses = [*statistic.weights(selected, queries).values()]
        return Sums(masses[:2], masses[2:], theta=statistic.theta, live=statistic.live)
    if isinstance(statistic, RowMasses):
        return Sums(statistic.weights_of(selected, queries), [])
    if isinstance(statistic, Low):
        return Sums([selected.float()], [selected.float()], theta=statistic.theta, live=statistic.live)
    if kind not in (Mass, MassAndLast) or cast(Mass, statistic).noise is not None:
        return None
    mass = cast(Mass, statistic)
    plain = isinstance(mass.gain, float) and mass.gain == 1.0
    gain = None if plain else torch.as_tensor(mass.gain, dtype=torch.float32, device=queries.device)
    masses = [mass.weights(selected, queries)]
    if isinstance(statistic, MassAndLast):
        newest = torch.as_tensor(mass.last, device=queries.device).view(-1, 1)
        masses.append(mass.weights(selected & (queries == newest), queries))
    return Sums(masses, [], None if gain is None else gain.expand(len(queries)))

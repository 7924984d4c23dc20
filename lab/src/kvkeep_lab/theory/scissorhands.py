"""Algorithms 1 and 2 of Scissorhands (Liu et al., arXiv:2305.17118) as plain loops, one attention head.

The letters are the paper's: budget ``B``, history window of ``w`` rows, recent window of ``r`` tokens, drop amount
``m``, attention row ``α_i``, importance record ``I``, kept set ``S_t``. Positions count from 0, so the average score of
row ``i`` is ``1 / (i + 1)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvkeep_lab.theory.loops import Row, Vector, attend


@dataclass(frozen=True)
class AlgorithmReading:
    """A reading of the two algorithms where the paper is ambiguous, or prints something that its text contradicts.

    Attributes:
        theta: a row finds a token insignificant below ``1 / (theta * n)``.
        live: ``n`` is the number of keys that the row sees instead of the row's own number.
        newest_first: of equal counts the newest token is evicted, as by a stable sort; otherwise the one with the
            smallest sum in the window, then the oldest.
        printed_slice: Algorithm 2 as printed, ``I[:-r] ← 0``, which forgets the counts of all but the recent tokens.
    """

    theta: float = 1.0
    live: bool = False
    newest_first: bool = False
    printed_slice: bool = False

    def threshold(self, i: int, row: Row) -> float:
        """Return the score below which row ``i`` finds a token insignificant."""
        return 1.0 / (self.theta * (len(row) if self.live else i + 1))


PROJECT = AlgorithmReading()
"""kvkeep's reading of the paper."""


def importance_record(window: Iterable[tuple[int, Row]], reading: AlgorithmReading = PROJECT) -> dict[int, int]:
    """Return ``I``: for each token, how many rows ``(i, α_i)`` of the window gave it less than their threshold."""
    I: dict[int, int] = {}  # noqa: E741 (the paper's letter)
    for i, alpha in window:
        for j, p in alpha.items():
            I[j] = I.get(j, 0) + int(p < reading.threshold(i, alpha))
    return I


def leaving_order(
    S: Sequence[int], window: Sequence[tuple[int, Row]], *, r: int, reading: AlgorithmReading = PROJECT
) -> list[int]:
    """Return the tokens of ``S`` (ascending) that may be evicted, the first to go first: the end of ``Argsort(I)``."""
    I = importance_record(window, reading)  # noqa: E741
    recent = set(S[max(0, len(S) - r) :])  # where `r` is more than all, all are recent
    if reading.printed_slice:
        I, recent = {j: n if j in recent else 0 for j, n in I.items()}, set()  # noqa: E741
    mass = {j: sum(alpha.get(j, 0.0) for _, alpha in window) for j in S}

    def key(j: int) -> tuple[int | float, ...]:
        return (-I.get(j, 0), -j) if reading.newest_first else (-I.get(j, 0), mass[j], j)

    return sorted((j for j in S if j not in recent), key=key)


def algorithm_2(
    S: Sequence[int], window: Sequence[tuple[int, Row]], *, r: int, m: int, reading: AlgorithmReading = PROJECT
) -> list[int]:
    """Compress the cache: evict the ``m`` tokens of ``S`` with the highest counts, but none of the ``r`` newest."""
    gone = set(leaving_order(S, window, r=r, reading=reading)[:m])
    return [j for j in S if j not in gone]


def algorithm_1(
    queries: Sequence[Vector],
    keys: Sequence[Vector],
    B: int,
    *,
    w: int,
    r: int,
    m: int,
    scaling: float,
    reading: AlgorithmReading = PROJECT,
) -> Iterator[list[int]]:
    """Run inference with a budget: attend, compress whenever more than ``B`` tokens are kept; yield each ``S_t``."""
    S: list[int] = []
    alpha: list[tuple[int, Row]] = []
    for t, query in enumerate(queries):
        S = [*S, t]
        alpha = [*alpha, (t, attend(query, keys, S, scaling))][-w:]
        if len(S) > B:
            S = algorithm_2(S, alpha, r=r, m=m, reading=reading)
        yield S

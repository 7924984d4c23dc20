"""Rules that look at the keys alone."""

from __future__ import annotations

import abc
import math

from .loops import Rule, Step, Vector, dot, evict, mean


class KeyRule(Rule):
    """Evicts by the keys of the tokens held; ``recent`` newest and ``sinks`` first tokens are no candidates.

    The loops rotate no key, so ``rotated`` makes no difference here.
    """

    def __init__(self, *row: int, recent: int = 0, sinks: int = 0, rotated: bool = True, **identity: int):
        super().__init__(*row, **identity)
        self.recent = recent
        self.sinks = sinks
        self.keys: list[list[Vector]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.keys[head] = step.keys

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        scores = self.scores({j: self.keys[head][j] for j in kept})
        return evict(kept, self.budget, scores.__getitem__, protected)

    @abc.abstractmethod
    def scores(self, keys: dict[int, Vector]) -> dict[int, float]:
        """Score the keys held, new ones included; the smallest score goes."""


class KNorm(KeyRule):
    """Devoto et al. (arXiv:2406.11430, §3): a key of low norm draws attention, so the largest norm goes."""

    def scores(self, keys: dict[int, Vector]) -> dict[int, float]:
        return {j: -norm(key) for j, key in keys.items()}


class KeyDiff(KeyRule):
    """Park et al. (arXiv:2504.15364, §3): the key goes that is most similar to all others.

    Similarity is the cosine to the anchor, the mean of the unit vectors of the keys held before the cut; in a step
    that drops several tokens the anchor is that mean for all of them. A key or an anchor of length 0 has the cosine 0.
    """

    def scores(self, keys: dict[int, Vector]) -> dict[int, float]:
        units = {j: unit(key) for j, key in keys.items()}
        anchor = unit(mean(list(units.values())))
        return {j: -dot(key, anchor) for j, key in units.items()}


def norm(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def unit(vector: Vector) -> Vector:
    length = norm(vector)
    return [x / length for x in vector] if length else vector

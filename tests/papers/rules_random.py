"""Numbers that depend on their keys alone, and the rule that evicts by them."""

from __future__ import annotations

import math

from .loops import Rule, evict


class Random(Rule):
    """policies.md §16: a number per token (``reservoir``), or per token and step (``victim``); the smallest goes.

    With a buffer (arXiv:2609.03430), more than ``budget`` tokens become ``buffer`` fewer than it.
    """

    def __init__(
        self,
        *row: int,
        mode: str = "victim",
        seed: int = 0,
        recent: int = 0,
        sinks: int = 0,
        buffer: int = 1,
        **identity: int,
    ):
        super().__init__(*row, **identity)
        self.stay = self.budget
        if buffer > 1:
            recent = max(0, min(recent, (self.budget - sinks) // 2))
            self.stay = max(1, self.budget - min(buffer, max(1, self.budget // 2)), sinks + recent)
        self.mode = mode
        self.seed = seed
        self.recent = recent
        self.sinks = sinks

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if len(kept) <= self.budget:
            return kept
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        step = [seen] if self.mode == "victim" else []
        number = {j: draw(self.seed, self.sequence, self.layer, head, j, *step) for j in kept}
        return evict(kept, self.stay, number.__getitem__, protected, margin=0.0)


def split_mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def draw(seed: int, *keys: int) -> int:
    """The upper 24 bits of a chain of hashes, one link per key."""
    state = seed
    for key in keys:
        state = split_mix(((state ^ key) + 0x9E3779B97F4A7C15) % 2**64)
    return state >> 40


def gumbel(seed: int, *keys: int) -> float:
    """A draw from the Gumbel distribution: ``-ln(-ln(u))``, with u in the middle of one of 2**24 equal cells."""
    return -math.log(-math.log((draw(seed, *keys) + 0.5) / 2**24))

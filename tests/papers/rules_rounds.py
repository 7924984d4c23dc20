"""Rules that drop many tokens at once."""

from __future__ import annotations

import abc
import cmath
import math
from typing import ClassVar

from kvkeep_lab.theory.loops import dot, softmax

from .loops import Rule, Step, Vector, evict, require_clear
from .rules_random import gumbel


class Round(Rule):
    """More than ``budget`` tokens become ``buffer`` fewer than it (at most half of it), and at least the protected."""

    def __init__(self, *row: int, buffer: int = 128, sinks: int = 0, recent: int = 0, **identity: int):
        super().__init__(*row, **identity)
        self.sinks = sinks
        self.recent = recent
        self.stay = max(1, self.budget - min(buffer, max(1, self.budget // 2)), sinks + self.recent)

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if len(kept) <= self.budget:
            return kept
        score = self.scores(head, kept, seen)
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        return evict(kept, self.stay, score.__getitem__, protected)

    @abc.abstractmethod
    def scores(self, head: int, kept: list[int], seen: int) -> dict[int, float]:
        """The scores of all tokens."""


class RKV(Round):
    """Cai et al. (arXiv:2505.24133): ``balance`` of the attention less the rest of the redundancy.

    Attention: the mean of the last ``window`` rows, of the tokens older than the protected ones, the maximum over
    ``kernel`` neighbours. Redundancy: the cosine of each key with each other one, where the newest of those above
    ``threshold`` counts as 0; the mean over the first key, then a softmax over the second.
    """

    def __init__(
        self,
        *row: int,
        window: int = 8,
        kernel: int = 7,
        balance: float = 0.07,
        threshold: float = 0.5,
        **options: int,
    ):
        super().__init__(*row, recent=min(window, row[0] // 4), **options)
        self.window = window
        self.kernel = kernel
        self.balance = balance
        self.threshold = threshold
        self.rows: list[list[dict[int, float]]] = [[] for _ in range(self.heads)]
        self.keys: list[list[Vector]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.rows[head] = (self.rows[head] + step.rows)[-self.window :]
        self.keys[head] = step.keys

    def scores(self, head: int, kept: list[int], seen: int) -> dict[int, float]:
        older = [j for j in kept if j < seen - self.recent]
        mass = [sum(row.get(j, 0.0) for row in self.rows[head]) / len(self.rows[head]) for j in older]
        half = self.kernel // 2
        attention = {j: max(mass[max(0, n - half) : n + half + 1]) for n, j in enumerate(older)}
        alike = self.redundancy(head, kept)
        return {j: self.balance * attention.get(j, 0.0) - (1 - self.balance) * alike[j] for j in kept}

    def redundancy(self, head: int, kept: list[int]) -> dict[int, float]:
        keys = {j: self.keys[head][j] for j in kept}
        unit = {j: [x / math.hypot(*key) for x in key] for j, key in keys.items()}
        total = dict.fromkeys(kept, 0.0)
        for i in kept:
            cosine = {j: dot(unit[i], unit[j]) for j in kept if j != i}
            for c in cosine.values():
                require_clear(c, self.threshold)
            newest = max((j for j, c in cosine.items() if c > self.threshold), default=None)
            for j, c in cosine.items():
                total[j] += 0.0 if j == newest else c
        return dict(zip(kept, softmax([total[j] / len(kept) for j in kept]), strict=True))


class VaSE(Round):
    """arXiv:2606.03928: ``large`` of the budget for values of the widest range, the rest drawn by attention.

    Attention: of the rows since the last burst, or the last ``recent`` rows of a prompt; the sum over ``kernel``
    neighbours among the older tokens. Drawn without replacement: the largest ``ln(attention) + Gumbel``.
    """

    def __init__(
        self,
        *row: int,
        sinks: int = 4,
        recent: int = 64,
        buffer: int = 64,
        large: float = 0.25,
        kernel: int = 5,
        seed: int = 0,
        **identity: int,
    ):
        self.rows = recent or 1
        recent = max(0, min(recent, (row[0] - sinks) // 2))
        super().__init__(*row, sinks=sinks, recent=recent, buffer=buffer, **identity)
        self.large = int(large * self.budget + 1e-9)
        self.kernel = kernel
        self.seed = seed
        self.mass: list[dict[int, float]] = [{} for _ in range(self.heads)]
        self.values: list[list[Vector]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.values[head] = step.values
        held = len(step.rows[-1]) if step.rows else 0
        if not step.decode or held <= self.stay + 1:
            self.mass[head] = {}
        for row in step.rows[-self.rows :]:
            for j, p in row.items():
                self.mass[head][j] = self.mass[head].get(j, 0.0) + p

    def scores(self, head: int, kept: list[int], seen: int) -> dict[int, float]:
        older = [j for j in kept if j < seen - self.recent]
        width = {j: max(self.values[head][j]) - min(self.values[head][j]) for j in kept}
        first = sorted(older, key=lambda j: (math.inf if j < self.sinks else width[j], j))
        large = first[len(first) - min(self.large, len(first)) :]
        mass = [self.mass[head].get(j, 0.0) for j in older]
        half = self.kernel // 2
        pooled = {j: sum(mass[max(0, n - half) : n + half + 1]) / self.kernel for n, j in enumerate(older)}
        keys = self.sequence, self.layer, head
        drawn = {j: math.log(max(pooled.get(j, 0.0), 1.2e-38)) + gumbel(self.seed, *keys, j, seen) for j in kept}
        return drawn | {j: width[j] + 1000.0 for j in large}


class TriAttention(Round):
    """arXiv:2604.04921: how much the mean query of the prompts will meet each key, before their rotation.

    Pair f of a query and of a key are the complex numbers q_f and k_f of the dims f and f + F; a pair turns by
    ``frequencies[f]`` per position. The score of the key at p, when n tokens were seen, is the mean over D = 1, 2, 4,
    ..., 2^octaves of Re Σ E[q_f] conj(k_f) exp(i·w_f·(n + D - p)), plus Σ (E|q_f| - |E q_f|)·|k_f|, plus the product of
    the dims that are not rotated. E is the mean over the queries of all prompts so far and of the group.
    """

    frequencies: ClassVar[tuple[float, ...]] = ()

    def __init__(self, *row: int, sinks: int = 4, recent: int = 24, octaves: int = 16, **options: int):
        super().__init__(*row, sinks=sinks, recent=max(0, min(recent, (row[0] - sinks) // 2)), **options)
        self.octaves = octaves
        self.queries: list[list[Vector]] = [[] for _ in range(self.heads)]
        self.keys: list[list[Vector]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.keys[head] = step.keys
        if not step.decode:
            self.queries[head] += [query for vectors in step.vectors for query in vectors]

    def pairs(self, x: Vector) -> list[complex]:
        half = len(self.frequencies)
        return [complex(x[f], x[f + half]) for f in range(half)]

    def scores(self, head: int, kept: list[int], seen: int) -> dict[int, float]:
        queries, half = self.queries[head], len(self.frequencies)
        number = max(1, len(queries))
        middle = [sum(column) / number for column in zip(*queries, strict=True)] if queries else [0.0] * 99
        length = [sum(abs(self.pairs(q)[f]) for q in queries) / number for f in range(half)]
        ahead = [2**k for k in range(self.octaves + 1)]
        found = {}
        for j in kept:
            key = self.keys[head][j]
            score = dot(middle[2 * half : len(key)], key[2 * half :])
            for f, (q, k) in enumerate(zip(self.pairs(middle), self.pairs(key), strict=True)):
                turns = sum(cmath.exp(1j * self.frequencies[f] * (seen + d - j)) for d in ahead) / len(ahead)
                score += (q * k.conjugate() * turns).real + max(0.0, length[f] - abs(q)) * abs(k)
            found[j] = score
        return found

"""H2O once more, on one head and with attention included: as the ring of the FlexGen code.

It shares nothing with the rules of `oracles` but softmax. What the paper prints stands in `kvkeep_lab.theory.h2o`.
"""

from __future__ import annotations

from .loops import Vector, dot, softmax


class FlexGenRing:
    """H2O in the FlexGen code (policies.md §4.6; FMInference/H2O, `h2o_flexgen`, `pytorch_backend.py:529-585`).

    ``2K`` slots: ``[0, K)`` heavy hitters, ``[K, 2K - 1)`` a ring of recent tokens, ``2K - 1`` the working slot.

    Args:
        K: heavy slots, at least 2.
        queries: all queries of one head, the prompt's first.
        keys: all keys of that head.
        prompt: length of the prompt, more than ``2K``.
        compete: the graduate that is weaker than every heavy hitter is overwritten (the project's decision);
            the official code always replaces the weakest heavy hitter.
    """

    def __init__(
        self, K: int, queries: list[Vector], keys: list[Vector], *, prompt: int, scaling: float, compete: bool = False
    ):
        self.K = K
        self.compete = compete
        self.queries, self.keys, self.scaling = queries, keys, scaling
        aggregate = [0.0] * prompt
        for i in range(prompt):
            for j, p in enumerate(self._attend(i, list(range(i + 1)))):
                aggregate[j] += p
        old = prompt - K + 1
        heavy = sorted(range(old), key=lambda j: aggregate[j], reverse=True)[:K]
        self.slots = [*heavy, *range(old, prompt), -1]
        self.acc = [*(aggregate[j] for j in self.slots[:-1]), 0.0]
        self.prompt = prompt

    def decode(self, i: int) -> None:
        """Step ``i = 1, 2, …``: the new token is number ``prompt + i - 1``."""
        K, slots, acc = self.K, self.slots, self.acc
        work = 2 * K - 1
        slots[work], acc[work] = self.prompt + i - 1, 0.0
        for slot, p in enumerate(self._attend(slots[work], slots)):
            acc[slot] += p
        victim = min(range(K), key=acc.__getitem__)
        oldest = work + ((i - 1) % (K - 1)) - (K - 1)
        if not (self.compete and acc[oldest] < acc[victim]):
            slots[victim], acc[victim] = slots[oldest], acc[oldest]
        slots[oldest], acc[oldest] = slots[work], acc[work]

    @property
    def kept(self) -> list[int]:
        """Positions held between steps, ascending; the working slot is free then."""
        return sorted(self.slots[:-1])

    @property
    def heavy(self) -> list[int]:
        return sorted(self.slots[: self.K])

    def _attend(self, i: int, visible: list[int]) -> Vector:
        return softmax([self.scaling * dot(self.queries[i], self.keys[j]) for j in visible])

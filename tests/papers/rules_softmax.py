"""Rules with a softmax of their own: each query head's probabilities are reshaped before the mean over the group."""

from __future__ import annotations

import math

from kvkeep_lab.theory import ahakv
from kvkeep_lab.theory.ahakv import refine, sg_softmax

from .loops import Rule, Step, average, evict, total
from .rules_random import gumbel


class AhaKV(Rule):
    """policies.md §6, AhaKV (Algorithm 1): the last rows of the prompt, a steeper softmax, and the values' norms.

    A row of SG-softmax is the row of probabilities to the power of the gain, normalised over the keys it sees, per
    query head. The gain is ``sqrt(2 ln(i / budget))`` with i the tokens seen at the end of the last prefill step, and
    at least 1; without ``clamp`` at least 0. A sequence that never had a prefill step has i = 0.

    A prefill step sums its last ``recent`` rows, and forgets the sums of all earlier steps; without
    ``recent_accumulation`` all rows of all steps are summed, those of decode steps too. Scores are these sums times
    the value prior: squared L2 norms of the values, a mean filter of odd width ``kernel`` over the tokens in order of
    position, at the ends over what is there, divided by the largest; held and new tokens count before any goes.

    A decode step adds its row to the scores as they are; the prior of the last prefill step stays in them.
    ``sinks`` first and ``recent`` newest tokens are no candidates.
    """

    def __init__(
        self,
        *row: int,
        recent: int = 32,
        sinks: int = 0,
        kernel: int = 5,
        recent_accumulation: bool = True,
        sg_softmax: bool = True,
        value_prior: bool = True,
        clamp: bool = True,
        **identity: int,
    ):
        super().__init__(*row, **identity)
        self.recent = recent
        self.sinks = sinks
        self.kernel = kernel
        self.recent_accumulation = recent_accumulation
        self.sg_softmax = sg_softmax
        self.value_prior = value_prior
        self.clamp = clamp
        self.gains = [self.gain(0)] * self.heads
        self.sums: list[dict[int, float]] = [{} for _ in range(self.heads)]
        self.scores: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def gain(self, i: int) -> float:
        """How much steeper than softmax, after a prompt that ends with ``i`` tokens seen."""
        return ahakv.gain(i, self.budget, clamp=self.clamp) if self.sg_softmax else 1.0

    def look(self, head: int, step: Step) -> None:
        if not step.decode:
            self.gains[head] = self.gain(step.queries[-1] + 1)
        rows = [average([sg_softmax(p, self.gains[head]) for p in heads]) for heads in zip(*step.heads, strict=True)]
        if step.decode:
            self.sums[head] = total([self.sums[head], *rows])
            self.scores[head] = total([self.scores[head], *rows])
            return
        if self.recent_accumulation:
            self.sums[head] = total(rows[max(0, len(rows) - self.recent) :])
        else:
            self.sums[head] = total([self.sums[head], *rows])
        sums = {j: self.sums[head].get(j, 0.0) for j in step.rows[-1]}
        values = [step.values[j] for j in sums]
        self.scores[head] = refine(sums, values, self.kernel) if self.value_prior else sums

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        return evict(kept, self.budget, self.scores[head].__getitem__, protected)


class Keyformer(Rule):
    """policies.md §13, Adnan et al. (arXiv:2403.09054): accumulated softmax of noisy logits at a rising temperature.

    Per query head and row: softmax over the visible keys of (x + zeta) / tau, x the scaled logit and zeta a Gumbel
    number for each pair of query and key (0 without ``noise``). A softmax does not see a constant, so ln p stands in
    for x. ``tau`` is ``tau_start`` in a prefill step; in the n-th decode step since then, or since the
    beginning, it is n / max_new_tokens of the way to ``tau_end``, where it stays. Everything is summed up.

    ``recent`` newest, by default ``int(share * budget)``, and ``sinks`` first tokens are no candidates. With
    ``release_quirk`` (the released code) the token just before the recent window goes first, unless it is a sink: its
    column is in neither set, after a prompt as after every generated token. So nothing that was generated becomes a
    key token.
    """

    def __init__(
        self,
        *row: int,
        recent: int | None = None,
        sinks: int = 0,
        share: float = 0.3,
        tau_start: float = 1.0,
        tau_end: float = 2.0,
        max_new_tokens: int = 256,
        seed: int = 0,
        noise: bool = True,
        release_quirk: bool = False,
        **identity: int,
    ):
        super().__init__(*row, **identity)
        self.recent = int(self.budget * share) if recent is None else recent
        self.sinks = sinks
        self.tau_start = tau_start
        self.tau_end = tau_end
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.noise = noise
        self.release_quirk = release_quirk
        self.steps = [0] * self.heads
        self.scores: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.steps[head] = self.steps[head] + 1 if step.decode else 0
        way = min(1.0, self.steps[head] / self.max_new_tokens)
        tau = self.tau_start + (self.tau_end - self.tau_start) * way
        for n, i in enumerate(step.queries):
            group = [
                self.noisy(rows[n], tau, head * len(step.heads) + g, i) for g, rows in enumerate(step.heads)
            ]  # heads are numbered over the whole layer
            self.scores[head] = total([self.scores[head], average(group)])

    def noisy(self, row: dict[int, float], tau: float, query_head: int, i: int) -> dict[int, float]:
        zeta = {j: self.zeta(query_head, i, j) if self.noise else 0.0 for j in row}
        weights = {j: p ** (1.0 / tau) * math.exp(zeta[j] / tau) for j, p in row.items()}
        whole = sum(weights.values())
        return {j: weight / whole for j, weight in weights.items()}

    def zeta(self, query_head: int, i: int, j: int) -> float:
        return gumbel(self.seed, self.sequence, self.layer, query_head, i, j)

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        graduate = seen - 1 - self.recent
        if self.release_quirk and len(kept) > self.budget and graduate >= self.sinks:
            kept = [j for j in kept if j != graduate]
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        return evict(kept, self.budget, self.scores[head].__getitem__, protected)

"""Rules that select in the prompt and leave the generated tokens to something simpler."""

from __future__ import annotations

import abc
import math
from fractions import Fraction
from typing import ClassVar, TypeAlias

from kvkeep_lab.theory.loops import dot

from .loops import OverBudgetError, Rule, Step, Vector, evict, require_clear, require_margin, total
from .rules_random import gumbel

Projection: TypeAlias = list[list[Vector]] | None
"""A layer's output projection: for each query head the numbers of each output, by dim of the head."""


def projected(x: Vector, rows: list[Vector]) -> Vector:
    return [dot(row, x) for row in rows]


class PromptRule(Rule):
    """Selects in a prefill step that ends over ``budget``; ``decode`` says what goes when a generated token comes.

    * ``local``: the oldest of the tokens that the last selection did not choose: the ``unselected`` newest of the
      prompt and everything generated since. A sequence that never had a prefill step has chosen nothing.
    * ``score``: the smallest score. The rows of decode steps are added to the scores of the last prefill step, new
      tokens start at 0; the ``unselected`` newest tokens are no candidates.
    * ``grow``: nothing, and more than ``budget`` tokens are an error. A prefill step leaves ``room`` slots free.

    The ``sinks`` first tokens never go. A prefill step replaces all scores.
    """

    def __init__(
        self, *row: int, unselected: int, sinks: int = 0, decode: str = "local", room: int = 0, **identity: int
    ):
        super().__init__(*row, **identity)
        self.unselected = unselected
        self.sinks = sinks
        self.decode = decode
        self.prompt_budget = self.budget - (room if decode == "grow" else 0)
        self.prompt_end = 0
        self.scores: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        if step.decode:
            self.scores[head] = total([self.scores[head], *step.rows])
        else:
            self.scores[head] = self.prompt_scores(step)

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if not decode:
            self.prompt_end = seen
            return self.select(head, kept, seen) if len(kept) > self.prompt_budget else kept
        if self.decode == "grow":
            if len(kept) > self.budget:
                raise OverBudgetError(f"{len(kept)} tokens, budget {self.budget}")
            return kept
        if self.decode == "local":
            chosen = [j for j in kept if j < self.sinks or j < self.prompt_end - self.unselected]
            return evict(kept, self.budget, lambda j: 0.0, chosen)
        return evict(kept, self.budget, self.scores[head].__getitem__, self.protected(kept, seen))

    def protected(self, kept: list[int], seen: int) -> list[int]:
        return [j for j in kept if j < self.sinks or j >= seen - self.unselected]

    @abc.abstractmethod
    def prompt_scores(self, step: Step) -> dict[int, float]:
        """Score all keys, held and new, from the rows of a prefill step."""

    @abc.abstractmethod
    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        """Cut what is held after a prefill step to ``prompt_budget``."""


class SnapKV(PromptRule):
    """policies.md §7, Li et al. (arXiv:2404.14469): what the last rows of the prompt look at, and its neighbours.

    The ``window`` newest tokens stay. Every older one has its probabilities summed over the last ``window`` rows of
    the step (all rows of a shorter one), then pooled with an odd ``kernel`` over the older tokens that are held, in
    order of position: ``max`` over the neighbours that are there, ``avg`` as if zeros stood beyond the ends. The
    smallest go. The window's own tokens have the score 0. With ``recent`` so many of the newest tokens stay in place
    of the window, at most half of the budget; those of the window that do not stay are older tokens, too. With
    ``decay`` the last row has the weight 1, the one before it ``decay``, and so on.
    """

    def __init__(
        self,
        *row: int,
        window: int = 32,
        kernel: int = 7,
        recent: int = 0,
        pool: str = "max",
        decay: float = 1.0,
        **options: int,
    ):
        super().__init__(*row, unselected=window, **options)
        self.unselected = min(recent, self.budget // 2) if recent else window
        self.window = window
        self.kernel = kernel
        self.pool = pool
        self.decay = decay

    def worth(self, step: Step) -> dict[int, float]:
        """What is pooled: the mass of the last rows."""
        newest_first = enumerate(reversed(step.rows[-self.window :]))
        return total({j: p * self.decay**age for j, p in row.items()} for age, row in newest_first)

    def prompt_scores(self, step: Step) -> dict[int, float]:
        mass = self.worth(step)
        older = [j for j in step.rows[-1] if j <= step.queries[-1] - min(self.window, self.unselected)]
        half = self.kernel // 2
        around = [[mass[j] for j in older[max(0, n - half) : n + half + 1]] for n in range(len(older))]
        pooled = [max(part) if self.pool == "max" else sum(part) / self.kernel for part in around]
        return dict.fromkeys(step.rows[-1], 0.0) | dict(zip(older, pooled, strict=True))

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        return evict(kept, self.prompt_budget, self.scores[head].__getitem__, self.protected(kept, seen))


class ReSTKV(SnapKV):
    """retention.md §2: a/(1 - a)·‖o - v‖, the exact change of o = Σ a v when a token goes and the rest is rescaled.

    a is the mean of the window's rows with the weights 1, ``decay``, ``decay²``, ... from the last row backwards.
    ``output`` is the projection of each query head, rows of numbers by dim, if there is any: then the change is that of
    what the group's heads add to the layer's output, all with this o and this a.
    """

    output: ClassVar[Projection] = None

    def __init__(self, *row: int, decay: float = 0.7, **options: int):
        super().__init__(*row, decay=decay, **options)
        self.head = 0

    def look(self, head: int, step: Step) -> None:
        self.head = head
        super().look(head, step)

    def worth(self, step: Step) -> dict[int, float]:
        mass = super().worth(step)
        share = {j: m / sum(mass.values()) for j, m in mass.items()}
        columns = range(len(step.values[0]))
        output = [sum(a * step.values[j][e] for j, a in share.items()) for e in columns]
        change = {j: self.length([o - v for o, v in zip(output, step.values[j], strict=True)]) for j in share}
        return {j: a / (1 - a) * change[j] if a < 1 else 0.0 for j, a in share.items()}

    def length(self, x: Vector) -> float:
        if self.output is None:
            return math.hypot(*x)
        group = len(self.output) // self.heads
        mine = [projected(x, one) for one in self.output[self.head * group : (self.head + 1) * group]]
        return math.hypot(*map(sum, zip(*mine, strict=True)))


class AdaKV(SnapKV):
    """policies.md §9, Feng et al. (arXiv:2407.11550): SnapKV's scores, and a budget of its own for every head.

    ``base`` is the budget less the window (and ``room``). The tokens older than the window of all heads are ranked
    together, and the best ``heads * base`` counted by head; a head's share is that number times ``1 - alpha`` plus
    ``int(alpha * base)``, rounded so that the shares add up (what the shares lack is first given to all alike, then to
    the largest remainders, the first head of equals first). A prompt with no head that has more than ``base`` older
    tokens leaves the budgets equal. In every later prefill step the heads share what they have together.
    """

    def __init__(self, *row: int, alpha: float = 0.2, room: int = 0, **options: int):
        super().__init__(*row, room=room, **options)
        self.alpha = alpha
        self.fixed = self.unselected + room
        self.room = room
        self.budgets = [self.budget] * self.heads
        self.chosen_for = -1

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if not decode and self.chosen_for != seen:
            self.chosen_for = seen
            self.budgets = self.share(seen)
        nominal, self.budget = self.budget, self.budgets[head]
        self.prompt_budget = self.budget - self.room
        stay = super().cut(head, kept, seen, decode=decode)
        self.budget = nominal
        return stay

    def share(self, seen: int) -> list[int]:
        base = self.budget - self.fixed
        older = [(s, j, h) for h in range(self.heads) for j, s in self.scores[h].items() if j < seen - self.unselected]
        if max(sum(h == head for _, _, h in older) for head in range(self.heads)) <= base:
            return [base + self.fixed] * self.heads
        total = self.heads * base
        ranked = sorted(older, reverse=True)
        if len(ranked) > total:
            require_margin(ranked[total][0], ranked[total - 1][0])
        counts = [sum(h == head for _, _, h in ranked[:total]) for head in range(self.heads)]
        exact = [Fraction(n) * (1 - Fraction(str(self.alpha))) + int(self.alpha * base) for n in counts]
        whole = [math.floor(x) for x in exact]
        for _ in range((total - sum(whole)) // self.heads):
            whole = [n + 1 for n in whole]
        lack = total - sum(whole)
        for head in sorted(range(self.heads), key=lambda h: (math.floor(exact[h]) - exact[h], h))[:lack]:
            whole[head] += 1
        return [n + self.fixed for n in whole]


class DefensiveKV(AdaKV):
    """Feng et al. (ICLR 2026), AdaKV's sharing with alpha 0 of these scores.

    Each of the last ``window`` rows of each query head: its probabilities of the tokens older than the window are
    averaged with an odd ``kernel``, as if zeros stood beyond the ends, and scaled to the sum that they had. The largest
    of all rows and of the group's heads is raised to at least the mean over the tokens, and multiplied with the token's
    share of all heads' sizes, the L1 norms of its value (after the ``output`` projection; mean over the group) in the
    step in which it came. A generated token has an equal share. Tokens with the largest mean probability go before all
    others, as long as they and the window have less than ``first`` of it.
    """

    output: ClassVar[Projection] = None

    def __init__(
        self, *row: int, window: int = 32, kernel: int = 5, first: float = 0.9, alpha: float = 0.0, **options: int
    ):
        super().__init__(*row, window=window, kernel=kernel, alpha=alpha, **options)
        self.first = first
        self.steps: list[Step | None] = [None] * self.heads
        self.shares: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        if step.decode:
            super().look(head, step)
        self.steps[head] = step

    def share(self, seen: int) -> list[int]:
        self.weigh()
        self.scores = [self.rated(head, seen) for head in range(self.heads)]
        return super().share(seen)

    def weigh(self) -> None:
        for j in self.steps[0].queries:
            sizes = [self.size(head, step.values[j]) for head, step in enumerate(self.steps)]
            for head, size in enumerate(sizes):
                self.shares[head][j] = size / sum(sizes)

    def size(self, head: int, value: Vector) -> float:
        if self.output is None:
            return sum(map(abs, value))
        group = len(self.output) // self.heads
        mine = self.output[head * group : (head + 1) * group]
        return sum(sum(map(abs, projected(value, one))) for one in mine) / group

    def rated(self, head: int, seen: int) -> dict[int, float]:
        step = self.steps[head]
        rows = [row for one in step.heads for row in one[-self.window :]]
        older = [j for j in step.rows[-1] if j < seen - self.window]
        smooth = [self.smoothed([row[j] for j in older]) for row in rows]
        worst = [max(column) for column in zip(*smooth, strict=True)]
        least = sum(worst) / max(1, len(worst))
        found = {j: max(p, least) * self.shares[head].get(j, 1 / self.heads) for j, p in zip(older, worst, strict=True)}
        attention = {j: sum(row[j] for row in rows) / len(rows) for j in older}
        return dict.fromkeys(step.rows[-1], 0.0) | found | self.early(attention)

    def smoothed(self, row: list[float]) -> list[float]:
        half = self.kernel // 2
        found = [sum(row[max(0, n - half) : n + half + 1]) / self.kernel for n in range(len(row))]
        return [p * sum(row) / sum(found) for p in found] if sum(found) else found

    def early(self, attention: dict[int, float]) -> dict[int, float]:
        so_far, found = 1 - sum(attention.values()), {}
        for j in sorted(attention, key=lambda j: (attention[j], j), reverse=True):
            so_far += attention[j]
            require_clear(so_far, self.first)
            if so_far >= self.first or len(found) >= self.budget - self.fixed:
                break
            found[j] = 1 + attention[j]
        return found


class NACL(PromptRule):
    """policies.md §10, Chen et al. (arXiv:2408.03675): proxy rows choose some tokens of the prompt, chance others.

    The proxies are the last ``max(1, int(proxies * rows))`` rows of a prefill step; a token's score is the sum of its
    probabilities there. ``sinks`` first and ``recent`` newest tokens (by default an eighth of the budget) stay. Of the
    R slots that are left, the largest scores take ``R - int(random * R)``; the others are drawn from the rest without
    replacement, in proportion to ``exp(score / temperature)``: the largest sums of score / temperature and a Gumbel
    number per head and position.
    """

    def __init__(
        self,
        *row: int,
        proxies: float = 0.1,
        random: float = 7 / 19,
        recent: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        sinks: int = 4,
        **options: int,
    ):
        super().__init__(*row, unselected=row[0] // 8 if recent is None else recent, sinks=sinks, **options)
        self.proxies = proxies
        self.random = random
        self.temperature = temperature
        self.seed = seed

    def prompt_scores(self, step: Step) -> dict[int, float]:
        return total(step.rows[-max(1, int(self.proxies * len(step.rows))) :])

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        score = self.scores[head]
        protected = self.protected(kept, seen)
        others = [j for j in kept if j not in protected]
        left = self.prompt_budget - len(protected)
        drawn = int(self.random * left)
        chosen = evict(others, left - drawn, score.__getitem__, [])
        number = {j: score[j] / self.temperature + self.gumbel(head, j) for j in others if j not in chosen}
        return sorted([*protected, *chosen, *evict(list(number), drawn, number.__getitem__, [])])

    def gumbel(self, head: int, j: int) -> float:
        return gumbel(self.seed, self.sequence, self.layer, head, j)

"""A bounded cache as plain Python: lists of positions, dictionaries of scores, attention in float64 loops.

Nothing here knows of tensors, slots or blocks. One `Sequence` is one row of a batch; it never sees another row. The
order of a step is attend, then look, then cut (policies.md §0.2, order A).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvkeep_lab.theory.loops import Vector, dot, softmax

MARGIN = 1e-5
"""Two scores that decide who goes must be equal or this far apart (relative to 1 or to the larger score)."""


class TooCloseError(Exception):
    """A decision hangs on a difference that float32 may not resolve; the test has to choose other inputs."""


class OverBudgetError(Exception):
    """A policy that never evicts was given more tokens than its budget."""


def mean(vectors: list[Vector]) -> Vector:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def evict(
    kept: list[int],
    budget: int,
    score: Callable[[int], float],
    protected: Iterable[int],
    *,
    margin: float = MARGIN,
) -> list[int]:
    """Drop the smallest (score, position) until ``budget`` are left; protected positions are no candidates."""
    candidates = set(kept) - set(protected)
    stay, last_gone = list(kept), None
    while len(stay) > budget:
        last_gone = min(candidates, key=lambda j: (score(j), j))
        candidates.remove(last_gone)
        stay.remove(last_gone)
    if last_gone is not None and candidates:
        require_margin(score(last_gone), min(score(j) for j in candidates), margin)
    return stay


def require_margin(goes: float, stays: float, margin: float = MARGIN) -> None:
    """Refuse a decision that is neither an exact tie nor clear."""
    if 0.0 < stays - goes <= margin * max(1.0, stays):
        raise TooCloseError(f"{goes!r} goes and {stays!r} stays")


def require_clear(p: float, threshold: float) -> None:
    """Refuse a comparison of a probability with another number that is neither equal to it nor clearly away."""
    if 0.0 < abs(p - threshold) <= MARGIN * threshold:
        raise TooCloseError(f"{p!r} against {threshold!r}")


def total(rows: Iterable[dict[int, float]]) -> dict[int, float]:
    """Key position → its column's sum over the rows."""
    sums: dict[int, float] = {}
    for row in rows:
        for j, p in row.items():
            sums[j] = sums.get(j, 0.0) + p
    return sums


def average(rows: list[dict[int, float]]) -> dict[int, float]:
    """The mean of rows over the same keys."""
    return {j: sum(row[j] for row in rows) / len(rows) for j in rows[0]}


@dataclass(frozen=True)
class Step:
    """What one KV head shows of one step, after attention and before anything goes.

    A query sees the keys that were held before the step and the new ones up to itself, so the length of its row is
    also the number of tokens that the head holds once that query's token has been appended.

    Attributes:
        queries: positions of the new tokens.
        rows: per query, key position → probability, mean over the group; keys ascending.
        heads: the same before the mean: per query head of the group, then per query.
        keys: every key of this KV head so far, by position.
        values: every value likewise.
        decode: the row received exactly one token.
        vectors: per query head of the group, the new tokens' queries.
        scaling: factor on the logits.
    """

    queries: list[int]
    rows: list[dict[int, float]]
    heads: list[list[dict[int, float]]]
    keys: list[Vector]
    values: list[Vector]
    decode: bool
    vectors: list[list[Vector]]
    scaling: float


class Rule(abc.ABC):
    """A policy on one row: it may look at the probabilities, and it cuts the lists of kept positions.

    Args:
        budget: tokens that may stay after a step.
        heads: KV heads of the row.
        layer: number of the layer, for randomness.
        sequence: identity of the row, for randomness.
    """

    def __init__(self, budget: int, heads: int, *, layer: int = 0, sequence: int = 0):
        self.budget = budget
        self.heads = heads
        self.layer = layer
        self.sequence = sequence

    def look(self, head: int, step: Step) -> None:  # noqa: B027 (some rules do not look)
        """See what a KV head shows of a step."""

    @abc.abstractmethod
    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        """Say which positions stay, given those held and the number of tokens seen so far."""


class Sequence:
    """One row: the history of its tokens, what each KV head has kept of it, and the rule that decides.

    Attributes:
        kept: positions that each KV head holds, ascending.
        rows: every row of group-mean probabilities that was ever computed, per KV head.
    """

    def __init__(self, rule: Rule, scaling: float):
        self.rule = rule
        self.scaling = scaling
        self.seen = 0
        self.kept: list[list[int]] = [[] for _ in range(rule.heads)]
        self.rows: list[list[dict[int, float]]] = [[] for _ in range(rule.heads)]
        self._keys: list[list[Vector]] = [[] for _ in range(rule.heads)]
        self._values: list[list[Vector]] = [[] for _ in range(rule.heads)]

    def feed(
        self, queries: list[list[Vector]], keys: list[list[Vector]], values: list[list[Vector]], *, decode: bool
    ) -> list[list[Vector]]:
        """Take new tokens at once (``[head][token]`` → vector); all attend, then one cut. Returns the outputs."""
        group = len(queries) // len(keys)
        new = list(range(self.seen, self.seen + len(keys[0])))
        self.seen += len(new)
        outputs: list[list[Vector]] = []
        for head in range(self.rule.heads):
            self._keys[head] += keys[head]
            self._values[head] += values[head]
            mine = queries[head * group : (head + 1) * group]
            attended = [self._attend(head, [query[t] for query in mine], new[: t + 1]) for t in range(len(new))]
            per_head = [[rows[g] for rows, _ in attended] for g in range(group)]
            rows = [average(rows) for rows, _ in attended]
            outputs += [[out[g] for _, out in attended] for g in range(group)]
            self.rows[head] += rows
            seen = (self._keys[head], self._values[head], decode, mine, self.scaling)
            self.rule.look(head, Step(new, rows, per_head, *seen))
        self.kept = [self.rule.cut(head, kept + new, self.seen, decode=decode) for head, kept in enumerate(self.kept)]
        return outputs

    def column_sum(self, head: int, position: int, seen: int) -> float:
        """Mass of a key by definition: its column summed over the rows of the first ``seen`` tokens."""
        return sum(row.get(position, 0.0) for row in self.rows[head][:seen])

    def _attend(self, head: int, queries: list[Vector], new: list[int]) -> tuple[list[dict[int, float]], list[Vector]]:
        """One token's queries over what it can see: the kept keys and the new ones up to itself. Per query head."""
        visible = self.kept[head] + new
        keys = [self._keys[head][j] for j in visible]
        values = list(zip(*(self._values[head][j] for j in visible), strict=True))
        per_query = [softmax([self.scaling * dot(query, key) for key in keys]) for query in queries]
        outputs = [[dot(p, list(column)) for column in values] for p in per_query]
        return [dict(zip(visible, row, strict=True)) for row in per_query], outputs

"""Every policy as its own plain rule, written from the papers, each with its source.

The rules are slow and literal on purpose: dictionaries by position, explicit buffers, Python integers.
"""

from __future__ import annotations

from .loops import OverBudgetError, Rule, evict


class Full(Rule):
    """policies.md §1: no statistic, no eviction, an error when the budget is exceeded."""

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if len(kept) > self.budget:
            raise OverBudgetError(f"{len(kept)} tokens, budget {self.budget}")
        return kept


class Local(Rule):
    """policies.md §2, the baseline "Local" of H2O (arXiv:2306.14048, §5): the last ``budget`` tokens."""

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        return [j for j in kept if j >= seen - self.budget]


class StreamingLLM(Rule):
    """policies.md §3, Xiao et al. (arXiv:2309.17453, §3.2): the first ``sinks`` and the last ``budget - sinks``."""

    def __init__(self, *row: int, sinks: int = 4, **identity: int):
        super().__init__(*row, **identity)
        self.sinks = sinks

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        last = self.budget - self.sinks
        return [j for j in kept if j < self.sinks or j >= seen - last]


class H2O(Rule):
    """policies.md §4.3, Zhang et al. (arXiv:2306.14048, Algorithm 1 and §5.1): accumulated attention.

    ``recent`` newest and ``sinks`` first tokens are no candidates; half of the budget is recent by default. With
    ``graduate="replace"`` (§4.6) the token that leaves the recent window in a decode step is no candidate either.
    """

    def __init__(
        self, *row: int, recent: int | None = None, sinks: int = 0, graduate: str = "compete", **identity: int
    ):
        super().__init__(*row, **identity)
        self.recent = self.budget // 2 if recent is None else recent
        self.sinks = sinks
        self.graduate = graduate
        self.mass: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, rows: list[dict[int, float]]) -> None:
        for row in rows:
            for j, p in row.items():
                self.mass[head][j] = self.mass[head].get(j, 0.0) + p

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = {j for j in kept if j < self.sinks or j >= seen - self.recent}
        others = set(kept) - protected
        graduate = seen - 1 - self.recent
        if decode and self.graduate == "replace" and others != {graduate}:
            protected.add(graduate)
        return evict(kept, self.budget, self.mass[head].__getitem__, protected)


class H2OAvg(Rule):
    """policies.md §4.8, H2O Appendix B.2: the sum divided by the number of query rows that could see the key.

    Two explicit buffers: ``total`` and ``count``.
    """

    def __init__(self, *row: int, recent: int | None = None, sinks: int = 0, **identity: int):
        super().__init__(*row, **identity)
        self.recent = self.budget // 2 if recent is None else recent
        self.sinks = sinks
        self.total: list[dict[int, float]] = [{} for _ in range(self.heads)]
        self.count: list[dict[int, int]] = [{} for _ in range(self.heads)]

    def look(self, head: int, rows: list[dict[int, float]]) -> None:
        for row in rows:
            for j, p in row.items():
                self.total[head][j] = self.total[head].get(j, 0.0) + p
                self.count[head][j] = self.count[head].get(j, 0) + 1

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        return evict(kept, self.budget, lambda j: self.total[head][j] / self.count[head][j], protected)


class TOVA(Rule):
    """policies.md §11, Oren et al. (arXiv:2401.06104, §3): attention of the last query row, averaged over all heads.

    ``per_head`` ranks in each KV head on its own; ``protect_last`` spares the newest token.
    """

    def __init__(self, *row: int, per_head: bool = False, protect_last: bool = False, **identity: int):
        super().__init__(*row, **identity)
        self.per_head = per_head
        self.protect_last = protect_last
        self.last: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, rows: list[dict[int, float]]) -> None:
        self.last[head] = rows[-1]

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        voters = [self.last[head]] if self.per_head else self.last
        protected = [seen - 1] if self.protect_last else []
        return evict(kept, self.budget, lambda j: sum(last[j] for last in voters) / len(voters), protected)


class Random(Rule):
    """policies.md §16: a number per token (``reservoir``), or per token and step (``victim``); the smallest goes."""

    def __init__(
        self, *row: int, mode: str = "victim", seed: int = 0, recent: int = 0, sinks: int = 0, **identity: int
    ):
        super().__init__(*row, **identity)
        self.mode = mode
        self.seed = seed
        self.recent = recent
        self.sinks = sinks

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        step = [seen] if self.mode == "victim" else []
        number = {j: draw(self.seed, self.sequence, self.layer, head, j, *step) for j in kept}
        return evict(kept, self.budget, number.__getitem__, protected, margin=0.0)


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


RULES: dict[str, type[Rule]] = {
    "full": Full,
    "h2o": H2O,
    "h2o_avg": H2OAvg,
    "local": Local,
    "random": Random,
    "streaming_llm": StreamingLLM,
    "tova": TOVA,
}


def rule(text: str, budget: int, heads: int, **identity: int) -> Rule:
    """Build the rule that a policy string such as ``h2o:recent=3`` names, without the package's registry."""
    name, _, tail = text.partition(":")
    options = dict(item.split("=") for item in tail.split(",") if item)
    return RULES[name](budget, heads, **{key: _value(value) for key, value in options.items()}, **identity)


def _value(text: str) -> int | bool | str:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)

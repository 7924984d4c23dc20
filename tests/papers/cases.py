"""The cases: shapes of an experiment, and the queries, keys and values that go into it, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

D = 8
E = 6


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        policy: the policy's string.
        budget: tokens per row and head, one number or one per row.
        turns: tokens of each call of ``step``; a 1 is a decode step.
        inputs: how queries and keys are made, a name in `MAKERS`.
        group: query heads per KV head.
        heads: KV heads.
        chunk: ``prefill_chunk``.
        pads: per row, padded columns on the left of every turn of more than one token; their number is the batch.
        pause: the second row gets no token in every ``pause``-th decode step (0: it always gets one).
    """

    policy: str
    budget: int | tuple[int, ...]
    turns: tuple[int, ...]
    inputs: str = "random"
    group: int = 2
    heads: int = 2
    chunk: int | None = None
    pads: tuple[int, ...] = (0, 0)
    pause: int = 0

    def __str__(self) -> str:
        chunk = f"-chunk{self.chunk}" if self.chunk else ""
        pads = f"-pads{','.join(map(str, self.pads))}" if any(self.pads) else ""
        pause = f"-pause{self.pause}" if self.pause else ""
        return (
            f"{self.policy}-b{self.budget}-{self.inputs}-{_show_turns(self.turns)}"
            f"-heads{self.heads}x{self.group}{chunk}{pads}{pause}"
        )

    @property
    def scaling(self) -> float:
        return {"hard": 1000.0, "twins": 0.5}.get(self.inputs, D**-0.5)

    def budget_of(self, row: int) -> int:
        return self.budget if isinstance(self.budget, int) else self.budget[row]


def _show_turns(turns: tuple[int, ...]) -> str:
    """``(24, 1, 1, 1, 9)`` → ``24+3x1+9``."""
    parts: list[str] = []
    ones = 0
    for turn in (*turns, 0):
        if turn != 1 and ones:
            parts.append(f"{ones}x1")
        ones = ones + 1 if turn == 1 else 0
        parts += [str(turn)] if turn > 1 else []
    return "+".join(parts)


# -- the usual cases of a policy ---------------------------------------------------------------------------------------

DECODE = (1,) * 60
CHAT = (21, *(1,) * 20, 10, *(1,) * 40)


def family(policy: str, *, budgets: tuple[int, ...] = (1, 2, 5, 16), inputs: str = "random") -> list[Case]:
    """What every policy has to get right: prompts, chunks, ragged batches, turns, groups, budgets."""
    small, large = budgets[-2:]
    cases = [
        *(Case(policy, budget, (24, *DECODE), pads=(0,)) for budget in budgets),
        Case(policy, large, (24, *DECODE), group=1),
        Case(policy, large, (24, *DECODE), group=4, heads=1),
        Case(policy, large, (1,) * 64, heads=3, group=1),
        Case(policy, large, (25, *DECODE), chunk=3, pads=(0,)),
        Case(policy, small, (25, *DECODE), chunk=8, group=1),
        Case(policy, large, (24, *DECODE), pads=(0, 7, 23), heads=1),
        Case(policy, small, (25, *DECODE), pads=(9, 0, 6), chunk=3, heads=1),
        Case(policy, large, CHAT, pads=(0, 4), pause=5, group=1),
        Case(policy, (large, small), CHAT, pads=(8, 0), chunk=8, group=1),
    ]
    return [replace(case, inputs=inputs) for case in cases]


def variant(policy: str, *, budgets: tuple[int, ...] = (2, 16), inputs: str = "random") -> list[Case]:
    """Fewer cases that mix more, for an option of a policy that has its `family`."""
    small, large = budgets[-2:]
    cases = [
        *(Case(policy, budget, (24, *DECODE), pads=(0,)) for budget in budgets),
        Case(policy, large, CHAT, group=1, pads=(0, 5), pause=5),
        Case(policy, (small, large, large), (25, *DECODE), heads=1, chunk=3, pads=(9, 0, 6)),
    ]
    return [replace(case, inputs=inputs) for case in cases]


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """All tokens of one row, without padding: ``(heads, tokens, dim)`` in float32."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def _random(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal queries and keys; the queries long enough for uneven attention."""
    queries = 1.5 * torch.randn(case.heads * case.group, n, D, generator=generator)
    return queries, torch.randn(case.heads, n, D, generator=generator)


def _drift(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Later keys attract more, with much noise, so that young tokens can outweigh old ones. For short streams only:
    float32 loses digits as the logits grow."""
    queries, keys = _random(case, n, generator)
    queries[:, :, 0] = 3.0
    keys[:, :, 0] = torch.arange(n) - n / 2 + 2.0 * keys[:, :, 0]
    return queries, keys


def _twins(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Few different keys, so that many tokens are identical; small integers and a scaling of 1/2, so that float32
    computes every logit exactly and identical keys tie to the last bit, whichever slots they sit in.

    Matrix products may add the rows of different columns in different orders (it depends on the processor), so where
    equal sums have to tie, a case should have no more than two probabilities in each: rows that count times group."""
    queries = torch.randint(-2, 3, (case.heads * case.group, n, D), generator=generator).float()
    kinds = torch.randint(-1, 2, (case.heads, 5, D), generator=generator).float()
    return queries, kinds[:, torch.randint(5, (n,), generator=generator)]


def _constant(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Zero queries: every visible key gets the same probability."""
    _, keys = _random(case, n, generator)
    return torch.zeros(case.heads * case.group, n, D), keys


def _sink(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first key takes everything: the probabilities of all others are exactly zero."""
    queries = torch.zeros(case.heads * case.group, n, D)
    queries[:, :, 0] = 100.0
    _, keys = _random(case, n, generator)
    keys[:, :, 0] = 0.0
    keys[:, 0, 0] = 100.0
    return queries, keys


def _hard(case: Case, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits are multiples of 1000: each query takes one key (or splits among equals), and masses tie all the time."""
    queries = torch.randint(-30, 31, (case.heads * case.group, n, D), generator=generator).float()
    return queries, torch.randint(-30, 31, (case.heads, n, D), generator=generator).float()


MAKERS = {"random": _random, "drift": _drift, "twins": _twins, "constant": _constant, "sink": _sink, "hard": _hard}


def make_streams(case: Case, seed: int) -> list[Stream]:
    generator = torch.Generator().manual_seed(seed)
    streams = []
    for n in torch.cat(masks(case), dim=1).sum(dim=1).tolist():
        queries, keys = MAKERS[case.inputs](case, n, generator)
        streams.append(Stream(queries, keys, torch.randn(case.heads, n, E, generator=generator)))
    return streams


def masks(case: Case) -> list[Tensor]:
    """For each turn, which columns are real: ``(rows, tokens)``."""
    result = []
    for index, turn in enumerate(case.turns):
        real = torch.ones(len(case.pads), turn, dtype=torch.bool)
        if turn > 1:
            real = torch.arange(turn) >= torch.tensor(case.pads)[:, None]
        elif case.pause and index % case.pause == 0:
            real[1] = False
        result.append(real)
    return result

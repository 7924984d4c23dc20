"""A layer whose KV heads are divided among processes, for the law about them. Threads stand for the processes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kvkeep.head_sharding import Heads
from kvkeep.policies.base import Policy
from kvkeep.testing.case import Case, Moment, Tape, run

PATIENCE_S = 20.0
"""Seconds for which a thread waits for another one, which hangs."""


@dataclass
class _Meeting:
    """Where threads lay down their tensors for each other, and ``None`` at the end of a step."""

    ranks: int
    laid: dict[int, Tensor | None] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=PATIENCE_S)

    def exchange(self, rank: int, mine: Tensor | None) -> list[Tensor | None]:
        self.laid[rank] = mine
        self.barrier.wait()
        found = [self.laid[one] for one in range(self.ranks)]
        self.barrier.wait()
        kinds = {None if one is None else (one.shape, one.dtype) for one in found}
        assert len(kinds) == 1, f"processes have not asked each other for the same: {kinds}"
        return found


@dataclass(frozen=True)
class _Between(Heads):
    """The heads of a thread.

    Attributes:
        meeting: where it meets the others.
    """

    meeting: _Meeting = field(default_factory=lambda: _Meeting(1))

    def first(self, numbers: Tensor) -> Tensor:
        return self._gathered(numbers)[0]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        return [one for one in self.meeting.exchange(self.rank, mine.clone()) if one is not None]


def run_shared(policy: Policy, case: Case, tape: Tape, ranks: int) -> Generator[list[Moment], None, None]:
    """Feed a case to layers that hold a part of the heads each, and yield their moments after each step.

    Its threads live until it ends or is closed.

    Args:
        policy: the policy.
        case: the experiment; its heads are a multiple of the ranks.
        tape: its inputs.
        ranks: number of parts.
    """
    meeting = _Meeting(ranks)
    part = replace(case, heads=case.heads // ranks)
    runs = [
        run(policy, part, _cut(tape, rank, ranks), heads=_Between(rank, ranks, case.heads, meeting))
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as threads:
        while True:
            moments = [moment for moment in threads.map(partial(_next, meeting), range(ranks), runs) if moment]
            if not moments:
                return
            yield moments


def _cut(tape: Tape, rank: int, ranks: int) -> Tape:
    """The inputs of the heads of a rank."""
    query, keys, values = (x.chunk(ranks, dim=1)[rank] for x in (tape.query, tape.keys, tape.values))
    return Tape(query, keys, values, tape.real)


def _next(meeting: _Meeting, rank: int, moments: Iterator[Moment]) -> Moment | None:
    """The next moment of a thread. If it fails, nobody waits for it."""
    try:
        found = next(moments, None)
        meeting.exchange(rank, None)
        return found
    except threading.BrokenBarrierError:
        raise meeting.error or AssertionError("a process waits for another one, which hangs") from None
    except BaseException as error:
        meeting.error = meeting.error or error
        meeting.barrier.abort()
        raise


def held(moments: list[Moment]) -> list[list[list[int]]]:
    """The positions that each head of all parts holds, by row."""
    rows = len(moments[0].positions)
    return [[_occupied(head) for one in moments for head in one.positions[row]] for row in range(rows)]


def _occupied(head: Tensor) -> list[int]:
    found: list[int] = head[head >= 0].tolist()
    return found


def outputs(moments: list[Moment]) -> Tensor:
    """The outputs of all heads."""
    return torch.cat([one.out for one in moments], dim=1)

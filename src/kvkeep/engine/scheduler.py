"""Who runs next: the scheduler gives rows to waiting requests and plans the batches of each step.

A step feeds at most one chunk of prompt tokens, and one token to every other running row. So a running row never waits
longer than one chunk takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.engine.generation import Generation
from kvkeep.policies.base import Policy
from kvkeep.types import Phase

WHOLE_PROMPTS = 512
"""Most tokens of a run that feeds several whole prompts, padding included; a single prompt may be longer."""

PATIENCE = 4
"""A request that needs other rows is passed over at most this many times per row; then the rows are replaced."""


@dataclass(frozen=True)
class Batch:
    """One run of the model over neighbouring rows. No request changes before `commit`.

    Attributes:
        start: the first row.
        rows: the request in each row from ``start`` on; ``None`` for a row that is fed nothing.
        tokens: the tokens that each row is fed; empty for ``None``.
        positions: the position of each row's first token in its sequence.
        phase: whether the tokens belong to prompts or were generated.
        fresh: whether every row begins its prompt.
    """

    start: int
    rows: Sequence[Generation | None]
    tokens: Sequence[Sequence[int]]
    positions: Sequence[int]
    phase: Phase
    fresh: bool = False

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + len(self.rows)

    @property
    def requests(self) -> list[Generation]:
        """The requests that are fed."""
        return [one for one in self.rows if one is not None]

    def commit(self) -> list[tuple[int, Generation]]:
        """Note that the model has seen the tokens.

        Returns:
            The requests whose next token follows from this run, each with its place in the batch.
        """
        for one, tokens in zip(self.rows, self.tokens, strict=True):
            if one is not None:
                one.fed += len(tokens)
        return [(i, one) for i, one in enumerate(self.rows) if one is not None and one.prompt_left == 0]


class Gap(NamedTuple):
    """A sequence, its row, and a free row before it."""

    one: Generation
    source: int
    target: int


class Scheduler:
    """Gives rows to requests, and plans which of them the model runs.

    Args:
        rows: number of rows.
        chunk: prompt tokens that are fed in one step; ``None``: a whole prompt.
        alone: whether every run of the model is limited to one row.
        waiting: requests that wait already.

    Attributes:
        waiting: the requests without a row, the longest waiting first.
    """

    def __init__(self, rows: int, chunk: int | None, *, alone: bool, waiting: Iterable[Generation] = ()) -> None:
        self.waiting = deque(waiting)
        self._rows: list[Generation | None] = [None] * rows
        self._chunk = chunk
        self._alone = alone
        self._passed_over = 0

    @property
    def running(self) -> list[Generation]:
        """The requests that have a row."""
        return [one for one in self._rows if one is not None]

    def admit(self, takes: Callable[[Policy], bool]) -> list[Generation]:
        """Give free rows to waiting requests, the longest waiting first.

        Args:
            takes: returns whether the present rows can hold a sequence under a policy. Other requests are passed over.
        """
        admitted: list[Generation] = []
        while self.waiting and self._passed_over <= PATIENCE * len(self._rows):
            one = next((w for w in self.waiting if takes(w.policy)), None)
            if one is None or (row := self._free_row(one.policy)) is None:
                break
            self._passed_over = 0 if one is self.waiting[0] else self._passed_over + 1
            one.row, self._rows[row] = row, one
            self.waiting.remove(one)
            admitted.append(one)
        return admitted

    def _free_row(self, policy: Policy) -> int | None:
        """Return a free row, preferably beside one of the same policy: a layer steps once per run of equal policies."""
        of = [None if one is None else one.policy for one in self._rows]
        free = [i for i, one in enumerate(self._rows) if one is None]
        beside = [i for i in free if policy in (*of[max(0, i - 1) : i], *of[i + 1 : i + 2])]
        return next(iter(beside or free), None)

    def next_policy(self) -> Policy | None:
        """Return the policy of the longest waiting request once no row is taken, and ``None`` before."""
        if self.running or not self.waiting:
            return None
        self._passed_over = 0
        return self.waiting[0].policy

    def waiting_for(self, policy: Policy) -> list[Generation]:
        """Return the requests that wait for rows under a policy."""
        return [one for one in self.waiting if one.policy is policy or one.policy == policy]

    def beginning(self) -> list[Generation]:
        """Return the requests whose rows were fed nothing yet; without any, the longest waiting request."""
        return [one for one in self.running if not one.fed] or list(self.waiting)[:1]

    def leave(self, one: Generation) -> None:
        """Free the row of a request, or its place in the queue."""
        if one in self.waiting:
            self.waiting.remove(one)
        if one.row is not None:
            self._rows[one.row] = None
            one.row = None

    def gap(self) -> Gap | None:
        """Return the last sequence and the first free row, if the sequence can go on there and no request waits."""
        taken = [i for i, one in enumerate(self._rows) if one is not None]
        if self.waiting or self._alone or not taken or taken[-1] < len(taken):
            return None
        source, target = taken[-1], self._rows.index(None)
        one = self._rows[source]
        assert one is not None
        if one.prompt_left:
            return None
        return Gap(one, source, target)

    def move(self, gap: Gap) -> None:
        """Note that a sequence goes on in another row."""
        self._rows[gap.source], self._rows[gap.target], gap.one.row = None, gap.one, gap.target

    def plan(self) -> list[Batch]:
        """Return the batches of this step: at most one chunk of prompts, and one token for every other row."""
        decoding = [one if one is not None and one.token_ids else None for one in self._rows]
        while decoding and decoding[-1] is None:
            decoding.pop()
        groups = [(i, [one]) for i, one in enumerate(decoding) if one] if self._alone else [(0, decoding)]
        steps = [
            Batch(
                start,
                group,
                [one.token_ids[-1:] if one else [] for one in group],
                [one.fed if one else 0 for one in group],
                Phase.DECODE,
            )
            for start, group in groups
            if group
        ]
        return [*self._feed(), *steps]

    def _feed(self) -> list[Batch]:
        """Return a batch of the next chunk of the oldest prompt, or of several short prompts in neighbouring rows."""
        first = min((one for one in self.running if one.prompt_left), key=lambda one: one.id, default=None)
        if first is None or first.row is None:
            return []
        chunk = max(WHOLE_PROMPTS, first.prompt_left) if self._chunk is None else self._chunk
        fresh = first.fed == 0
        group = [first]
        while fresh and not self._alone and first.prompt_left <= chunk:
            row = first.row + len(group)
            other = self._rows[row] if row < len(self._rows) else None
            if other is None or other.token_ids or other.fed:
                break
            if (len(group) + 1) * max(len(one.prompt) for one in [*group, other]) > chunk:
                break
            group.append(other)
        tokens = [one.prompt[one.fed : one.fed + chunk] for one in group]
        return [Batch(first.row, group, tokens, [one.fed for one in group], Phase.PREFILL, fresh)]

"""One device under a load: the loop over its steps, and what is noted. Schedulers are in `bounded` and `paged`."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvkeep_lab.fleet.load import Arrivals, Talk
from kvkeep_lab.fleet.steps import Fitted, Steps

_OFTEN = 512
"""Steps between two looks at the clock."""

FLOWS = ("new_tokens", "read_tokens", "reread_tokens", "seconds", "busy_s", "row_s", "row_bytes", "disk_bytes")
"""What is noted of the time between the first and the last counted arrival, where arrivals are drawn."""

Progress = Callable[[float], object]
"""Called about once a second with the share of the messages that are answered."""


@dataclass(eq=False, slots=True)
class Message:
    """A message on its way to its answer.

    Attributes:
        number: the order of arrival.
        talk: its conversation.
        arrived: the second at which it came.
        left: prompt tokens that are not read yet.
        past: tokens in memory.
        new: tokens of the answer.
        made: tokens of the answer that were there before the present stretch of decode steps.
        first: the second of the first token.
        began, ends: the steps after which it was, and will have been, decoding; 0 while it is not.
    """

    number: int
    talk: Talk
    arrived: float
    left: int
    past: int
    new: int
    made: int = 0
    first: float = 0.0
    began: int = 0
    ends: int = 0

    def __lt__(self, other: Message) -> bool:
        return self.number < other.number


@dataclass
class Log:
    """What happened on a device, or on several.

    Attributes:
        first_s, token_s: seconds to the first token, and per token after it, of each counted answer.
        began, ended: messages that came and that were answered, counted or not.
        new_tokens, read_tokens, reread_tokens: written; read of prompts; of these, such as had been read before.
        seconds, busy_s: of the simulation; with a run or a copy.
        row_s: seconds times sequences that were in rows.
        rows_most, waiting_most: sequences in rows, and waiting, at once.
        used_bytes: the most of the device's memory that was taken.
        row_bytes, disk_bytes: moved between rows and main memory; between main memory and the disk.
        host_most, kept_most: conversations in main memory, and in it or on the disk, at once.
        preempted: sequences that lost their memory.
        hopeless: whether the simulation was stopped because too many first tokens were late.
    """

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    began: int = 0
    ended: int = 0
    new_tokens: int = 0
    read_tokens: int = 0
    reread_tokens: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    row_s: float = 0.0
    rows_most: int = 0
    waiting_most: int = 0
    used_bytes: int = 0
    row_bytes: int = 0
    disk_bytes: int = 0
    host_most: int = 0
    kept_most: int = 0
    preempted: int = 0
    hopeless: bool = False


class Device(ABC):
    """A device and its scheduler.

    Args:
        steps: seconds of its runs.
        arrivals: the messages that come.
        counted_from: the first message that is counted. With one above 0, the numbers in `FLOWS` are those between its
            arrival and the last one, since before and after that the device is emptier than in the long run.

    Attributes:
        now: the second.
        tick: decode steps so far.
        waiting, reading: sequences without a row; with one and with prompt tokens left, in the order of arrival.
        decoding: number of sequences that get a token in each decode step.
    """

    def __init__(self, steps: Steps, arrivals: Arrivals, *, counted_from: int = 0) -> None:
        self.now, self.tick, self.decoding = 0.0, 0, 0
        self.waiting: deque[Message] = deque()
        self.reading: list[Message] = []
        self.log = Log()
        self._steps, self._arrivals, self._counted_from = steps, arrivals, counted_from
        self._ratios = itertools.cycle(steps.ratios if isinstance(steps, Fitted) and steps.ratios else (1.0,))
        self._ends: list[tuple[int, int, Message]] = []
        self._coming: list[tuple[float, int, Message]] = []
        self._looked = self._late_ones = 0
        self._marks: list[dict[str, float]] = []

    def run(self, *, hopeless: tuple[float, int] | None = None, progress: Progress | None = None) -> Log:
        """Answer all messages, and return what happened.

        Args:
            hopeless: seconds, and a number of messages: stop once more first tokens than that are later.
            progress: called about once a second.
        """
        seen, shown, total = 0, time.monotonic(), max(1, self._arrivals.left)
        while not self.log.hopeless:
            self._take_arrivals()
            if not self.waiting and not self.rows:
                if (due := self._next_due()) is None:
                    break
                self.now = max(self.now, due)
                continue
            self.step()
            seen += 1
            if seen % _OFTEN == 0 and progress and time.monotonic() > shown + 1:
                shown = time.monotonic()
                progress(self.log.ended / total)
            if hopeless is not None:
                self.log.hopeless = self._late(*hopeless)
        self.log.seconds = self.now
        if len(self._marks) == 2 and self._marks[0]["seconds"] < self._marks[1]["seconds"]:
            for name in FLOWS:
                setattr(self.log, name, self._marks[1][name] - self._marks[0][name])
        return self.log

    @property
    def rows(self) -> int:
        """Return the number of sequences in rows."""
        return self.decoding + len(self.reading)

    @abstractmethod
    def step(self) -> None:
        """Admit, run the model, and let the clock go on."""

    @abstractmethod
    def came(self, talk: Talk, number: int, due: float) -> tuple[Message, float]:
        """Return the job of a message, and the second from which on it can be admitted."""

    @abstractmethod
    def slots(self) -> float:
        """Return the number of tokens that the decoding sequences attend to in the next decode step."""

    @abstractmethod
    def seen(self, job: Message) -> int:
        """Return the number of tokens in memory that the next prompt token of a job attends to."""

    @abstractmethod
    def hold(self, job: Message, by: int) -> None:
        """Note that a sequence begins to decode (1), or does not decode any more (-1)."""

    @abstractmethod
    def end(self, job: Message) -> None:
        """Note that an answer is complete."""

    def advance(self, pieces: list[tuple[Message, int]], *, decode: bool) -> list[Message]:
        """Run the model on pieces of prompts and, if asked, on a token of every decoding sequence.

        Returns:
            The jobs that have read their prompts and go on; `begin` makes them decode.
        """
        tokens = sum(count for _, count in pieces)
        pairs = math.fsum(count * (self.seen(job) + count / 2) for job, count in pieces)
        rows = self.decoding if decode else 0
        self.spend(next(self._ratios) * self._steps.seconds(rows, self.slots() if decode else 0.0, tokens, pairs))
        if decode:
            self.tick += 1
            self.log.new_tokens += rows
            while self._ends and self._ends[0][0] <= self.tick:
                _, _, job = heapq.heappop(self._ends)
                if job.ends == self.tick:  # it was not interrupted in between
                    self.leave(job)
                    self._finish(job)
        ready = []
        for job, count in pieces:
            job.left, job.past = job.left - count, job.past + count
            self.log.read_tokens += count
            if not job.left:
                ready.append(job)
        return [job for job in ready if self._goes_on(job)]

    def begin(self, jobs: list[Message]) -> None:
        """Let sequences that have their first token decode from the next step on."""
        for job in jobs:
            job.began, job.ends = self.tick, self.tick + job.new - job.made
            heapq.heappush(self._ends, (job.ends, job.number, job))
            self.decoding += 1
            self.hold(job, 1)

    def leave(self, job: Message) -> None:
        """Let a sequence decode no further."""
        self.decoding -= 1
        self.hold(job, -1)
        job.made, job.past = job.made + self.tick - job.began, job.past + self.tick - job.began
        job.began = job.ends = 0

    def spend(self, seconds: float) -> None:
        """Let time pass in which the device is busy."""
        self.log.rows_most = max(self.log.rows_most, self.rows)
        self.now += seconds
        self.log.busy_s += seconds
        self.log.row_s += seconds * self.rows

    def admit(self, job: Message) -> None:
        """Give a row to a job."""
        insort(self.reading, job)

    def _goes_on(self, job: Message) -> bool:
        """Note the token that follows from the end of a prompt; return whether it was not the last."""
        self.reading.remove(job)
        if not job.made:
            job.first = self.now
        job.made += 1
        self.log.new_tokens += 1
        if job.made < job.new:
            return True
        self._finish(job)
        return False

    def _finish(self, job: Message) -> None:
        self.log.ended += 1
        if job.number >= self._counted_from:
            self.log.first_s.append(job.first - job.arrived)
            if job.new > 1:
                self.log.token_s.append((self.now - job.first) / (job.new - 1))
        turn = job.talk.turns[job.talk.done]
        job.talk.tokens += turn.prompt + turn.new
        self._arrivals.follow(job.talk, self.now)
        self.end(job)

    def _next_due(self) -> float | None:
        """Return the second at which the next message comes, or is ready; ``None`` if none is known."""
        due = self._arrivals.next_due()
        ready = self._coming[0][0] if self._coming else None
        return due if ready is None else ready if due is None else min(due, ready)

    def _take_arrivals(self) -> None:
        """Let messages wait that have come by now, and whose memory is there."""
        while (due := self._next_due()) is not None and due <= self.now:
            if self._coming and self._coming[0][0] == due:
                self.waiting.append(heapq.heappop(self._coming)[2])
                continue
            one = self._arrivals.pop()
            job, ready = self.came(one.talk, self.log.began, one.at)
            self.log.began += 1
            if self._counted_from and (job.number == self._counted_from or not self._arrivals.left):
                self.log.seconds = self.now
                self._marks.append({name: getattr(self.log, name) for name in FLOWS})
            if ready > one.at:
                heapq.heappush(self._coming, (ready, job.number, job))
            else:
                self.waiting.append(job)
        self.log.waiting_most = max(self.log.waiting_most, len(self.waiting))

    def _late(self, late_s: float, most: int) -> bool:
        """Return whether more first tokens than that are late already."""
        counted = self.log.first_s
        while self._looked < len(counted):
            self._late_ones += counted[self._looked] > late_s
            self._looked += 1
        more = most - self._late_ones
        if more < 0:
            return True
        if len(self.waiting) <= more:
            return False
        without = (job for job in self.waiting if not job.made and job.number >= self._counted_from)
        line = [*itertools.islice(without, more + 1)]
        return len(line) > more and all(self.now - job.arrived > late_s for job in line)

"""A device that runs kvkeep: the rules of `kvkeep.engine.scheduler` for requests of one policy, and idle sessions.

`lab/tests/fleet/test_fleet_rules.py` compares the runs with those that the engine's own scheduler plans.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvkeep.engine.scheduler import SHARED_TOKENS
from kvkeep_lab.fleet.device import Device, Message
from kvkeep_lab.fleet.load import Arrivals, Talk
from kvkeep_lab.fleet.steps import Steps


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """The rows of a device, and where the memories of idle conversations go.

    Attributes:
        count: number of rows.
        slots: of a row.
        row_bytes: bytes of a row, and so of an idle conversation.
        chunk: prompt tokens that are read in one run; ``None``: a whole prompt.
        decode_every: prompt tokens for which every row gets a token.
        mixed_tokens: most prompt tokens that share a run with the rows.
        copy_s, disk_s: seconds to bring a conversation into a row or out of it; from the disk.
        host_rows: conversations for which main memory has room; ``None``: for all.
    """

    count: int
    slots: int
    row_bytes: int = 0
    chunk: int | None = None
    decode_every: int = 1
    mixed_tokens: int = 0
    copy_s: float = 0.0
    disk_s: float = 0.0
    host_rows: int | None = None


class Bounded(Device):
    """A device that runs kvkeep.

    Args:
        steps, arrivals, counted_from: see `Device`.
        rows: its rows.
    """

    def __init__(self, steps: Steps, arrivals: Arrivals, rows: DeviceRows, *, counted_from: int = 0) -> None:
        super().__init__(steps, arrivals, counted_from=counted_from)
        self._have, self._owed = rows, 0
        self._host: OrderedDict[Talk, None] = OrderedDict()
        self._disk: set[Talk] = set()
        for talk in arrivals.thinking:
            self._put(talk)
        self.log.disk_bytes = 0

    def step(self) -> None:
        """Do what `Scheduler.plan` does: at most one run of prompts, and a token for every row."""
        have = self._have
        while self.waiting and self.rows < have.count:
            self._give_row(self.waiting.popleft())
        decode = self.decoding > 0
        is_turn = not decode or self._owed < have.decode_every
        pieces = self._feed(self._most_tokens(waited_for=decode)) if is_turn else []
        read = sum(count for _, count in pieces)
        self._owed = max(0, self._owed + read - have.decode_every) if decode else 0
        if read <= have.mixed_tokens or not decode or not pieces:
            ready = self.advance(pieces, decode=decode)
        else:
            ready = self.advance(pieces, decode=False)
            self.advance([], decode=True)
        self.begin(ready)

    def came(self, talk: Talk, number: int, due: float) -> tuple[Message, float]:
        """Return the job of a session, which reads what is new and the last token of the answer before it."""
        turn = talk.turns[talk.done]
        job = Message(number, talk, due, left=turn.prompt + bool(talk.done), past=max(0, talk.tokens - 1), new=turn.new)
        self._host.pop(talk, None)
        if talk not in self._disk:
            return job, due
        self._disk.remove(talk)
        self.log.disk_bytes += self._have.row_bytes
        return job, due + self._have.disk_s

    def end(self, job: Message) -> None:
        """Keep the memory of a conversation that goes on."""
        if job.talk.done < len(job.talk.turns):
            self._copy()
            self._put(job.talk)

    def hold(self, job: Message, by: int) -> None:
        """Do nothing: rows are as large when they are empty."""

    def slots(self) -> float:
        """Return all slots of the decoding rows: their number does not depend on the tokens that were seen."""
        return float(self.decoding * self._have.slots)

    def seen(self, job: Message) -> int:
        """Return the number of tokens that the slots hold."""
        return min(job.past, self._have.slots)

    def _give_row(self, job: Message) -> None:
        if job.talk.done:
            self._copy()
        self.admit(job)

    def _copy(self) -> None:
        self.log.row_bytes += self._have.row_bytes
        self.spend(self._have.copy_s)

    def _put(self, talk: Talk) -> None:
        """Put a memory into main memory, and the least recently used one to the disk if there is no room."""
        self._host[talk] = None
        if self._have.host_rows is not None and len(self._host) > self._have.host_rows:
            self._disk.add(self._host.popitem(last=False)[0])
            self.log.disk_bytes += self._have.row_bytes
        self.log.host_most = max(self.log.host_most, len(self._host))
        self.log.kept_most = max(self.log.kept_most, len(self._host) + len(self._disk))

    def _most_tokens(self, *, waited_for: bool) -> int:
        """Return what `Scheduler._most_tokens` returns."""
        chunk = self._have.chunk
        if chunk is None:
            return SHARED_TOKENS
        return chunk if waited_for else max(chunk, SHARED_TOKENS)

    def _feed(self, most: int) -> list[tuple[Message, int]]:
        """Return the pieces that `Scheduler._feed` chooses.

        They are the oldest prompt's next piece, and those of others as long as there are few tokens.
        """
        pieces: list[tuple[Message, int]] = []
        for job in self.reading:
            count = job.left if self._have.chunk is None else min(job.left, self._have.chunk)
            if not pieces or count <= most:
                most -= count
                pieces.append((job, count))
        return pieces

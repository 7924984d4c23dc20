"""Workers on a cluster of Ray, and the pieces of a job on their way through them: lines, or cells of an evaluation.

The driver hands each worker as many pieces as keep it busy, and takes the answers as they come. A worker that dies is
replaced, and its pieces run again. The driver alone knows which pieces are done, so that no answer counts twice.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from kvkeep.errors import InputError
from kvkeep.scale.cluster import LostClusterError, Need, check_alive, last_words, need_ray

# A kind of work that a pool does in pieces, and what each of its workers says of itself. Nothing here knows Ray.

WeightLayout: TypeAlias = tuple[bool, bool]
"""How weights were laid out for speed, see `kvkeep.models.prepare.chosen`. It changes the last digits of products."""


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself once it can work.

    Attributes:
        weights: a fingerprint of the model's weights.
        layout: how they were laid out.
        host: name of its machine.
        pid: number of its process.
    """

    weights: str
    layout: WeightLayout
    host: str
    pid: int


F = TypeVar("F", bound=WorkerFacts)


@dataclass(frozen=True)
class WorkKind(Generic[F]):
    """A kind of work.

    Attributes:
        worker: the class of its workers. It is made from what makes a worker's tools, ``begin(layout)`` returns its
            facts or the message of an error, and ``run(number, piece, …)`` returns the answer of a piece.
        piece: a word for a piece.
        at_once: the calls that Ray lets a worker work on at once; further ones wait.
        ahead: the pieces that a worker with such facts has been handed at most.
        patience_s: seconds without an answer of a worker that has work, after which the user is told.
    """

    worker: type[Any]
    piece: str
    at_once: int
    ahead: Callable[[F], int]
    patience_s: float


# The pieces of a job on their way to workers: new ones, those of workers that died, and those that may be the cause.
#
# Nothing here knows Ray.

Item: TypeAlias = tuple[int, Any]
"""The number of a piece, and what its worker is told of it: the bytes of a line, for example."""

Source: TypeAlias = Callable[[int], Item | None]
"""Returns a new piece for the worker at a place, by the place's number; ``None`` if there is no more."""

SUSPECT = 2
"""Deaths of its worker after which a piece waits for the end of the job, and then runs alone."""
GUILTY = 2
"""Deaths of a worker that ran a piece alone, after which the piece has failed."""


@dataclass(frozen=True)
class WorkResult:
    """What became of a piece.

    Attributes:
        number: the piece's number.
        digest: a line's fingerprint.
        whole: its result, such as a line of the output; ``None`` if it failed.
        reason: why it failed.
        new: tokens that were generated for a line.
        refused: whether the worker cannot run it, and perhaps no other piece either.
    """

    number: int
    digest: str = ""
    whole: Any = None
    reason: str | None = None
    new: int = 0
    refused: bool = False


class Pieces:
    """The pieces of a job that wait for a worker.

    Args:
        source: gives new pieces.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._again: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._died: Counter[int] = Counter()
        self._died_alone: Counter[int] = Counter()

    def take(self, place: int) -> Item | None:
        """Remove and return a piece for the worker at a place: one that a dead worker had, else a new one of the
        source; ``None`` if none is left.

        Suspects, which run alone, are left out.
        """
        return self._again.popleft() if self._again else self._source(place)

    def suspect(self) -> Item | None:
        """Remove and return a piece that has to run alone, as workers died at it; ``None`` if there is none."""
        return self._suspects.popleft() if self._suspects else None

    def any_left(self, place: int) -> bool:
        """Return whether any piece waits, suspects included. A new one may be taken from the source, for the worker at
        this place, to find out; it is kept, for whoever asks next.
        """
        if not self._again and not self._suspects and (item := self._source(place)) is not None:
            self._again.append(item)
        return bool(self._again or self._suspects)

    def give_back(self, item: Item, *, alone: bool) -> WorkResult | None:
        """Queue a piece of a dead worker again, after `SUSPECT` deaths as a suspect, and return ``None``.

        A piece at which `GUILTY` workers died alone is not queued: return its answer, a failure.

        Args:
            item: the piece.
            alone: whether the worker had no other piece, as it was a suspect.
        """
        number = item[0]
        self._died[number] += 1
        self._died_alone[number] += alone
        if self._died_alone[number] >= GUILTY:
            return WorkResult(number, reason=f"its worker died {self._died[number]} times")
        (self._suspects if self._died[number] >= SUSPECT else self._again).append(item)
        return None


# A slot for a worker in a pool: who works there, at which pieces, and how long it has been silent.


@dataclass(eq=False)
class WorkerSlot:
    """A place for a worker.

    Attributes:
        number: of the place, from 1.
        handle: the worker; ``None`` if nobody works here any more.
        starting: the `WorkerFacts`, to come; ``None`` once they are there.
        running: answer to come → piece.
        deaths: since its last answer.
        alone: whether its only piece is a suspect.
        facts: of its worker.
        most_s: seconds of silence after which the user is told first, see `WorkKind.patience_s`.
        heard: when it answered last, or began to work, in seconds of a clock.
        patience_s: seconds of silence after which the user is told next.
    """

    number: int
    most_s: float
    handle: Any = None
    starting: Any = None
    running: dict[Any, Item] = field(default_factory=dict)
    deaths: int = 0
    alone: bool = False
    facts: WorkerFacts | None = None
    heard: float = 0.0
    patience_s: float = 0.0

    def hear(self) -> None:
        """Record that the worker answered, or began to work, now; reset the time after which its silence is told."""
        self.heard, self.patience_s = time.monotonic(), self.most_s

    def silence(self, piece: str) -> str | None:
        """Return a warning, for the user, if the worker here has work and is silent for too long; else ``None``.

        The time until the next warning doubles.

        Args:
            piece: a word for a piece of its work.
        """
        silent = time.monotonic() - self.heard
        if self.facts is None or not self.running or silent < self.patience_s:
            return None
        # a worker that hangs is named again, but not in every round
        self.patience_s *= 2
        return (
            f"worker {self.number} (process {self.facts.pid} on {self.facts.host}) has answered nothing for "
            f"{silent / 60:.0f} minutes. If it hangs, end that process: it is replaced, and its {piece}s run again"
        )


Stopped: TypeAlias = Callable[[], bool]
Take: TypeAlias = Callable[[WorkResult], object]

DEATHS = 3
"""Deaths of a worker without an answer in between, after which its place stays empty."""
_PATIENCE_S = 0.5  # of a wait, after which Ctrl-C and silent workers are looked at
_SLOW = 40  # waits without a worker, after which the user is told
_LOST = 8  # waits without a worker, after which the cluster is asked for


class WorkerPool(Generic[F]):
    """Some workers for one kind of work.

    Args:
        kind: what they do.
        make: makes a worker's tools, such as its engine. It travels to the worker's process.
        size: the number of workers.
        need: what each takes.
        like: how the first worker lays out the weights; it chooses by speed if this is left out.
        tell: prints a note for the user.

    Attributes:
        size: the number of workers.
    """

    def __init__(
        self,
        kind: WorkKind[F],
        make: Callable[..., Any],
        size: int,
        need: Need,
        *,
        like: WeightLayout | None = None,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Make the places; `begin` starts the workers."""
        self._ray, self._kind, self._make, self._like, self._tell = need_ray(), kind, make, like, tell
        options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_concurrency": kind.at_once}
        options |= {"memory": need.memory} if need.memory else {}
        # the pool replaces workers itself: it has to know which piece a worker died at
        self._remote = self._ray.remote(kind.worker).options(**options, max_restarts=0, max_task_retries=0)
        self._slots = [WorkerSlot(number, kind.patience_s) for number in range(1, size + 1)]
        self._pieces = Pieces(lambda slot: None)  # none before `run`
        self._facts: F | None = None
        self._lost, self._last = False, ""
        self.size = size

    @property
    def facts(self) -> F:
        """Return what the first worker that could work said of itself; the others have the same weights."""
        assert self._facts is not None
        return self._facts

    def begin(self, stopped: Stopped = lambda: False) -> None:
        """Start all workers, and wait until they can work; return early if the user stops the job.

        Raises:
            InputError: a worker cannot make its tools, dies, or has other weights than the others.
        """
        first, *others = self._slots
        self._await([first], stopped)
        self._await(others, stopped)  # they lay out the weights as the first one has

    def _await(self, slots: Sequence[WorkerSlot], stopped: Stopped) -> None:
        """Start a worker in each of these slots, and wait until they can work; return early if the user stops the job.

        Raises:
            InputError: a worker died, or cannot work.
        """
        if stopped():
            return
        for slot in slots:
            self._hire(slot)
        waits = 0
        while (waiting := [slot for slot in slots if slot.starting is not None]) and not stopped():
            ready, _ = self._ray.wait([slot.starting for slot in waiting], timeout=_PATIENCE_S)
            waits += 1
            if waits % _SLOW == 0:
                self._tell(f"waiting for {len(waiting)} of {len(self._slots)} workers to start")
            for slot in [slot for slot in waiting if slot.starting in ready]:
                try:
                    problem = self._welcome(slot, self._ray.get(slot.starting))
                except Exception as error:  # whatever Ray raises for a process that has ended
                    raise InputError(f"Worker {slot.number} died while it began: {last_words(error)}.") from error
                if problem:
                    raise InputError(problem)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of the first worker, which must be idle, wait, and return the result.

        Args:
            what: the method's name.
            arguments: its arguments.

        Raises:
            InputError: the worker dies, or the method raises an error.
        """
        first = self._slots[0]
        try:
            return self._ray.get(getattr(first.handle, what).remote(*arguments))
        except Exception as error:  # whatever Ray raises for a process that has ended
            raise InputError(
                f"Worker {first.number} died while it checked {self._kind.piece}s: {last_words(error)}."
            ) from error

    def run(
        self,
        source: Source,
        told: Sequence[Any],
        take: Take,
        stopped: Stopped = lambda: False,
    ) -> None:
        """Run pieces until each has an answer, or the user stops the job.

        Args:
            source: gives the pieces as workers become free.
            told: what workers are told beside each piece.
            take: gets the answer of each piece once, in any order.
            stopped: whether the user wants to stop.

        Raises:
            InputError: no worker is left.
            LostClusterError: the cluster has gone away.
        """
        self._pieces, waits = Pieces(source), 0
        while not stopped():
            self._feed(told)
            running = [reference for slot in self._slots for reference in slot.running]
            # any place will do: a piece that this fetches is kept for whichever worker is free
            if not running and not self._pieces.any_left(self._slots[0].number):
                return
            if all(slot.handle is None for slot in self._slots):
                raise InputError(
                    f"No worker is left: each died {DEATHS} times without an answer, or could not be replaced. The "
                    f"last reason: {self._last.rstrip('.')}. Perhaps they need more than their nodes have; the nodes' "
                    "logs of Ray say more. The same command goes on from here."
                )
            starting = [slot.starting for slot in self._slots if slot.starting is not None]
            ready, rest = self._ray.wait(running + starting, timeout=_PATIENCE_S)
            # the first wait returns one answer; the others that are there are taken at once
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0) if ready and rest else ([], [])
            waits = 0 if running or ready else waits + 1
            self._tell_of(waits)
            self._collect({*ready, *more}, take)

    def _tell_of(self, waits: int) -> None:
        """Tell the user now and then that no worker runs, and whenever a worker with work is silent for too long.

        While no worker runs, check now and then that the cluster is still there.

        Args:
            waits: waits in a row in which no worker had work and nothing came; 0 if the last one was none.

        Raises:
            LostClusterError: the cluster has gone away.
        """
        if waits and waits % _LOST == 0:
            self._check_alive()
        if waits and waits % _SLOW == 0:
            self._tell("no worker runs; waiting for the cluster to start one")
        for silence in filter(None, [slot.silence(self._kind.piece) for slot in self._slots]):
            self._tell(silence)

    def close(self) -> None:
        """End all workers, unless the cluster has gone away."""
        for slot in self._slots if not self._lost else ():  # a lost cluster would never answer
            self._dismiss(slot)

    def _check_alive(self) -> None:
        """Raise a `LostClusterError` if the cluster has gone away, and remember that for `close`."""
        try:
            check_alive(self._ray)
        except LostClusterError:
            self._lost = True
            raise

    def _hire(self, slot: WorkerSlot) -> None:
        """Start a worker in a slot, without waiting for it. It lays out weights as the first worker did; the first one
        does so as the pool was told, if it was.
        """
        slot.handle = self._remote.remote(self._make)
        slot.starting = slot.handle.begin.remote(self._like if self._facts is None else self._facts.layout)

    def _dismiss(self, slot: WorkerSlot) -> None:
        """End a slot's worker, if it has one, and leave the slot empty; pieces that ran there are forgotten."""
        if slot.handle is not None:
            with suppress(Exception):  # it is gone, or the cluster is
                self._ray.kill(slot.handle, no_restart=True)
        slot.handle = slot.starting = None
        slot.alone = False
        slot.running.clear()

    def _welcome(self, slot: WorkerSlot, said: F | str) -> str | None:
        """Store the facts of a new worker, which can work from now on, and return ``None``.

        If it could not begin, or has other weights than the first worker, return that in words and store nothing.

        Args:
            slot: where it works.
            said: its facts, or the message of its error.
        """
        if isinstance(said, str):
            return said
        known = self._facts = self._facts or said
        if said.weights != known.weights:
            return (
                f"Workers have different weights under one name: those on {said.host} are not those on {known.host}. "
                "Give every node the same files."
            )
        slot.starting, slot.facts = None, said
        return None

    def _feed(self, told: Sequence[Any]) -> None:
        """Hand pieces to the workers with the fewest, until each has as many as it should have or no piece is left.

        A suspect goes to a worker without any other piece.
        """
        most = self._kind.ahead(self.facts)
        # one piece at a time to whoever has the fewest, so that the last pieces are spread over all workers
        while free := [
            slot
            for slot in self._slots
            if slot.handle is not None and slot.starting is None and not slot.alone and len(slot.running) < most
        ]:
            slot = min(free, key=lambda slot: len(slot.running))
            item = self._pieces.take(slot.number)
            if item is None and not slot.running and (item := self._pieces.suspect()) is not None:
                slot.alone = True  # if the worker dies now, it is clear which piece did it
            if item is None:
                return
            if not slot.running:
                slot.hear()
            slot.running[slot.handle.run.remote(*item, *told)] = item

    def _collect(self, ready: set[Any], take: Take) -> None:
        """Handle calls that have ended: pass answers to ``take``, welcome new workers, and replace those that died."""
        for slot in self._slots:
            for reference in [call for call in (slot.starting, *slot.running) if call is not None and call in ready]:
                if reference is not slot.starting and reference not in slot.running:
                    break  # its worker was found dead before
                try:
                    said = self._ray.get(reference)
                except Exception as error:  # whatever Ray raises for a process that has ended
                    self._replace(slot, last_words(error), take)
                    break  # the other calls were those of the dead worker
                if reference is slot.starting:
                    if problem := self._welcome(slot, said):
                        self._dismiss(slot)
                        self._last = problem
                        self._tell(f"worker {slot.number} is given up: {problem}")
                else:
                    del slot.running[reference]
                    slot.deaths, slot.alone = 0, False
                    slot.hear()
                    take(said)

    def _replace(self, slot: WorkerSlot, reason: str, take: Take) -> None:
        """Pass on the answers that a dead worker gave before, queue its other pieces again (or pass on their failure),
        and start another worker, unless this place had too many deaths.
        """
        lost, alone, self._last = list(slot.running.values()), slot.alone, reason
        finished = self._finished(slot, take)  # before the slot forgets what runs
        self._dismiss(slot)
        lost = [item for item in lost if item[0] not in finished]
        for item in lost:
            if (failed := self._pieces.give_back(item, alone=alone)) is not None:
                take(failed)
        slot.deaths += 0 if alone else 1  # a piece that ran alone is to blame, not the place
        again = f"; {len(lost)} of its {self._kind.piece}s run again" if lost else ""
        if slot.deaths >= DEATHS:
            self._tell(f"worker {slot.number} is given up after {DEATHS} deaths without an answer{again}: {reason}")
            return
        self._tell(f"worker {slot.number} died and is replaced{again}: {reason}")
        self._hire(slot)

    def _finished(self, slot: WorkerSlot, take: Take) -> set[int]:
        """Pass the answers that a worker gave before it died to ``take``, and return their pieces' numbers."""
        finished = set()
        ready = self._ray.wait(list(slot.running), num_returns=len(slot.running), timeout=0)[0] if slot.running else []
        for reference in ready:
            try:
                said = self._ray.get(reference)
            except Exception:  # it died before this answer
                continue
            finished.add(slot.running.pop(reference)[0])
            slot.deaths = 0
            take(said)
        return finished

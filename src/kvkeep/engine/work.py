"""Requests in rows, and the step that brings all of them further: admit, run, take the new tokens, recover."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from kvkeep.engine import sampler
from kvkeep.engine.admission import Admission
from kvkeep.engine.batch import Run
from kvkeep.engine.beginning import begin
from kvkeep.engine.choice import measure
from kvkeep.engine.generation import Generation
from kvkeep.engine.interrupts import Guard, Uninterrupted
from kvkeep.engine.parked import Parked
from kvkeep.engine.prefixes import Prefixes
from kvkeep.engine.request import Event, Result
from kvkeep.engine.rotation import Rotation
from kvkeep.engine.rows import Rows
from kvkeep.engine.runner import Runner
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.service import Box, Service
from kvkeep.engine.sessions import Sessions
from kvkeep.engine.split import Agreement
from kvkeep.engine.twins import Twins
from kvkeep.engine.writing import Pending
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models.device import reason_of
from kvkeep.snapshot import Contents

_log = logging.getLogger(__name__)

_A_MOMENT = 0.01
"""Seconds for which a step without any run waits for the disk."""


class Work:
    """The requests of an engine, the rows that they run in, and the step that brings them further.

    Args:
        admission: checks requests and makes rows.
        runner: runs the model.
        rows: the first rows.
        chunk: prompt tokens per step; ``None``: a whole prompt.
        decode_every: prompt tokens for which each running row gets a token.
        mixed_tokens: most prompt tokens that share a run with the running rows.
        prompts_first: whether running rows wait until no prompt is left to read.
        prefixes: common beginnings of prompts.
        rotation: decides when a sequence gives up its row.
        sessions: the sessions of the engine.
        agreement: the processes that run the model together.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        admission: Admission,
        runner: Runner,
        rows: Rows,
        *,
        chunk: int | None,
        decode_every: int,
        mixed_tokens: int,
        prompts_first: bool,
        prefixes: Prefixes,
        sessions: Sessions,
        rotation: Rotation,
        agreement: Agreement,
    ) -> None:
        self._admission, self._runner = admission, runner
        self._schedule = partial(
            Scheduler,
            chunk=chunk,
            decode_every=decode_every,
            mixed_tokens=mixed_tokens,
            prompts_first=prompts_first,
        )
        self._all: dict[int, Generation] = {}
        self._unreported: list[Event] = []
        self._parked, self._twins = Parked(), Twins()
        self._count, self._closed = 0, False
        self._service = Service()
        self._prefixes, self._sessions, self._rotation = prefixes, sessions, rotation
        self._agreement = agreement
        self._use(rows)

    @property
    def rows(self) -> int:
        """The number of sequences that run at once."""
        return self._rows.count

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or an interrupted step has left something to report."""
        return bool(self._all or self._unreported)

    @property
    def has_room(self) -> bool:
        """Whether fewer requests wait than there are rows: time to add more."""
        return len(self._scheduler.waiting) < max(1, self.rows) + self._rotation.host_rows and not self._twins.full

    def cancel(self, number: int) -> Result | None:
        """End a request now; its row is free at the next step. Return ``None`` if it has ended already."""
        with Uninterrupted(), self._service.turn:
            one = self._all.get(number)
            if one is None:
                return None
            self._parked.drop(number)
            one.finish("cancelled")
            self._let_go(one)
            self._service.deliver(Event(number, None, "", result := one.result()))
            return result

    def _check_open(self) -> None:
        """Refuse new work after `close`.

        Raises:
            InputError: the engine is closed.
        """
        if self._closed:
            raise InputError("The engine is closed and takes no more requests; make a new one.")

    def _enter(self, one: Generation, box: Box | None) -> None:
        """Note a request, and where its events go."""
        self._count += 1
        self._all[one.id] = one
        if box is not None:
            self._service.listen(one.id, box, self._step)

    def _refuse(self, one: Generation, error: Exception) -> None:
        """Forget a request that cannot run after all, and raise the reason in its listener."""
        self._all.pop(one.id, None)
        self._service.refuse(one.id, error)

    def _step(self) -> None:
        with Uninterrupted(), self._service.turn, self._rotation:
            self._service.sweep(self.cancel)
            self._agreement.check(self._all.values())
            with Guard(self._recover, self._scheduler.beginning):
                self._admit()
            for run in (runs := self._scheduler.plan()):
                with Guard(self._recover, partial(getattr, run, "requests")):
                    self._advance(run)
                self._service.wake()
            self._settle(wait=0.0 if runs else _A_MOMENT)
            self._service.sweep(self.cancel)

    def _settle(self, *, wait: float) -> None:
        """Report the turns whose memories are on the disk, or cannot be written; see `Parked.ready`."""
        for one, event in self._parked.ready(wait):
            self._conclude(one, event)

    def _report(self, event: Event) -> None:
        """Hand an event to the listener of its request; without one the next `step` returns it."""
        if not self._service.deliver(event):
            self._unreported.append(event)

    def _admit(self) -> None:
        """Fill free rows. Replace them first if all are free and the next policy needs others; then close gaps."""
        while (turn := self._scheduler.next_policy()) is not None and not (self.rows and turn == self._rows.policy):
            with Guard(self._recover, partial(self._scheduler.waiting_for, turn)):
                self._runner.forget()  # recorded steps and staged copies hold the memory that the new rows need
                self._rotation.clear()
                self._use(self._admission.replace(self._rows, turn), self._scheduler.waiting)
        for one in self._scheduler.admit(self._rows.takes):
            with self._guarded(one):
                begin(one, cast(int, one.row), self._rows, self._prefixes)
        self._rotation.turn(self._scheduler, self._rows, self._prefixes, self._guarded)
        while (gap := self._scheduler.gap()) is not None:
            with self._guarded(gap.one):
                self._rows.move(gap.source, gap.target)
                self._scheduler.move(gap)

    def _guarded(self, one: Generation) -> Guard:
        """Return what keeps a failure within one request."""
        return Guard(self._recover, partial(list, (one,)))

    def _advance(self, run: Run) -> None:
        """Run the model, then choose the next tokens of the rows that are ready for one."""
        logits = self._runner.run(run, self._rows)
        ready = run.commit()
        if run.reads:
            for one in run.requests:
                self._prefixes.keep(one, self._rows)
        if not ready:
            return
        twins = [(place, one, twin) for place, one in ready if not one.token_ids for twin in self._twins.of(one)]
        places = [*(place for place, *_ in twins), *(place for place, _ in ready)]
        requests = [*(twin for *_, twin in twins), *(one for _, one in ready)]
        chosen = logits if len(requests) == len(logits) and not twins else logits[places]
        tokens = sampler.draw(chosen, requests, self._agreement.together)
        memories = {one.id: self._rows.take(cast(int, one.row)) for _, one, _ in twins}
        for n, (_, reader, twin) in enumerate(twins):
            with self._guarded(twin):
                self._bear(twin, reader, memories[reader.id], sampler.whole(tokens[n], twin), n)
        for one, token in zip(requests[len(twins) :], tokens[len(twins) :], strict=True):
            with self._guarded(one):
                self._take(one, sampler.whole(token, one))

    def _bear(self, twin: Generation, reader: Generation, contents: Contents, token: int, place: int) -> None:
        """Begin a request whose prompt another one has read: it has its first token, and waits for a row.

        Args:
            twin: the request.
            reader: the request that has read the prompt.
            contents: the memory of its prompt.
            token: its first token.
            place: its place in the queue.
        """
        self._twins.leave(twin)
        twin.mark("started")
        twin.load, twin.cached, twin.budget = lambda: contents, contents.seen, reader.budget
        unknown = twin.memory, twin.lost
        measure(twin, self._rows, cast(int, reader.row))  # if this token is its last one, it gets no row of its own
        self._take(twin, token)
        if twin.finish_reason is None:
            twin.memory, twin.lost = unknown
            self._scheduler.waiting.insert(place, twin)

    def _take(self, one: Generation, token: int) -> None:
        """Add a token to a request, which may end with it. A request that only reads ends without it."""
        event = Event(one.id, None, "") if one.reads else one.take(token)
        if one.reads:
            one.finish("length")
        if not one.finish_reason:
            self._report(event)
        elif (pending := self._end(one)) is None:
            self._conclude(one, event)
        else:
            self._parked.add(one, event, pending)

    def _end(self, one: Generation) -> Pending | None:
        """Free the row of a request that has all of its tokens. If its memory cannot be kept, it ends with an error.

        Returns:
            What its result must wait for.
        """
        pending = None
        try:
            if one.row is not None:
                measure(one, self._rows, one.row)
            if one.keep and one.row is not None:
                pending = one.keep(one, self._rows.take(one.row))
        except Exception as error:
            one.finish("error", reason_of(error))
        self._free(one)
        return pending

    def _conclude(self, one: Generation, event: Event) -> None:
        """Forget a request, and report its last event with its result."""
        self._let_go(one)
        self._report(replace(event, result=one.result()))

    def _free(self, one: Generation) -> None:
        """Free the row of a request, or its place in the queue."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        if (heir := self._twins.leave(one)) is not None:
            self._scheduler.waiting.appendleft(heir)

    def _let_go(self, one: Generation) -> None:
        """Forget a request, and free its row or its place in the queue."""
        self._free(one)
        if self._all.pop(one.id, None) is not None and one.left:
            one.left(one)

    def _use(self, rows: Rows, waiting: Iterable[Generation] = ()) -> None:
        """Run requests in these rows from now on."""
        self._rows, self._scheduler = rows, self._schedule(rows.count, alone=rows.alone, waiting=waiting)

    def _give_back(self) -> None:
        """Give up all memory."""
        self._runner.forget()
        self._prefixes.clear()
        self._rotation.clear()
        self._rows.allocate(0)
        self._admission.grammars.close()

    def _recover(self, error: BaseException, touched: Sequence[Generation]) -> None:
        """End the requests that a failure has touched. Rows are freed before anything runs that may fail again."""
        if self._agreement.together.ranks > 1 and not isinstance(error, KVKeepError):
            raise error  # the other processes may not have failed, and would wait for ever
        self._rows.renew()  # a layer that was left half way refuses to go on
        failed = [one for one in touched if one.id in self._all]
        for one in failed:
            one.finish("error", reason_of(error))
            self._let_go(one)
        for one in failed:
            self._report(Event(one.id, None, one.rest(), one.result()))
        with suppress(Exception):  # a handler of the user
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

"""The engine: a step gives rows to requests, plans batches, runs the model over them and takes the new tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn

from kvkeep.engine import sampler
from kvkeep.engine.admission import Admission
from kvkeep.engine.asked import Asked, check_numbers, listed, request_of, usable
from kvkeep.engine.batch import Run
from kvkeep.engine.choice import measure
from kvkeep.engine.coroutines import AsyncEvents
from kvkeep.engine.interrupts import Guard, Uninterrupted
from kvkeep.engine.own import keeps_states
from kvkeep.engine.request import Event, Generation, Result
from kvkeep.engine.rows import Rows
from kvkeep.engine.runner import Runner
from kvkeep.engine.sampling import Sampling
from kvkeep.engine.scheduler import Scheduler, pace
from kvkeep.engine.service import Box, Service
from kvkeep.errors import InputError, NoNumbersError
from kvkeep.memory import Memory
from kvkeep.models.device import reason_of
from kvkeep.models.hf import attach
from kvkeep.models.load import Tokenizer
from kvkeep.models.suitable import generator
from kvkeep.policies import DEFAULT
from kvkeep.policies.base import Policy

_log = logging.getLogger(__name__)


class Engine:
    """Runs many requests on one model, each in a row of KV memory that is allocated once.

    A request gets the tokens that it would get alone with the same ``prefill_chunk``, whatever runs beside it.

    Args:
        model: any model that `kvkeep.attach` takes, in evaluation mode.
        tokenizer: turns texts into tokens and back; without one, prompts are token ids.
        policy: the eviction policy of requests that do not name one.
        budget: tokens kept per layer and head; the most that a request may ask for.
        rows: number of sequences that run at once; by default 16, or as many as fit into ``kv_memory``.
        kv_memory: bytes that all rows together may take.
        prefill_chunk: prompt tokens per step; ``None``: all, so that the policy reads a prompt to its end, then evicts.
            A model with layers that keep a state reads prompts whole; its layers with slots take these chunks.
        layer_budget: how budgets are spread over layers, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.
        decode_every: prompt tokens for which each running row gets a token; by default 128 on a CPU, 1024 elsewhere.
        graphs: whether decode steps are recorded as CUDA graphs, where they can be; by default on CUDA.
        guard: of requests that have none, see `Request`.

    Raises:
        BudgetError: a number is out of range, or not one row fits into the memory.
        UnsupportedModelError: the model cannot run rows of different lengths, or its cache cannot be bounded.
    """

    def __init__(  # noqa: PLR0913  the choices of a user
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        policy: str | Policy = DEFAULT,
        budget: int = 1024,
        rows: int | None = None,
        kv_memory: int | None = None,
        prefill_chunk: int | None = None,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
        decode_every: int | None = None,
        graphs: bool | None = None,
        guard: float | None = None,
    ) -> None:
        numbers = {"rows": rows, "kv_memory": kv_memory, "prefill_chunk": prefill_chunk, "decode_every": decode_every}
        check_numbers(budget, **numbers)
        self.model, self.tokenizer = generator(attach(model)), tokenizer
        self.policy, self.budget, self._chunk = usable(policy), budget, prefill_chunk
        options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        if has_states := keeps_states(self.model):
            options["prefill_chunk"], self._chunk = prefill_chunk, None
        asked: dict[str, Any] = {"policy": self.policy, "budget": budget, "rows": rows, "kv_memory": kv_memory}
        asked |= {"chunk": prefill_chunk, "guard": guard}
        self._admission = Admission(self.model, tokenizer, **asked, options=options)
        graphs = not has_states and (self.model.device.type == "cuda" if graphs is None else graphs)
        self._runner = Runner(self.model, graphs=graphs)
        self._schedule = partial(Scheduler, chunk=self._chunk, decode_every=decode_every or pace(self.model.device))
        self._all: dict[int, Generation] = {}
        self._unreported: list[Event] = []
        self._service, self._closed, self._count = Service(), False, 0
        self._use(self._admission.make_rows(self.policy))

    @property
    def rows(self) -> int:
        """The number of sequences that run at once."""
        return self._rows.count

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in all layers, measured."""
        return self._rows.row_bytes

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or an interrupted step has left something to report."""
        return bool(self._all or self._unreported)

    @property
    def has_room(self) -> bool:
        """Whether fewer requests wait than there are rows: time to add more."""
        return len(self._scheduler.waiting) < max(1, self.rows)

    def memory(self) -> Memory:
        """Return the bytes of all rows, summed over real tensors."""
        return self._rows.memory()

    def generate(self, requests: Asked | Iterable[Asked], sampling: Sampling | None = None) -> list[Result]:
        """Run requests or texts to their ends and return their results in order; a single one gives a list of one.

        A text is the user's message in the chat template, and its tokens are chosen as ``sampling`` says.
        """
        return [result for _, result in sorted(self.run(requests, sampling))]

    def run(self, requests: Asked | Iterable[Asked], sampling: Sampling | None = None) -> Iterator[tuple[int, Result]]:
        """Run requests to their ends, and yield each result as soon as it is there, with its place in the input.

        Requests are taken from the iterable as rows become free, so it may be longer than memory could hold.
        """
        places: dict[int, int] = {}
        for event in self._drain(requests, places, sampling):
            if event.result:
                yield places.pop(event.id), event.result

    def stream(self, request: Asked, sampling: Sampling | None = None) -> Iterator[Event]:
        """Run one request or text and yield its tokens as they come. Whoever stops listening cancels the request."""
        return self._drain([request], {}, sampling)

    def astream(self, request: Asked, sampling: Sampling | None = None) -> AsyncEvents:
        """Run one request or text for a coroutine: ``async for event in engine.astream("a text")``."""
        return AsyncEvents(partial(self._add, request, sampling), self._service.leave)

    def check(self, request: Asked) -> None:
        """Raise the error with which `add` would refuse a request, without adding it."""
        with Uninterrupted(), self._service.turn:
            self._admission.check(request_of(request), self._count)

    def add(self, request: Asked, sampling: Sampling | None = None) -> int:
        """Queue a request or a text, whose events `step` returns, and return its number.

        Raises:
            InputError: it is no request, is longer than the model's positions, or has texts without a tokenizer; or the
                engine is closed.
            BudgetError: its budget is more than the engine's, or less than its policy protects, or not one row under
                its policy fits into the memory.
            CapacityError: its policy never evicts, and the budget is smaller than its tokens.
            PolicyError: its policy does not exist, or cannot be compared with others.
        """
        return self._add(request, sampling)

    def step(self) -> list[Event]:
        """Bring every running sequence one token further, and prompts one chunk; return the events of added requests.

        If a run of the model fails, the requests of its batch end with ``finish_reason="error"``, and no others. Ctrl-C
        waits for the end of the step, whose events are then returned by the next one.
        """
        self._step()
        with self._service.turn:
            events, self._unreported = self._unreported, []
            return events

    def cancel(self, number: int) -> Result | None:
        """End a request now; its row is free at the next step. Return ``None`` if it has ended already."""
        with Uninterrupted(), self._service.turn:
            one = self._all.get(number)
            if one is None:
                return None
            one.finish("cancelled")
            self._let_go(one)
            self._service.deliver(Event(number, None, "", result := one.result()))
            return result

    def close(self) -> None:
        """Cancel all requests and give the memory of the rows back. A closed engine takes no more requests."""
        with Uninterrupted(), self._service.turn:
            self._closed = True
            for number in list(self._all):
                self.cancel(number)
            self._runner.forget()
            self._rows.allocate(0)
        self._service.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drain(
        self, requests: Asked | Iterable[Asked], places: dict[int, int], sampling: Sampling | None
    ) -> Iterator[Event]:
        """Add requests and yield their events; ``places`` gets the place of each request's number."""

        def add(item: tuple[int, Asked], box: Box) -> None:
            places[self._add(item[1], sampling, box)] = item[0]

        source = iter(enumerate(listed(requests)))
        yield from self._service.drain(source, add, lambda: self.has_room, step=self._step, end=self.cancel)

    def _add(self, asked: Asked, sampling: Sampling | None, box: Box | None = None) -> int:
        with Uninterrupted(), self._service.turn:
            if self._closed:
                raise InputError("The engine is closed and takes no more requests; make a new one.")
            one = self._admission.check(request_of(asked, sampling), self._count)
            if box is not None and box.left:
                return one.id
            self._count += 1
            self._all[one.id] = one
            self._scheduler.waiting.append(one)
            if box is not None:
                self._service.listen(one.id, box, self._step)
        return one.id

    def _step(self) -> None:
        with Uninterrupted(), self._service.turn:
            self._service.sweep(self.cancel)
            with Guard(self._recover, self._scheduler.beginning):
                self._admit()
            for run in self._scheduler.plan():
                with Guard(self._recover, partial(getattr, run, "requests")):
                    self._advance(run)
            self._service.sweep(self.cancel)

    def _report(self, event: Event) -> None:
        """Hand an event to the listener of its request; without one the next `step` returns it."""
        if not self._service.deliver(event):
            self._unreported.append(event)

    def _admit(self) -> None:
        """Fill free rows. Replace them first if all are free and the next policy needs others; then close gaps."""
        while (turn := self._scheduler.next_policy()) is not None and not (self.rows and turn == self._rows.policy):
            with Guard(self._recover, partial(self._scheduler.waiting_for, turn)):
                self._runner.forget()  # recorded steps hold the memory that the new rows need
                self._use(self._admission.replace(self._rows, turn), self._scheduler.waiting)
        for one in self._scheduler.admit(self._rows.takes):
            with Guard(self._recover, partial(list, (one,))):
                one.mark("started")
                row, sequence, pins = cast(int, one.row), one.request.sequence, one.pins
                self._rows.begin(row, policy=one.policy, budget=one.budget, sequence=sequence, pins=pins)
        while (gap := self._scheduler.gap()) is not None:
            with Guard(self._recover, partial(list, (gap.one,))):
                self._rows.move(gap.source, gap.target)
                self._scheduler.move(gap)

    def _advance(self, run: Run) -> None:
        """Run the model, then choose the next tokens of the rows that are ready for one."""
        logits = self._runner.run(run, self._rows)
        if not (ready := run.commit()):
            return
        places, requests = [i for i, _ in ready], [one for _, one in ready]
        chosen = logits if len(requests) == len(logits) else logits[places]
        for one, token in zip(requests, sampler.draw(chosen, requests), strict=True):
            with Guard(self._recover, partial(list, (one,))):
                if token is None:
                    raise NoNumbersError
                self._take(one, token)

    def _take(self, one: Generation, token: int) -> None:
        """Add a token to a request, which may end with it."""
        event = one.take(token)
        if one.finish_reason:
            measure(one, self._rows)
            self._let_go(one)
            event = replace(event, result=one.result())
        self._report(event)

    def _let_go(self, one: Generation) -> None:
        """Free the row of a request, or its place in the queue, and forget the request."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        self._all.pop(one.id, None)

    def _use(self, rows: Rows, waiting: Iterable[Generation] = ()) -> None:
        """Run requests in these rows from now on."""
        self._rows, self._scheduler = rows, self._schedule(rows.count, alone=rows.alone, waiting=waiting)

    def _recover(self, error: BaseException, touched: Sequence[Generation]) -> None:
        """End the requests that a failure has touched. Rows are freed before anything runs that may fail again."""
        self._rows.renew()  # a layer that was left half way refuses to go on
        failed = [one for one in touched if one.id in self._all]
        for one in failed:
            one.finish("error", reason_of(error))
            self._let_go(one)
        for one in failed:
            self._report(Event(one.id, None, one.rest(), one.result()))
        with suppress(Exception):  # a handler of the user
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

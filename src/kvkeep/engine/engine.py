"""The engine: requests go in, and each step brings every running sequence one token further.

A step gives rows to waiting requests, plans batches, runs the model over each batch and takes the new tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn

from kvkeep import budget as budgets
from kvkeep.engine import sampler
from kvkeep.engine.admission import Admission, usable
from kvkeep.engine.interrupts import Guard, Uninterrupted
from kvkeep.engine.own import keeps_states
from kvkeep.engine.request import Event, Generation, Request, Result
from kvkeep.engine.rows import Rows
from kvkeep.engine.runner import Runner
from kvkeep.engine.scheduler import Batch, Scheduler
from kvkeep.errors import InputError, NoNumbersError
from kvkeep.memory import Memory
from kvkeep.models.device import reason_of
from kvkeep.models.hf import attach
from kvkeep.models.load import Model, Tokenizer
from kvkeep.models.suitable import unwrapped
from kvkeep.policies.base import Policy

_log = logging.getLogger(__name__)


class Engine:
    """Runs many requests on one model, each in a row of KV memory that is allocated once.

    A request gets the tokens that it would get alone with the same ``prefill_chunk``, whatever runs beside it.

    Args:
        model: any model that `kvkeep.attach` takes, in evaluation mode.
        tokenizer: turns tokens into text; needed for texts and stop texts only.
        policy: the eviction policy of requests that do not name one.
        budget: tokens kept per layer and head; the most that a request may ask for.
        rows: number of sequences that run at once; by default 16, or as many as fit into ``kv_memory``.
        kv_memory: bytes that all rows together may take; gives the number of rows if ``rows`` does not.
        prefill_chunk: prompt tokens that are fed in one step; ``None`` feeds every prompt whole, as the papers do. A
            model with layers that keep a state reads prompts whole; its layers with slots take them in these chunks.
        layer_budget: how budgets are spread over layers, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.
        graphs: whether decode steps are recorded as CUDA graphs, where they can be; by default on CUDA.

    Raises:
        BudgetError: a number is out of range, or not one row fits into the memory.
        UnsupportedModelError: the model cannot run rows of different lengths, or its cache cannot be bounded.
    """

    def __init__(  # noqa: PLR0913  the choices of a user
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        policy: str | Policy = "h2o",
        budget: int = 1024,
        rows: int | None = None,
        kv_memory: int | None = None,
        prefill_chunk: int | None = 512,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
        graphs: bool | None = None,
    ) -> None:
        for number in (budget, rows, kv_memory, prefill_chunk):
            budgets.check_one(1 if number is None else number)
        self.model: Model = unwrapped(attach(model))
        self.tokenizer = tokenizer
        self.policy, self.budget, self._chunk = usable(policy), budget, prefill_chunk
        options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        if has_states := keeps_states(self.model):
            options["prefill_chunk"], self._chunk = prefill_chunk, None
        asked: dict[str, Any] = {"policy": self.policy, "budget": budget, "rows": rows, "kv_memory": kv_memory}
        self._admission = Admission(self.model, tokenizer, **asked, options=options)
        graphs = not has_states and (self.model.device.type == "cuda" if graphs is None else graphs)
        self._runner = Runner(self.model, graphs=graphs)
        self._all: dict[int, Generation] = {}
        self._count = 0
        self._unreported: list[Event] = []
        self._draining = False
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

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Run requests to their ends and return their results in order.

        Raises:
            InputError: other requests are still running.
        """
        found = dict(self.run(requests))
        return [found[place] for place in sorted(found)]

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Run requests to their ends, and yield each result as soon as it is there, with its place in the input.

        Requests are taken from the iterable as rows become free, so it may be longer than memory could hold.

        Raises:
            InputError: other requests are still running.
        """
        places: dict[int, int] = {}
        for event in self._drain(requests, places):
            if event.result:
                yield places.pop(event.id), event.result

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request and yield its tokens as they come.

        Raises:
            InputError: other requests are still running.
        """
        return self._drain([request], {})

    def check(self, request: Request) -> None:
        """Refuse a request that `add` would refuse, without adding it.

        Raises:
            KVKeepError: see `add`.
        """
        self._admission.check(request, self._count)

    def add(self, request: Request) -> int:
        """Queue a request and return its number.

        Raises:
            InputError: it is no request, is longer than the model's positions, or wants stop texts without a tokenizer;
                or `run`, `generate` or `stream` is under way, which take their own requests only.
            BudgetError: its budget is more than the engine's, or less than its policy protects, or not one row under
                its policy fits into the memory.
            CapacityError: its policy never evicts, and the budget is smaller than its tokens.
            PolicyError: its policy does not exist, or cannot be compared with others.
        """
        self._check_alone()
        return self._add(request)

    def step(self) -> list[Event]:
        """Bring every running sequence one token further, and prompts one chunk.

        If a run of the model fails, the requests of its batch end with ``finish_reason="error"``, and no others. Ctrl-C
        waits for the end of the step, whose events are then returned by the next one.

        Raises:
            InputError: `run`, `generate` or `stream` is under way, which step by themselves.
        """
        self._check_alone()
        return self._step()

    def cancel(self, number: int) -> Result | None:
        """End a request now; its row is free at the next step. Return ``None`` if it has ended already."""
        with Uninterrupted():
            one = self._all.get(number)
            if one is None:
                return None
            one.finish("cancelled")
            self._let_go(one)
            return one.result()

    def _check_alone(self) -> None:
        if self._draining:
            raise InputError(
                "The engine is busy with run, generate or stream, which add and step by themselves. Wait for them to "
                "end, or use add and step for all requests."
            )

    def _drain(self, requests: Iterable[Request], places: dict[int, int]) -> Iterator[Event]:
        """Add requests and step until all have ended; ``places`` gets the place of each request's number."""
        self._check_alone()
        if self.busy:
            raise InputError("The engine is still busy with other requests; let them end, or cancel them, first.")
        if not isinstance(requests, Iterable):
            raise InputError(f"{type(requests).__name__} is no list of requests; put a single one into a list.")
        source, more, self._draining = enumerate(requests), True, True
        try:
            while more or self.busy:
                while more and self.has_room:
                    if more := (item := next(source, None)) is not None:
                        places[self._add(item[1])] = item[0]
                yield from self._step()
        finally:  # a caller that stops listening wants no more tokens
            for number in list(self._all):
                self.cancel(number)
            self._unreported.clear()
            self._draining = False

    def _add(self, request: Request) -> int:
        one = self._admission.check(request, self._count)
        with Uninterrupted():
            self._count += 1
            self._all[one.id] = one
            self._scheduler.waiting.append(one)
        return one.id

    def _step(self) -> list[Event]:
        events = self._unreported  # the next step returns them if this one is interrupted
        with Uninterrupted():
            with self._guard(self._scheduler.beginning):
                self._admit()
            for batch in self._scheduler.plan():
                with self._guard(partial(getattr, batch, "requests")):
                    self._advance(batch)
        self._unreported = []
        return events

    def _admit(self) -> None:
        """Fill free rows. Replace them first if all are free and the next policy needs others; then close gaps."""
        while (turn := self._scheduler.next_policy()) is not None and not self._serves(turn):
            with self._guard(partial(self._scheduler.waiting_for, turn)):
                self._runner.forget()  # recorded steps hold the memory that the new rows need
                self._use(self._admission.replace(self._rows, turn), self._scheduler.waiting)
        for one in self._scheduler.admit(self._rows.takes):
            with self._guard(partial(list, (one,))):
                one.mark("started")
                row = cast(int, one.row)
                self._rows.begin(row, policy=one.policy, budget=one.budget, sequence=one.request.sequence)
        while (gap := self._scheduler.gap()) is not None:
            with self._guard(partial(list, (gap.one,))):
                self._rows.move(gap.source, gap.target)
                self._scheduler.move(gap)

    def _advance(self, batch: Batch) -> None:
        """Run the model over a batch, then choose the next tokens of the rows that are ready for one."""
        logits = self._runner.run(batch, self._rows)
        if not (ready := batch.commit()):
            return
        places, requests = [i for i, _ in ready], [one for _, one in ready]
        chosen = logits if len(requests) == len(logits) else logits[places]
        for one, token in zip(requests, sampler.draw(chosen, requests), strict=True):
            with self._guard(partial(list, (one,))):
                if token is None:
                    raise NoNumbersError
                self._take(one, token)

    def _take(self, one: Generation, token: int) -> None:
        """Add a token to a request, which may end with it."""
        event = one.take(token)
        if one.finish_reason:
            one.memory = self._rows.memory_of(cast(int, one.row))
            self._let_go(one)
            event = replace(event, result=one.result())
        self._unreported.append(event)

    def _let_go(self, one: Generation) -> None:
        """Free the row of a request, or its place in the queue, and forget the request."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        self._all.pop(one.id, None)

    def _serves(self, policy: Policy) -> bool:
        """Return whether there are rows, and they were made for this policy."""
        return self.rows > 0 and (policy is self._rows.policy or policy == self._rows.policy)

    def _use(self, rows: Rows, waiting: Iterable[Generation] = ()) -> None:
        """Run requests in these rows from now on."""
        scheduler = Scheduler(rows.count, self._chunk, alone=rows.alone, waiting=waiting)
        self._rows, self._scheduler = rows, scheduler

    def _guard(self, touched: Callable[[], Sequence[Generation]]) -> Guard:
        """Return a context in which a failure ends the requests that it touched."""
        return Guard(self._recover, touched)

    def _recover(self, error: BaseException, touched: Sequence[Generation]) -> None:
        """End the requests that a failure has touched. Rows are freed before anything runs that may fail again."""
        self._rows.renew()  # a layer that was left half way refuses to go on
        failed = [one for one in touched if one.id in self._all]
        message = reason_of(error)
        for one in failed:
            one.finish("error", message)
            self._let_go(one)
        self._unreported += [Event(one.id, None, one.rest(), one.result()) for one in failed]
        with suppress(Exception):  # a handler of the user
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

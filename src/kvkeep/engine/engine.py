"""The engine: requests go in, a step brings every running sequence one token further."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from kvkeep import budget as budgets
from kvkeep.engine import sampler
from kvkeep.engine.admission import Admission
from kvkeep.engine.request import Event, Generation, Request, Result
from kvkeep.engine.runner import Runner
from kvkeep.engine.scheduler import Batch, Scheduler
from kvkeep.errors import InputError
from kvkeep.memory import Memory
from kvkeep.models.device import reason_of
from kvkeep.models.hf import attach
from kvkeep.models.load import Model, Tokenizer
from kvkeep.models.own import keeps_states
from kvkeep.models.rows import Rows
from kvkeep.policies.base import Policy
from kvkeep.registry import parse

_log = logging.getLogger(__name__)


class Engine:
    """Runs many requests on one model, each in a row of KV memory that is allocated once.

    A request gets the tokens that it would get alone with the same chunk, whatever else runs beside it.

    Args:
        model: any model that `kvkeep.attach` takes, in evaluation mode.
        tokenizer: turns tokens into text; needed for texts and stop texts only.
        policy: the eviction policy of requests that do not name one.
        budget: tokens kept per layer and head; the most that a request may ask for.
        rows: how many sequences run at once; by default 16, or what fits into ``kv_memory``.
        kv_memory: instead of ``rows``: bytes that the rows may take together.
        prefill_chunk: prompt tokens that are fed in one step; ``None`` takes every prompt whole, as the papers do. If
            the model has layers that keep a state, it reads prompts whole, and its layers with slots take the chunks.
        layer_budget: how budgets are spread over layers, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.
        graphs: whether decode steps are recorded as CUDA graphs; by default where there is CUDA. Policies and models
            whose steps cannot be recorded run as they do without.

    Raises:
        BudgetError: a number is out of range, or not one row fits into the memory.
        UnsupportedModelError: the model cannot run rows of different lengths, or its cache cannot be bounded.
    """

    def __init__(  # noqa: PLR0913  what a user of an engine decides
        self,
        model: Model,
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
            budgets.check(1 if number is None else number)
        self.model = attach(model)
        self.tokenizer = tokenizer
        self.policy = parse(policy) if isinstance(policy, str) else policy
        self.budget = budget
        self._kv_memory = kv_memory
        self._options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        self._chunk = prefill_chunk
        if has_states := keeps_states(self.model.config):
            self._options["prefill_chunk"], self._chunk = prefill_chunk, None
        self._admission = Admission(
            self.model,
            tokenizer,
            policy=self.policy,
            budget=budget,
            rows=rows,
            kv_memory=kv_memory,
            chunk=self._chunk,
            options=self._options,
        )
        wanted = self.model.device.type == "cuda" if graphs is None else graphs
        self._runner = Runner(self.model, graphs=wanted and not has_states)
        self._all: dict[int, Generation] = {}
        self._count = 0
        self._unreported: list[Event] = []
        self._rows, self._scheduler = self._make_rows(self.policy)

    @property
    def rows(self) -> int:
        """How many sequences run at once."""
        return self._rows.count

    @property
    def row_bytes(self) -> int:
        """What a row takes in all layers, measured."""
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
        """Bytes of all rows, summed over real tensors."""
        return self._rows.memory()

    def add(self, request: Request) -> int:
        """Queue a request and return its number.

        Raises:
            InputError: it is longer than the model's positions, or wants stop texts without a tokenizer.
            BudgetError: its budget is more than the engine's, or less than what its policy protects, or not one row
                under its policy fits into the memory.
            CapacityError: its policy never evicts and the budget does not hold all of it.
            PolicyError: its policy does not exist.
        """
        one = self._admission.check(request, self._count)
        self._count += 1
        self._all[one.id] = one
        self._scheduler.waiting.append(one)
        return one.id

    def step(self) -> list[Event]:
        """Bring every running sequence one token further, prompts one chunk.

        A run of the model that fails ends the requests of its batch with ``finish_reason="error"`` and harms no other.
        An interrupt (Ctrl-C) ends them, too; what the step had brought until then is reported by the next one.
        """
        events, self._unreported = self._unreported, []
        try:
            with self._guard(events, self._beginning):
                self._admit(events)
            for batch in self._scheduler.plan():
                with self._guard(events, lambda batch=batch: batch.requests):  # type: ignore[misc]
                    self._advance(batch, events)
        except BaseException:
            self._unreported = events
            raise
        return events

    def cancel(self, number: int) -> Result | None:
        """End a request now; its row is free at the next step. ``None`` if it has ended already."""
        one = self._all.get(number)
        if one is None:
            return None
        one.finish("cancelled")
        return self._end(one)

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Run requests to their ends and return their results in order.

        Raises:
            InputError: other requests are still running.
        """
        found = dict(self.run(requests))
        return [found[place] for place in sorted(found)]

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Run requests to their ends and hand out each result as soon as it is there, with its place in the input.

        Requests are taken from the iterable as rows become free, so there may be more of them than memory holds.

        Raises:
            InputError: other requests are still running.
        """
        places: dict[int, int] = {}
        for event in self._drain(enumerate(requests), places):
            if event.result:
                yield places.pop(event.id), event.result

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request and hand out its tokens as they come.

        Raises:
            InputError: other requests are still running.
        """
        return self._drain(iter([(0, request)]), {})

    def _drain(self, source: Iterator[tuple[int, Request]], places: dict[int, int]) -> Iterator[Event]:
        """Step until all requests have ended; note the place of each number."""
        if self.busy:
            raise InputError("The engine is still busy with other requests; let them end, or cancel them, first.")
        more = True
        try:
            while more or self.busy:
                while more and self.has_room:
                    place, request = next(source, (-1, None))
                    if more := request is not None:
                        places[self.add(request)] = place
                yield from self.step()
        finally:  # whoever stops listening wants no more tokens
            for number in list(self._all):
                self.cancel(number)
            self._unreported.clear()

    def check(self, request: Request) -> None:
        """Refuse what `add` would refuse, without adding it.

        Raises:
            KVKeepError: see `add`.
        """
        self._admission.check(request, self._count)

    @contextmanager
    def _guard(self, events: list[Event], touched: Callable[[], list[Generation]]) -> Iterator[None]:
        """End the requests that were touched by what fails; an interrupt goes on to the caller."""
        try:
            yield
        except BaseException as error:
            self._rows.renew()  # a layer that was left half way refuses to go on
            events += [self._fail(one, reason_of(error)) for one in touched() if one.id in self._all]
            if not isinstance(error, Exception):
                raise
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

    def _beginning(self) -> list[Generation]:
        """Requests that have a row, and none of whose tokens were fed."""
        return [one for one in self._scheduler.running if not one.fed]

    def _admit(self, events: list[Event]) -> None:
        """Fill free rows; make others for a policy that needs them, when all are free; keep those in use together."""
        while (turn := self._scheduler.next_policy()) is not None and (turn != self._rows.policy or not self.rows):
            with self._guard(events, lambda turn=turn: self._waiting_for(turn)):  # type: ignore[misc]
                self._turn_to(turn)
        for one in self._scheduler.admit(self._rows.takes):
            with self._guard(events, lambda one=one: [one]):  # type: ignore[misc]
                one.mark("started")
                row = cast(int, one.row)
                self._rows.begin(row, policy=one.policy, budget=one.budget, sequence=one.request.sequence)
        while (gap := self._scheduler.close_gap()) is not None:
            with self._guard(events, lambda gap=gap: [gap[0]]):  # type: ignore[misc]
                self._rows.move(gap[1], cast(int, gap[0].row))

    def _waiting_for(self, policy: Policy) -> list[Generation]:
        """Requests that wait for rows under a policy."""
        return [one for one in self._scheduler.waiting if one.policy == policy]

    def _turn_to(self, policy: Policy) -> None:
        """Replace the rows, none of which is taken, by rows for another policy; if that fails, there are new old ones.

        Raises:
            BudgetError: there is no memory for one.
        """
        before, count, waiting = self._rows, self.rows, self._scheduler.waiting
        before.allocate(0)  # before there is memory for others
        try:
            self._rows, self._scheduler = self._make_rows(policy)
            self._scheduler.waiting = waiting
        except BaseException:
            before.allocate(count, most_bytes=self._kv_memory)
            raise

    def _make_rows(self, policy: Policy) -> tuple[Rows, Scheduler]:
        """Rows for a policy, and who runs in them.

        Raises:
            BudgetError: there is no memory for one.
        """
        if self._runner.graphs is not None:
            self._runner.graphs.clear()
        rows = Rows(self.model, policy, self.budget, **self._options)
        rows.allocate(self._admission.rows_that_fit(rows), most_bytes=self._kv_memory)
        return rows, Scheduler(rows.count, self._chunk, alone=rows.alone)

    def _advance(self, batch: Batch, events: list[Event]) -> None:
        """Run the model over a batch, then choose the next tokens of the rows that are ready for one."""
        logits = self._runner.run(batch, self._rows)
        ready = batch.commit()
        if not ready:
            return
        places, those = [i for i, _ in ready], [one for _, one in ready]
        chosen = logits if len(those) == len(logits) else logits[places]
        for one, token in zip(those, sampler.draw(chosen, those), strict=True):
            with self._guard(events, lambda one=one: [one]):  # type: ignore[misc]
                events.append(self._fail(one, sampler.NO_NUMBERS) if token is None else self._take(one, token))

    def _take(self, one: Generation, token: int) -> Event:
        """Add a token to a generation, which may be its last."""
        event = one.take(token)
        return replace(event, result=self._end(one)) if one.finish_reason else event

    def _fail(self, one: Generation, error: str) -> Event:
        """End a generation that cannot go on."""
        text = ""
        with suppress(Exception):  # perhaps it is the tokenizer that fails
            text = one.tail.end() if one.tail else ""
        one.finish("error", error)
        return Event(one.id, None, text, self._end(one))

    def _end(self, one: Generation) -> Result:
        """Let go of a generation."""
        memory = Memory() if one.row is None else self._rows.memory_of(one.row)
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        del self._all[one.id]
        return one.result(memory)

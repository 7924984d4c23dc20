"""What an engine does in a step: give rows to requests, run the model, take tokens, and recover from failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

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
from kvkeep.policies.base import Policy

_log = logging.getLogger(__name__)


class Core:
    """Requests, their rows and the steps that bring them further; `Engine` adds the ways to run them."""

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
            budgets.check_one(1 if number is None else number)
        self.model = attach(model)
        self.tokenizer = tokenizer
        self.policy = usable(policy)
        self.budget = budget
        self._kv_memory, self._chunk = kv_memory, prefill_chunk
        self._options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        if has_states := keeps_states(self.model):
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
        self._draining = False
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
            InputError: it is no request, is longer than the model's positions, or wants stop texts without a tokenizer;
                or `run`, `generate` or `stream` is under way, which take their own requests only.
            BudgetError: its budget is more than the engine's, or less than what its policy protects, or not one row
                under its policy fits into the memory.
            CapacityError: its policy never evicts and the budget does not hold all of it.
            PolicyError: its policy does not exist, or cannot be compared with others.
        """
        self._check_alone()
        return self._add(request)

    def step(self) -> list[Event]:
        """Bring every running sequence one token further, prompts one chunk.

        A run of the model that fails ends the requests of its batch with ``finish_reason="error"`` and harms no other.
        Ctrl-C waits for the end of the step; what it has brought is then reported by the next one.

        Raises:
            InputError: `run`, `generate` or `stream` is under way, which step themselves.
        """
        self._check_alone()
        return self._step()

    def cancel(self, number: int) -> Result | None:
        """End a request now; its row is free at the next step. ``None`` if it has ended already."""
        with Uninterrupted():
            one = self._all.get(number)
            if one is None:
                return None
            one.finish("cancelled")
            self._let_go(one)
            return one.result()

    def check(self, request: Request) -> None:
        """Refuse what `add` would refuse, without adding it.

        Raises:
            KVKeepError: see `add`.
        """
        self._admission.check(request, self._count)

    def _check_alone(self) -> None:
        if self._draining:
            raise InputError(
                "The engine is busy with run, generate or stream, which add and step by themselves. Wait for them to "
                "end, or use add and step for all requests."
            )

    def _add(self, request: Request) -> int:
        one = self._admission.check(request, self._count)
        with Uninterrupted():
            self._count += 1
            self._all[one.id] = one
            self._scheduler.waiting.append(one)
        return one.id

    def _step(self) -> list[Event]:
        events = self._unreported  # reported by the next step, if this one does not come to its end
        with Uninterrupted():
            with self._guard(self._beginning):
                self._admit()
            for batch in self._scheduler.plan():
                with self._guard(partial(getattr, batch, "requests")):
                    self._advance(batch)
        self._unreported = []
        return events

    def _guard(self, touched: Callable[[], Sequence[Generation]]) -> Guard:
        """End the requests that were touched by what fails in this context."""
        return Guard(self._recover, touched)

    def _recover(self, error: BaseException, touched: Sequence[Generation]) -> None:
        """End what a failure has touched. Rows are given back before anything runs that may fail again."""
        self._rows.renew()  # a layer that was left half way refuses to go on
        failed = [one for one in touched if one.id in self._all]
        message = reason_of(error)
        for one in failed:
            one.finish("error", message)
            self._let_go(one)
        self._unreported += [Event(one.id, None, _rest_of(one), one.result()) for one in failed]
        with suppress(Exception):  # a handler of the user
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

    def _beginning(self) -> list[Generation]:
        """Whom a failure before the first batch has touched: those with a row that were fed nothing; or who is next."""
        return [one for one in self._scheduler.running if not one.fed] or list(self._scheduler.waiting)[:1]

    def _admit(self) -> None:
        """Fill free rows; make others for a policy that needs them, when all are free; keep those in use together."""
        while (turn := self._scheduler.next_policy()) is not None and not self._serves(turn):
            with self._guard(partial(self._waiting_for, turn)):
                self._turn_to(turn)
        for one in self._scheduler.admit(self._rows.takes):
            with self._guard(partial(list, (one,))):
                one.mark("started")
                row = cast(int, one.row)
                self._rows.begin(row, policy=one.policy, budget=one.budget, sequence=one.request.sequence)
        while (gap := self._scheduler.gap()) is not None:
            with self._guard(partial(list, (gap.one,))):
                self._rows.move(gap.source, gap.target)
                self._scheduler.move(gap)

    def _serves(self, policy: Policy) -> bool:
        """Whether there are rows, and they were made for this policy."""
        return self.rows > 0 and (policy is self._rows.policy or policy == self._rows.policy)

    def _waiting_for(self, policy: Policy) -> list[Generation]:
        """Requests that wait for rows under a policy."""
        return [one for one in self._scheduler.waiting if one.policy is policy or one.policy == policy]

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

    def _advance(self, batch: Batch) -> None:
        """Run the model over a batch, then choose the next tokens of the rows that are ready for one."""
        logits = self._runner.run(batch, self._rows)
        ready = batch.commit()
        if not ready:
            return
        places, those = [i for i, _ in ready], [one for _, one in ready]
        chosen = logits if len(those) == len(logits) else logits[places]
        for one, token in zip(those, sampler.draw(chosen, those), strict=True):
            with self._guard(partial(list, (one,))):
                if token is None:
                    raise NoNumbersError
                self._take(one, token)

    def _take(self, one: Generation, token: int) -> None:
        """Add a token to a generation, which may be its last."""
        event = one.take(token)
        if one.finish_reason:
            one.memory = self._rows.memory_of(cast(int, one.row))
            self._let_go(one)
            event = replace(event, result=one.result())
        self._unreported.append(event)

    def _let_go(self, one: Generation) -> None:
        """Free what a generation holds."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        self._all.pop(one.id, None)


def _rest_of(one: Generation) -> str:
    """The text that was held back."""
    with suppress(BaseException):  # perhaps it is the tokenizer that fails, or the user has had enough
        return one.tail.end() if one.tail else ""
    return ""

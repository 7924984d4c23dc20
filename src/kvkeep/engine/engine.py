"""The engine: requests go in, a step brings every running sequence one token further."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.cache import BoundedCache
from kvkeep.engine import sampler
from kvkeep.engine.request import Event, Generation, Request, Result
from kvkeep.engine.runner import Runner
from kvkeep.engine.scheduler import Batch, Scheduler
from kvkeep.engine.stops import StopText
from kvkeep.errors import BudgetError, CapacityError, InputError
from kvkeep.memory import Memory
from kvkeep.models.hf import attach
from kvkeep.models.load import Model, Tokenizer, position_limit
from kvkeep.models.rows import Rows, largest_budget
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec

DEFAULT_ROWS = 16


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
        prefill_chunk: prompt tokens that are fed in one step; ``None`` takes every prompt whole, as the papers do.
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
        self._wanted, self._kv_memory, self._chunk = rows, kv_memory, prefill_chunk
        self._options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        self._runner = Runner(self.model, graphs=self.model.device.type == "cuda" if graphs is None else graphs)
        self._limit = position_limit(self.model)
        self._end_ids = _end_ids(self.model)
        self._all: dict[int, Generation] = {}
        self._count = 0
        self._known: set[tuple[Policy, int]] = set()
        self._vocabulary: int = self.model.config.get_text_config(decoder=True).vocab_size
        self._turn_to(self.policy)

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
        """Whether a request waits or runs."""
        return bool(self._all)

    @property
    def has_room(self) -> bool:
        """Whether fewer requests wait than there are rows: time to add more."""
        return len(self._scheduler.waiting) < self.rows

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
        one = self.check(request)
        self._count += 1
        self._all[one.id] = one
        self._scheduler.waiting.append(one)
        return one.id

    def step(self) -> list[Event]:
        """Bring every running sequence one token further, prompts one chunk."""
        self._admit()
        events: list[Event] = []
        for batch in self._scheduler.plan():
            events += self._take(batch, self._runner.run(batch, self._rows))
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

    def check(self, request: Request) -> Generation:
        """What `add` would run, without adding it, or an error that says why it cannot.

        Raises:
            KVKeepError: see `add`.
        """
        chosen = self.policy if request.policy is None else request.policy
        policy = parse(chosen) if isinstance(chosen, str) else chosen
        budget = self.budget if request.budget is None else request.budget
        budgets.check(budget)
        if budget > self.budget:
            raise BudgetError(
                f"A budget of {budget} is more than the engine's {self.budget}: its rows have memory for no more. Make "
                "an engine with a larger budget, or ask for less."
            )
        if (policy, budget) not in self._known:
            BoundedCache(self.model.config, policy, budget, **self._options)  # refuses what does not go together
            if self._kv_memory is not None and policy not in {known for known, _ in self._known}:
                self._rows_that_fit(Rows(self.model, policy, self.budget, **self._options))
            self._known.add((policy, budget))
        total = len(request.prompt) + request.sampling.max_new_tokens - 1  # the last token is never fed
        needed = total - max(0, self._at_once(request) - (budget - policy.spare)) if policy.evicts else total
        if needed > budget and (policy.grows or not policy.evicts):
            raise CapacityError(
                f"{spec(policy)} does not evict generated tokens: {len(request.prompt)} tokens of the prompt and "
                f"{request.sampling.max_new_tokens} new ones need {needed} slots, and the budget is {budget}."
            )
        if self._limit is not None and total > self._limit:
            raise InputError(
                f"The model has learned positions for {self._limit} tokens; the request needs {total}. Shorten the "
                "prompt or ask for fewer new tokens."
            )
        if max(request.prompt) >= self._vocabulary or min(request.prompt) < 0:
            raise InputError(f"The prompt has tokens outside of the model's vocabulary of {self._vocabulary}.")
        if request.stop and self.tokenizer is None:
            raise InputError("Stop texts need a tokenizer: make the engine with one.")
        ends = frozenset() if request.ignore_end else self._end_ids
        tail = StopText(self._decode, request.stop) if self.tokenizer else None
        return Generation(self._count, request, policy, budget, ends, tail)

    def _at_once(self, request: Request) -> int:
        """Tokens of a prompt that come several at a time; a chunk of one counts as generated."""
        n = len(request.prompt)
        return 0 if self._chunk == 1 else n if self._chunk is None else n - (n % self._chunk == 1)

    def _admit(self) -> None:
        """Fill free rows; make others for a policy that needs them, when all are free; keep those in use together."""
        if (turn := self._scheduler.next_policy()) is not None and turn != self._rows.policy:
            waiting = self._scheduler.waiting
            self._rows.allocate(0)  # before there is memory for others
            self._turn_to(turn)
            self._scheduler.waiting = waiting
        for one in self._scheduler.admit(self._rows.takes):
            one.mark("started")
            self._rows.begin(cast(int, one.row), policy=one.policy, budget=one.budget, sequence=one.request.sequence)
        while (gap := self._scheduler.close_gap()) is not None:
            self._rows.move(*gap)

    def _turn_to(self, policy: Policy) -> None:
        """Make rows for a policy."""
        if self._runner.graphs is not None:
            self._runner.graphs.clear()
        self._rows = Rows(self.model, policy, self.budget, **self._options)
        count = self._rows_that_fit(self._rows)
        self._rows.allocate(count, most_bytes=self._kv_memory)
        self._scheduler = Scheduler(count, self._chunk, alone=policy.cascades)

    def _rows_that_fit(self, rows: Rows) -> int:
        """How many rows like these there are to be.

        Raises:
            BudgetError: there is no memory for one.
        """
        if self._kv_memory is None:
            return self._wanted or DEFAULT_ROWS
        fits = self._kv_memory // rows.row_bytes
        if not fits:
            found = largest_budget(self.model, rows.policy, self.budget, self._kv_memory, **self._options)
            advice = "." if found is None else f", or a budget of {found} or less."
            raise BudgetError(
                f"Not one row fits: {spec(rows.policy)} with a budget of {self.budget} takes {rows.row_bytes} bytes "
                f"per row, and there are {self._kv_memory}. Give more memory{advice}"
            )
        return min(fits, self._wanted or fits)

    def _take(self, batch: Batch, logits: Float[Tensor, "n V"]) -> list[Event]:
        """Choose the next tokens of the rows that are ready for one."""
        ready = batch.ready()
        if not ready:
            return []
        places, those = [i for i, _ in ready], [one for _, one in ready]
        chosen = logits if len(those) == len(logits) else logits[places]
        events = [one.take(token) for one, token in zip(those, sampler.draw(chosen, those), strict=True)]
        return [
            replace(event, result=self._end(self._all[event.id])) if self._all[event.id].finish_reason else event
            for event in events
        ]

    def _end(self, one: Generation) -> Result:
        """Let go of a generation."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        del self._all[one.id]
        return one.result()

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _end_ids(model: Model) -> frozenset[int]:
    """The tokens with which a model ends its text."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

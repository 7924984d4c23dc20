"""The engine: requests go in, a step brings every running sequence one token further."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvkeep.engine.core import Core
from kvkeep.engine.request import Event, Request, Result
from kvkeep.errors import InputError


class Engine(Core):
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
        for event in self._drain(requests, places):
            if event.result:
                yield places.pop(event.id), event.result

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request and hand out its tokens as they come.

        Raises:
            InputError: other requests are still running.
        """
        return self._drain([request], {})

    def _drain(self, requests: Iterable[Request], places: dict[int, int]) -> Iterator[Event]:
        """Step until all requests have ended; note the place of each number."""
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
        finally:  # whoever stops listening wants no more tokens
            for number in list(self._all):
                self.cancel(number)
            self._unreported.clear()
            self._draining = False

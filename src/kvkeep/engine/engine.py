"""The engine: requests and texts in, tokens and results out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from kvkeep.engine import scheduler
from kvkeep.engine.admission import Admission
from kvkeep.engine.asked import Asked, check_numbers, listed, request_of, usable
from kvkeep.engine.configured import Source, configured
from kvkeep.engine.coroutines import AsyncEvents
from kvkeep.engine.interrupts import Uninterrupted
from kvkeep.engine.keeping import Keeping
from kvkeep.engine.own import keeps_states
from kvkeep.engine.prefixes import Prefixes, check_prefix_memory
from kvkeep.engine.request import Event, Result
from kvkeep.engine.rotation import Rotation
from kvkeep.engine.runner import Runner
from kvkeep.engine.sampling import Sampling
from kvkeep.engine.service import Box
from kvkeep.engine.sessions import Sessions
from kvkeep.engine.shelf import Shelf
from kvkeep.engine.split import Agreement, check_split
from kvkeep.engine.staging import staging_for
from kvkeep.kv.memory_usage import Memory
from kvkeep.models.attention import attach
from kvkeep.models.device import device_of
from kvkeep.models.load import Tokenizer
from kvkeep.models.support import generator
from kvkeep.policies import DEFAULT
from kvkeep.policies.base import Policy


class Engine(Keeping):
    """Runs many requests on one model, each in a row of KV memory that is allocated once.

    A request gets the tokens that it would get alone with the same ``prefill_chunk``, whatever runs beside it. Where
    transformers has split the model over processes, each of them makes an engine and gives it the same requests, which
    they compare before each step; see ``docs/tensor-parallel.md``.

    Args:
        model: any model that `kvkeep.attach` takes, in evaluation mode.
        tokenizer: turns texts into tokens and back; without one, prompts are token ids.
        policy: the eviction policy of requests that do not name one.
        budget: tokens kept per layer and head; the most that a request may ask for.
        rows: number of sequences that run at once; by default 16, or as many as fit into ``kv_memory``.
        kv_memory: bytes that all rows together may take, with copies of rows that ``host_rows`` needs on CUDA.
        prefill_chunk: prompt tokens per step; ``None``: all, so that the policy reads a prompt to its end, then evicts.
            A model with layers that keep a state reads prompts whole; its layers with slots take these chunks.
        layer_budget: how budgets are spread over layers, see `BoundedCache`.
        head_budget: how the budget is divided among KV heads, for all requests, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.
        kv_bits: bits of a number in the slots, see `BoundedCache`.
        decode_every: prompt tokens for which each running row gets a token; by default 128 on a CPU, 1024 elsewhere.
        prompts_first: whether running rows wait until every prompt that has a row is read. All requests together then
            end soonest, and a row may wait for long.
        host_rows: sequences that may be in flight beyond ``rows``. They wait in main memory and take turns in the rows.
        prefix_memory: bytes of main memory for common beginnings of prompts, read once. Needs ``prefill_chunk``.
        session_memory: bytes of main memory for idle sessions. The least recently used ones beyond it are moved to
            ``session_dir``; by default there is no limit.
        session_dir: a folder for these, and for sessions with a name; one engine at a time uses it.
        graphs: whether decode steps are recorded as CUDA graphs, where they can be; by default on CUDA.
        guard: of requests that have none, see `Request`.

    Raises:
        BudgetError: a number is out of range, or not one row fits into the memory.
        UnsupportedModelError: the model cannot run rows of different lengths, or its cache cannot be bounded.
        UnsupportedOperationError: the model is split over processes, and an option cannot follow.
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
        head_budget: str | None = None,
        positions: str | None = None,
        kv_bits: str | int | None = None,
        decode_every: int | None = None,
        prompts_first: bool = False,
        host_rows: int = 0,
        prefix_memory: int = 0,
        session_memory: int | None = None,
        session_dir: str | os.PathLike[str] | None = None,
        graphs: bool | None = None,
        guard: float | None = None,
    ) -> None:
        numbers = {"rows": rows, "kv_memory": kv_memory, "prefill_chunk": prefill_chunk, "decode_every": decode_every}
        check_numbers(budget, **numbers)
        prefix_memory = check_prefix_memory(prefix_memory, prefill_chunk)
        self.model, self.tokenizer = generator(attach(model)), tokenizer
        check_split(self.model.config, host_rows=host_rows, session_dir=session_dir, graphs=graphs)
        self.policy, self.budget = usable(policy), budget
        spread: dict[str, Any] = {"layer_budget": layer_budget, "head_budget": head_budget, "kv_bits": kv_bits}
        options = {**spread, "positions": positions}
        if has_states := keeps_states(self.model):
            options["prefill_chunk"], prefill_chunk = prefill_chunk, None
        asked: dict[str, Any] = {"policy": self.policy, "budget": budget, "rows": rows, "kv_memory": kv_memory}
        staging = staging_for(device_of(self.model)) if host_rows else None
        asked["host_rows"], asked["staging"] = (rotation := Rotation(host_rows, staging)).host_rows, staging
        admission = Admission(self.model, tokenizer, **asked, chunk=prefill_chunk, guard=guard, options=options)
        settings = {**spread, **numbers, "policy": self.policy, "budget": budget, "prefix_memory": prefix_memory}
        settings["prompts_first"] = prompts_first
        agreement = Agreement(self.model.config, device_of(self.model), {**settings, "positions": positions})
        alone, on_cuda = agreement.together.ranks == 1, device_of(self.model).type == "cuda"
        graphs = not has_states and (alone and on_cuda if graphs is None else graphs)
        prefixes = Prefixes(prefix_memory, prefill_chunk, lambda: admission.identity.weights)
        runner, first = Runner(self.model, graphs=graphs), admission.make_rows(self.policy)
        rooms: dict[str, Any] = {"prefixes": prefixes, "sessions": Sessions(Shelf(session_memory, session_dir))}
        rooms["agreement"] = agreement
        paced: dict[str, Any] = {"decode_every": decode_every or scheduler.pace(device_of(self.model))}
        paced["prompts_first"] = prompts_first
        paced["mixed_tokens"] = 0 if graphs else scheduler.MIXED_TOKENS.get(device_of(self.model).type, 0)
        super().__init__(admission, runner, first, chunk=prefill_chunk, rotation=rotation, **paced, **rooms)

    @classmethod
    def from_config(cls, source: Source, model: nn.Module | str | None = None, **options: Any) -> Engine:
        """Make an engine with the settings of a ``kvkeep.toml``, see `configured`. Other options go before them."""
        return cls(**configured(source, model, options))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in all layers, measured."""
        return self._rows.row_bytes

    @property
    def n_waiting(self) -> int:
        """The number of requests that have no row yet."""
        return sum("started" not in one.times for one in list(self._all.values()))

    @property
    def n_running(self) -> int:
        """The number of requests that have a row, or have had one."""
        return len(self._all) - self.n_waiting

    @property
    def session_bytes(self) -> tuple[int, int]:
        """The bytes of sessions' memories in main memory, and in files."""
        return self._sessions.nbytes

    def waits(self, number: int) -> bool:
        """Whether the request of a number has no row yet. Never waits for a step."""
        one = self._all.get(number)
        return one is not None and "started" not in one.times

    def memory(self) -> Memory:
        """Return the bytes of all rows, of sequences in main memory and of copies on their way, all of real tensors."""
        return self._rows.memory() + self._rotation.memory(self._scheduler.waiting)

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
        check_split(self.model.config, astream=True)
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

    def close(self) -> None:
        """Cancel all requests, save named sessions, and give the memory of the rows back. Nothing works afterwards.

        Raises:
            SnapshotError: a session cannot be saved. The engine stays open, and the session loses nothing.
        """
        with Uninterrupted(), self._service.turn:
            self._settle(wait=math.inf)
            for number in list(self._all):
                self.cancel(number)
            if not self._closed:
                self._sessions.write()
                self._sessions.close()
            self._closed = True
            self._give_back()
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
        request = self._admission.grammars.prepared(request_of(asked, sampling))
        with Uninterrupted(), self._service.turn:
            self._check_open()
            one = self._admission.check(request, self._count)
            if box is None or not box.left:
                self._enter(one, box)
                if not self._twins.joins(one):
                    self._scheduler.waiting.append(one)
        return one.id

"""The engine: requests and texts in, tokens and results out."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

from torch import nn

from kvkeep.config import Config
from kvkeep.engine import sampler, scheduler
from kvkeep.engine.admission import Admission
from kvkeep.engine.async_stream import AsyncEvents
from kvkeep.engine.budget_guard import measure
from kvkeep.engine.dispatcher import Box, Dispatcher, Guard, Uninterrupted
from kvkeep.engine.host_copies import staging_for
from kvkeep.engine.input_batch import ModelRun
from kvkeep.engine.kv_blocks import keeps_states
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.prefix_cache import PrefixCache, begin, check_prefix_memory
from kvkeep.engine.request import Asked, Event, Result, check_numbers, listed, request_of, usable
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import DuplicatePrompts, Scheduler
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.session import Session, Sessions
from kvkeep.engine.session_store import Parked, SessionStore
from kvkeep.engine.snapshot_writer import Pending
from kvkeep.engine.swapping import Swapper
from kvkeep.engine.tensor_parallel import EngineAgreement, check_split
from kvkeep.errors import InputError, KVKeepError
from kvkeep.kv.memory_usage import MemoryUsage
from kvkeep.models.attention import attach
from kvkeep.models.checkpoint import Tokenizer
from kvkeep.models.device import device_of, reason_of
from kvkeep.models.document_prompt import noted
from kvkeep.models.load import load_with_tokenizer
from kvkeep.models.support import generator
from kvkeep.pins import Span
from kvkeep.policies import DEFAULT
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Contents, Snapshot

# Requests in rows, and the step that brings all of them further: admit, run, take the new tokens, recover.

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
        runner: ModelRunner,
        rows: KVManager,
        *,
        chunk: int | None,
        decode_every: int,
        mixed_tokens: int,
        prompts_first: bool,
        prefixes: PrefixCache,
        sessions: Sessions,
        rotation: Swapper,
        agreement: EngineAgreement,
    ) -> None:
        self._admission, self._runner = admission, runner
        self._schedule = partial(
            Scheduler,
            chunk=chunk,
            decode_every=decode_every,
            mixed_tokens=mixed_tokens,
            prompts_first=prompts_first,
        )
        self._all: dict[int, Sequence] = {}
        self._unreported: list[Event] = []
        self._parked, self._twins = Parked(), DuplicatePrompts()
        self._count, self._closed = 0, False
        self._service = Dispatcher()
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

    def _enter(self, one: Sequence, box: Box | None) -> None:
        """Note a request, and where its events go."""
        self._count += 1
        self._all[one.id] = one
        if box is not None:
            self._service.listen(one.id, box, self._step)

    def _refuse(self, one: Sequence, error: Exception) -> None:
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

    def _guarded(self, one: Sequence) -> Guard:
        """Return what keeps a failure within one request."""
        return Guard(self._recover, partial(list, (one,)))

    def _advance(self, run: ModelRun) -> None:
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

    def _bear(self, twin: Sequence, reader: Sequence, contents: Contents, token: int, place: int) -> None:
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

    def _take(self, one: Sequence, token: int) -> None:
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

    def _end(self, one: Sequence) -> Pending | None:
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

    def _conclude(self, one: Sequence, event: Event) -> None:
        """Forget a request, and report its last event with its result."""
        self._let_go(one)
        self._report(replace(event, result=one.result()))

    def _free(self, one: Sequence) -> None:
        """Free the row of a request, or its place in the queue."""
        if one.row is not None:
            self._rows.end(one.row)
        self._scheduler.leave(one)
        if (heir := self._twins.leave(one)) is not None:
            self._scheduler.waiting.appendleft(heir)

    def _let_go(self, one: Sequence) -> None:
        """Forget a request, and free its row or its place in the queue."""
        self._free(one)
        if self._all.pop(one.id, None) is not None and one.left:
            one.left(one)

    def _use(self, rows: KVManager, waiting: Iterable[Sequence] = ()) -> None:
        """Run requests in these rows from now on."""
        self._rows, self._scheduler = rows, self._schedule(rows.count, alone=rows.alone, waiting=waiting)

    def _give_back(self) -> None:
        """Give up all memory."""
        self._runner.forget()
        self._prefixes.clear()
        self._rotation.clear()
        self._rows.allocate(0)
        self._admission.grammars.close()

    def _recover(self, error: BaseException, touched: GenericSequence[Sequence]) -> None:
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


# Memory that outlasts a request: conversations, and texts that are read once.


class Keeping(Work):
    """The part of an engine that hands out memory: sessions, and snapshots of texts."""

    def session(
        self,
        *,
        name: str | None = None,
        policy: str | Policy | None = None,
        budget: int | None = None,
        sequence: int = 0,
        memory: Snapshot | None = None,
        pins: GenericSequence[Span] = (),
    ) -> Session:
        """Begin a conversation whose memory stays between its turns, or open the one of this name again.

        Args:
            name: by which it is found again, also by a later engine with the same ``session_dir``.
            policy: the eviction policy; by default the memory's, or else the engine's.
            budget: tokens kept per layer and head; by default the memory's, or else the engine's.
            sequence: identity for everything random, see `Request`.
            memory: a snapshot that it continues.
            pins: spans of the first turn's positions that may never be evicted, see `Request`.

        Raises:
            InputError: the name cannot be used, or the engine is closed.
            SnapshotError: the memory belongs to another model, policy, budget or other settings.
            KVKeepError: the engine has no rows for the policy or the budget; see `add`.
        """
        with Uninterrupted(), self._service.turn:
            return self._sessions.open(
                self, name, policy=policy, budget=budget, sequence=sequence, memory=memory, pins=pins
            )

    @property
    def session_names(self) -> list[str]:
        """The names of all sessions that are open, or on the disk in ``session_dir``."""
        with self._service.turn:
            return self._sessions.names

    def prefix(
        self,
        asked: str | GenericSequence[int],
        *,
        policy: str | Policy | None = None,
        budget: int | None = None,
        pins: GenericSequence[Span] = (),
    ) -> Snapshot:
        """Read a text once, and return its memory, which any number of requests and sessions may continue.

        Args:
            asked: a text, which is taken as it is, or token ids.
            policy: the eviction policy; by default the engine's.
            budget: tokens kept per layer and head; by default the engine's.
            pins: spans of its positions that may never be evicted, see `Request`.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        with self.session(policy=policy, budget=budget, pins=pins) as session:
            session.read(asked)
            return session.snapshot()

    def remember(self, text: str, *, system: str | None = None, raw: bool = False) -> Snapshot:
        """Read a text once, and return its memory, which any number of questions may follow.

        A text and a question that follows it are one message of the user, with a blank line between them.

        Args:
            text: the text; white space around it is dropped.
            system: a system message before it.
            raw: take the text and its questions without the chat template, also with a blank line between them.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        ids, opening = self._admission.words.opened(text, system=system, raw=raw)
        with self.session() as session:
            session.read(ids)
            return noted(session.snapshot(), opening)


# An engine's arguments from a ``kvkeep.toml``.

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a ``kvkeep.toml``, or its content as a mapping."""


def configured(
    source: Source, model: nn.Module | str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an engine.

    Args:
        source: the settings.
        model: a loaded model, or the name of another one than the settings'; without either, the embedded one.
        options: further arguments of the engine, which go before the settings.

    Raises:
        InputError: the settings cannot be read, or one of them is unknown or of the wrong kind.
        KVKeepError: the model cannot be loaded, see `kvkeep.load`.
    """
    if not isinstance(source, str | os.PathLike | Mapping):
        raise InputError(f"{source!r:.80} is no configuration; give the path of a kvkeep.toml, or a mapping.")
    found = Config.of(source) if isinstance(source, Mapping) else Config.read(source)
    settings = found.settings()
    name, dtype, load_in = (settings.pop(key, None) for key in ("model", "dtype", "load_in"))
    if isinstance(model, nn.Module):
        return {"model": model, **settings, **options}
    loaded, tokenizer = load_with_tokenizer(name if model is None else model, dtype=dtype or "auto", load_in=load_in)
    return {"model": loaded, "tokenizer": tokenizer, **settings, **options}


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
        layer_budget: str | GenericSequence[float] | None = None,
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
        asked["host_rows"], asked["staging"] = (rotation := Swapper(host_rows, staging)).host_rows, staging
        admission = Admission(self.model, tokenizer, **asked, chunk=prefill_chunk, guard=guard, options=options)
        settings = {**spread, **numbers, "policy": self.policy, "budget": budget, "prefix_memory": prefix_memory}
        settings["prompts_first"] = prompts_first
        agreement = EngineAgreement(self.model.config, device_of(self.model), {**settings, "positions": positions})
        alone, on_cuda = agreement.together.ranks == 1, device_of(self.model).type == "cuda"
        graphs = not has_states and (alone and on_cuda if graphs is None else graphs)
        prefixes = PrefixCache(prefix_memory, prefill_chunk, lambda: admission.identity.weights)
        runner, first = ModelRunner(self.model, graphs=graphs), admission.make_rows(self.policy)
        rooms: dict[str, Any] = {"prefixes": prefixes, "sessions": Sessions(SessionStore(session_memory, session_dir))}
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

    def memory(self) -> MemoryUsage:
        """Return the bytes of all rows, of sequences in main memory and of copies on their way, all of real tensors."""
        return self._rows.memory() + self._rotation.memory(self._scheduler.waiting)

    def generate(self, requests: Asked | Iterable[Asked], sampling: SamplingParams | None = None) -> list[Result]:
        """Run requests or texts to their ends and return their results in order; a single one gives a list of one.

        A text is the user's message in the chat template, and its tokens are chosen as ``sampling`` says.
        """
        return [result for _, result in sorted(self.run(requests, sampling))]

    def run(
        self, requests: Asked | Iterable[Asked], sampling: SamplingParams | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Run requests to their ends, and yield each result as soon as it is there, with its place in the input.

        Requests are taken from the iterable as rows become free, so it may be longer than memory could hold.
        """
        places: dict[int, int] = {}
        for event in self._drain(requests, places, sampling):
            if event.result:
                yield places.pop(event.id), event.result

    def stream(self, request: Asked, sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Run one request or text and yield its tokens as they come. Whoever stops listening cancels the request."""
        return self._drain([request], {}, sampling)

    def astream(self, request: Asked, sampling: SamplingParams | None = None) -> AsyncEvents:
        """Run one request or text for a coroutine: ``async for event in engine.astream("a text")``."""
        check_split(self.model.config, astream=True)
        return AsyncEvents(partial(self._add, request, sampling), self._service.leave)

    def check(self, request: Asked) -> None:
        """Raise the error with which `add` would refuse a request, without adding it."""
        with Uninterrupted(), self._service.turn:
            self._admission.check(request_of(request), self._count)

    def add(self, request: Asked, sampling: SamplingParams | None = None) -> int:
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
        self, requests: Asked | Iterable[Asked], places: dict[int, int], sampling: SamplingParams | None
    ) -> Iterator[Event]:
        """Add requests and yield their events; ``places`` gets the place of each request's number."""

        def add(item: tuple[int, Asked], box: Box) -> None:
            places[self._add(item[1], sampling, box)] = item[0]

        source = iter(enumerate(listed(requests)))
        yield from self._service.drain(source, add, lambda: self.has_room, step=self._step, end=self.cancel)

    def _add(self, asked: Asked, sampling: SamplingParams | None, box: Box | None = None) -> int:
        request = self._admission.grammars.prepared(request_of(asked, sampling))
        with Uninterrupted(), self._service.turn:
            self._check_open()
            one = self._admission.check(request, self._count)
            if box is None or not box.left:
                self._enter(one, box)
                if not self._twins.joins(one):
                    self._scheduler.waiting.append(one)
        return one.id

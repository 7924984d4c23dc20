"""The engine: requests and texts in, tokens and results out."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from kvkeep.config import Config
from kvkeep.engine.admission import Admission
from kvkeep.engine.conversations import Conversations
from kvkeep.engine.dispatcher import AsyncEvents, Box, Dispatcher, Guard, Uninterrupted
from kvkeep.engine.host_copies import staging_for
from kvkeep.engine.kv_blocks import keeps_states
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.prefix_cache import PrefixCache, begin, check_prefix_memory
from kvkeep.engine.request import Asked, Event, HeldTokens, Result, check_numbers, listed, request_of, usable
from kvkeep.engine.sampler import Sampler, whole
from kvkeep.engine.sampling_params import SamplingParams, whole_within
from kvkeep.engine.scheduler import DuplicatePrompts, ModelRun, Scheduler, most_mixed_tokens, pace
from kvkeep.engine.sequence import Sequence, SequenceStatus
from kvkeep.engine.session import Session, SessionHost, Sessions
from kvkeep.engine.session_store import Parked, SessionStore, joined
from kvkeep.engine.swapping import MOST_HOST_ROWS, Swapper, hosted_memory
from kvkeep.engine.tensor_parallel import EngineAgreement, check_split
from kvkeep.errors import InputError, KVKeepError, SnapshotError, renames
from kvkeep.head_sharding import sharing
from kvkeep.kv import lost_mass
from kvkeep.models.adapters import adapters_of
from kvkeep.models.attention import attach
from kvkeep.models.checkpoint import Tokenizer
from kvkeep.models.device import device_of, reason_of
from kvkeep.models.generation_config import BannedTokens
from kvkeep.models.load import load_with_tokenizer
from kvkeep.models.prepare import prepare
from kvkeep.models.support import generator
from kvkeep.models.tokenization import noted
from kvkeep.parameters import CONVERSATION_TTL, CONVERSATIONS, SYSTEM_SHARE
from kvkeep.pins import Span, Spans
from kvkeep.policies import DEFAULT
from kvkeep.policies._keep_prompt import keeping
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.snapshot import Pending, Snapshot
from kvkeep.types import MemoryUsage

_log = logging.getLogger(__name__)

_SWITCHED = (
    "The model's adapters were switched, scaled, or turned on or off while the request ran. Its tokens belong to "
    "the old ones: send it again."
)

_A_MOMENT = 0.01
"""Seconds for which a step without any run waits for the disk."""

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a ``kvkeep.toml``, or its content as a mapping."""


def configured(
    source: Source, model: nn.Module | str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Merge the settings of a configuration with further options, load the model, and return the arguments of `Engine`.

    Args:
        source: the settings.
        model: a loaded model, or the name of another one than the settings'; ``None``: the settings' model, or else the
            embedded one.
        options: further arguments of the engine, which replace those of the settings.

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


@renames(
    {
        **dict.fromkeys(("max_num_seqs", "max_batch_size", "batch_size"), "`rows`"),
        **dict.fromkeys(("max_num_batched_tokens", "chunked_prefill_size", "prefill_chunk_size"), "`prefill_chunk`"),
        **dict.fromkeys(("gpu_memory_utilization", "kv_cache_memory_bytes"), "`kv_memory`, in bytes"),
        **dict.fromkeys(("max_model_len", "max_cache_len", "max_seq_len"), "`budget`: texts may be longer"),
        **{name: f"`kvkeep.load(…, {name}=…)`, which makes the model" for name in ("dtype", "device", "load_in")},
        "kv_cache_dtype": "`kv_bits`",
        "enable_prefix_caching": "`prefix_memory`, in bytes",
    }
)
class Engine:
    """Runs many requests on one model, each in a row of KV memory that is allocated once.

    A request gets the tokens that it would get alone with the same ``prefill_chunk``, whatever runs beside it. Where
    transformers has split the model over processes, each of them makes an engine and gives it the same requests, which
    they compare before each step; see ``docs/tensor-parallel.md``. Where `kvkeep.load` has put adapters into the model,
    each request names its own; a run of the model has rows of one adapter, and each step brings all of them further.

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
        conversation_memory: bytes for the memories of requests with ``keep_as``, in main memory and files. The least
            recently used ones beyond it are forgotten.
        conversations: whether a prompt goes on from such a memory: ``auto`` (while nothing was evicted from it; then
            from the last prompt, kept beside it as it was before), ``continue`` (always) or ``fresh`` (never).
        conversation_ttl: seconds after which such a memory is forgotten if nobody uses it.
        graphs: whether decode steps are recorded as CUDA graphs, where they can be; by default on CUDA.
        guard: of requests that have none, see `Request`; sessions and prefixes go without it.
        keep_prompt: of requests and sessions that say nothing about it, see `BoundedCache`.

    Raises:
        BudgetError: a number is out of range, or not one row fits into the memory.
        InputError: the model's generation config bans something that is no token.
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
        conversation_memory: int = 0,
        conversations: str = CONVERSATIONS.default,
        conversation_ttl: float = CONVERSATION_TTL.default,
        graphs: bool | None = None,
        guard: float | None = None,
        keep_prompt: bool | float | None = None,
    ) -> None:
        numbers = {"rows": rows, "kv_memory": kv_memory, "prefill_chunk": prefill_chunk, "decode_every": decode_every}
        check_numbers(budget, **numbers)
        prefix_memory = check_prefix_memory(prefix_memory, prefill_chunk)
        self.model, self.tokenizer = generator(attach(model)), tokenizer
        prepare(self.model)
        beyond = {"host_rows": host_rows, "session_dir": session_dir, "conversation_memory": conversation_memory}
        check_split(self.model.config, **beyond, graphs=graphs)
        self.policy, self.budget = keeping(usable(policy), keep_prompt), budget
        device = device_of(self.model)
        spread: dict[str, Any] = {"layer_budget": layer_budget, "head_budget": head_budget, "kv_bits": kv_bits}
        settings = {**spread, **numbers, "policy": self.policy, "budget": budget, "prefix_memory": prefix_memory}
        settings |= {"prompts_first": prompts_first, "positions": positions}
        together = sharing(self.model.config)
        alone = together.ranks == 1
        self._agreement = None if alone else EngineAgreement(together, device, settings)
        has_states = keeps_states(self.model)
        has_adapters = adapters_of(self.model) is not None  # a graph would run one of them for ever
        graphs = not (has_adapters or has_states) and (alone and device.type == "cuda" if graphs is None else graphs)
        options = {**spread, "positions": positions}
        if has_states:  # such a model reads prompts whole, and its layers with slots take the chunks
            options["prefill_chunk"], prefill_chunk = prefill_chunk, None
        self._host_rows = whole_within("host_rows", host_rows, 0, MOST_HOST_ROWS)
        staging = staging_for(device) if host_rows else None
        self._swapper = Swapper(self._host_rows, staging) if host_rows else None
        room: dict[str, Any] = {"rows": rows, "kv_memory": kv_memory, "host_rows": self._host_rows}
        rules: dict[str, Any] = {"staging": staging, "chunk": prefill_chunk, "options": options, "guard": guard}
        self._admission = Admission(self.model, tokenizer, policy=self.policy, budget=budget, **room, **rules)
        self._runner = ModelRunner(self.model, graphs=graphs)
        self._runner.check_adapters()  # only switches from now on end requests
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        banned = BannedTokens.of(self.model.generation_config, vocabulary)
        self._sampler = Sampler(None if alone else together, banned if any(banned) else None)
        self._pacing: dict[str, Any] = {"decode_every": decode_every or pace(device), "prompts_first": prompts_first}
        # a recorded step has rows of generated tokens only
        self._pacing |= {"mixed_tokens": 0 if graphs else most_mixed_tokens(device), "chunk": prefill_chunk}
        self._dispatcher, self._duplicates = Dispatcher(), DuplicatePrompts()
        self._sequences: dict[int, Sequence] = {}
        self._parked, self._unreported = Parked(), list[Event]()
        self._count, self._closed = 0, False
        self._use(self._admission.make_rows(self.policy))
        self._sessions = Sessions(SessionStore(session_memory, session_dir))
        # memory of an engine that nobody holds is freed at once, without the collector of cycles
        me = weakref.proxy(self)
        # kept prompts lie in main memory, of which sessions may take no more
        prompt_bytes = conversation_memory if session_memory is None else min(conversation_memory, session_memory)
        self._conversations = Conversations(
            self._sessions,
            lambda: me._session_host(),
            rows=lambda: me._kv,
            most_bytes=conversation_memory,
            # read in chunks, a prompt is never whole; and prompts are never written into files
            most_prompt_bytes=0 if prefill_chunk else prompt_bytes,
            mode=conversations,
            ttl_s=conversation_ttl,
        )
        hashes = self._admission.weights_hash, self._admission.rule.key
        self._prefix_cache = PrefixCache(prefix_memory, prefill_chunk, *hashes, self._conversations.find)

    @classmethod
    def from_config(cls, source: Source, model: nn.Module | str | None = None, **options: Any) -> Engine:
        """Make an engine with the settings of a ``kvkeep.toml``, see `configured`. ``options`` replace settings."""
        return cls(**configured(source, model, options))

    @property
    def rows(self) -> int:
        """Return the number of sequences that run at once."""
        return self._kv.count

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests may name."""
        return self._admission.identity.adapters

    @property
    def busy(self) -> bool:
        """Return whether a request waits or runs, or an interrupted step has left something to report."""
        return bool(self._sequences or self._unreported)

    @property
    def has_room(self) -> bool:
        """Return whether fewer requests wait than there are rows and ``host_rows``, so that more may be added, and not
        too many wait for the reading of an equal prompt.
        """
        # there may be no rows after a failed change of them, which the next request makes again
        return len(self._scheduler.waiting) < max(1, self.rows) + self._host_rows and not self._duplicates.full

    @property
    def row_bytes(self) -> int:
        """Return the measured bytes of a row in all layers."""
        return self._kv.row_bytes

    @property
    def n_waiting(self) -> int:
        """Return the number of requests that have not begun: they wait for their first row, or for the reading of an
        equal prompt.

        One that waits for a row after its prompt was read with another's has begun, and counts in `n_running`.
        """
        # a copy, since a thread that steps changes the mapping meanwhile
        return sum(sequence.status is SequenceStatus.WAITING for sequence in list(self._sequences.values()))

    @property
    def n_running(self) -> int:
        """Return the number of requests that have begun, whether or not they have a row at the moment."""
        return len(self._sequences) - self.n_waiting

    @property
    def session_bytes(self) -> tuple[int, int]:
        """Return the bytes of the sessions' snapshots in main memory, and of those in files."""
        return self._sessions.nbytes

    def waits(self, number: int) -> bool:
        """Return whether a request still waits for its first row. The call never waits for a step."""
        sequence = self._sequences.get(number)
        return sequence is not None and sequence.status is SequenceStatus.WAITING

    def memory_usage(self) -> MemoryUsage:
        """Return the bytes of all rows, of sequences in main memory and of their copies on the device."""
        waiting = self._scheduler.waiting
        # without swapping, too: a duplicate of a prompt that has been read waits with the memory of the prompt
        beside = hosted_memory(waiting) if self._swapper is None else self._swapper.memory(waiting)
        return self._kv.memory() + beside

    def generate(self, requests: Asked | Iterable[Asked], sampling: SamplingParams | None = None) -> list[Result]:
        """Run requests or texts to their ends, and return their results in order.

        A single request gives a list of one result. A text is the user's message in the chat template, and its tokens
        are chosen as ``sampling`` says.
        """
        return [result for _, result in sorted(self.run(requests, sampling))]

    def run(
        self, requests: Asked | Iterable[Asked], sampling: SamplingParams | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Run requests to their ends, and yield each result as soon as it is there, with its request's index in the
        input.

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
        return AsyncEvents(partial(self._add, request, sampling), self._dispatcher.leave)

    def check(self, request: Asked) -> None:
        """Raise the error that `add` would raise for this request, without adding it; return if `add` would take it."""
        with Uninterrupted(), self._dispatcher.turn:
            self._admission.check(request_of(request), self._count)

    def add(self, request: Asked, sampling: SamplingParams | None = None) -> int:
        """Queue a request or a text, and return its number. Its events come from `step`.

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
        with self._dispatcher.turn:
            events, self._unreported = self._unreported, []
            return events

    def cancel(self, number: int) -> Result | None:
        """End a request now, and return its result so far; its row is free at the next step.

        Return ``None`` if no such request is running or waiting.
        """
        with Uninterrupted(), self._dispatcher.turn:
            sequence = self._sequences.get(number)
            if sequence is None:
                return None
            self._parked.drop(number)
            sequence.finish("cancelled")
            self._forget(sequence)
            self._dispatcher.deliver(Event(number, None, "", result := sequence.result()))
            return result

    def close(self) -> None:
        """Cancel all requests, save named sessions, and free the memory of the rows. New work is refused afterwards.

        Raises:
            SnapshotError: a session cannot be saved. The engine stays open, and the session loses nothing.
        """
        with Uninterrupted(), self._dispatcher.turn:
            self._settle(wait=math.inf)
            for number in list(self._sequences):
                self.cancel(number)
            if not self._closed:
                self._sessions.write()
                self._sessions.close()
            self._closed = True
            self._give_back()
        self._dispatcher.wait()  # without the lock, which the thread that steps needs to see that nobody listens

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def session(  # noqa: PLR0913  the choices of a user
        self,
        *,
        name: str | None = None,
        policy: str | Policy | None = None,
        budget: int | None = None,
        sequence: int = 0,
        snapshot: Snapshot | None = None,
        pins: GenericSequence[Span] = (),
        adapter: str | None = None,
        keep_prompt: bool | float | None = None,
        create: bool = True,
    ) -> Session:
        """Return a new conversation whose memory stays between its turns, or the open or saved one with this name.

        Args:
            name: by which the session is found again, also by a later engine with the same ``session_dir``; ``None``:
                the session ends with the engine.
            policy: the eviction policy; by default the snapshot's, or else the engine's.
            budget: tokens kept per layer and head; by default the snapshot's, or else the engine's.
            sequence: identity for everything random, see `Request`.
            snapshot: the memory that the session continues.
            pins: spans of the first turn's positions that may never be evicted, see `Request`.
            adapter: the model's adapter; by default the snapshot's or the saved session's, or else none.
            keep_prompt: whether the prompts of its turns stay, see `BoundedCache`; by default the snapshot's, or else
                the engine's.
            create: whether a session is made if none has this name.

        Raises:
            InputError: the name cannot be used, no session has it and none is to be made, the engine is closed, or the
                model has no such adapter.
            SnapshotError: the snapshot belongs to another model, adapter, policy, budget or other settings.
            KVKeepError: the engine has no rows for the policy or the budget; see `add`.
        """
        with Uninterrupted(), self._dispatcher.turn:
            self._check_open()
            if not create and name not in self._sessions.names:
                raise InputError(f"There is no session {name!r:.80}. Make it first.")
            return self._sessions.open(
                self._session_host(),
                name,
                policy=policy,
                budget=budget,
                sequence=sequence,
                snapshot=snapshot,
                pins=pins,
                adapter=adapter,
                keep_prompt=keep_prompt,
            )

    @property
    def session_names(self) -> list[str]:
        """Return the sorted names of all sessions that are open, or on the disk in ``session_dir``. Conversations that
        nobody has used for ``conversation_ttl`` are forgotten before.
        """
        with self._dispatcher.turn:
            self._conversations.expire()
            return self._sessions.names

    def read_anew(self, number: int) -> str:
        """Return why the request of a number does not go on from a memory of which its client has left out messages;
        empty if it does, or there is no such memory. Only the last requests are known. The call does not wait for a
        step.
        """
        return self._conversations.reason(number)

    def can_pin(
        self,
        pins: Spans,
        *,
        policy: str | Policy | None = None,
        budget: int | None = None,
        share: float = SYSTEM_SHARE,
    ) -> bool:
        """Return whether pins take at most a share of a budget, and the policy evicts and can hold them under it.

        A policy or a budget that is ``None`` is the engine's.

        Raises:
            KVKeepError: there is no such policy, or the budget is out of range.
        """
        return self._admission.can_pin(pins, policy, budget, share=share)

    def has_session(self, name: str) -> bool:
        """Return whether a session of this name is open. One that is only on the disk does not count."""
        return self._sessions.is_open(name)

    def prefix(
        self,
        asked: str | GenericSequence[int],
        *,
        policy: str | Policy | None = None,
        budget: int | None = None,
        pins: GenericSequence[Span] = (),
        adapter: str | None = None,
    ) -> Snapshot:
        """Read a text once, and return its memory, which any number of requests and sessions may continue.

        Args:
            asked: a text, which is taken as it is, or token ids.
            policy: the eviction policy; by default the engine's.
            budget: tokens kept per layer and head; by default the engine's.
            pins: spans of its positions that may never be evicted, see `Request`.
            adapter: the model's adapter; by default none.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        with self.session(policy=policy, budget=budget, pins=pins, adapter=adapter) as session:
            session.read(asked)
            return session.snapshot()

    def remember(
        self, text: str, *, system: str | None = None, raw: bool = False, adapter: str | None = None
    ) -> Snapshot:
        """Read a text once, and return its memory, which any number of questions may follow.

        A text and a question that follows it are one message of the user, with a blank line between them.

        Args:
            text: the text; white space around it is dropped.
            system: a system message before it.
            raw: take the text and its questions without the chat template, also with a blank line between them.
            adapter: the model's adapter; by default none.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        ids, opening = self._admission.words.opened(text, system=system, raw=raw)
        with self.session(adapter=adapter) as session:
            session.read(ids)
            return noted(session.snapshot(), opening)

    def _drain(
        self, requests: Asked | Iterable[Asked], places: dict[int, int], sampling: SamplingParams | None
    ) -> Iterator[Event]:
        """Add requests as rows become free, and yield their events until all have ended. Store the index of each
        request in the input in ``places``, under its number.
        """

        def add(item: tuple[int, Asked], box: Box) -> None:
            """Queue a request, and store its index."""
            places[self._add(item[1], sampling, box)] = item[0]

        source = iter(enumerate(listed(requests)))
        yield from self._dispatcher.drain(source, add, lambda: self.has_room, step=self._step, end=self.cancel)

    def _add(self, asked: Asked, sampling: SamplingParams | None, box: Box | None = None) -> int:
        """Check a request, and queue it for a row or behind a request that reads the same prompt. Return its number.

        Nothing is queued if the listener has left meanwhile.

        Raises:
            KVKeepError: see `add`.
        """
        request = request_of(asked, sampling)
        if request.structured_outputs is not None:
            self._admission.grammars.constraint(request)  # compiled outside of the lock, since it may take seconds
        with Uninterrupted(), self._dispatcher.turn:
            self._check_open()
            sequence = self._admission.check(request, self._count)
            # a listener may have left while its request was being checked; then there is nobody to run it for
            if box is None or not box.left:
                self._enter(sequence, box)
                if not self._duplicates.joins(sequence):
                    self._scheduler.waiting.append(sequence)
        return sequence.id

    def _check_open(self) -> None:
        """Refuse new work after `close`.

        Raises:
            InputError: the engine is closed.
        """
        if self._closed:
            raise InputError("The engine is closed and takes no more requests; make a new one.")

    def _enter(self, sequence: Sequence, box: Box | None) -> None:
        """Register a new request under its number; its events go to ``box``, or to `step` if there is no box."""
        self._count += 1
        self._sequences[sequence.id] = sequence
        if box is not None:
            self._dispatcher.listen(sequence.id, box, self._step)

    def _enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue for rows. A session's turn takes the place of the entry that `_enter`
        registered for it.
        """
        self._sequences[sequence.id] = sequence
        self._scheduler.waiting.append(sequence)

    def _refuse(self, sequence: Sequence, error: Exception) -> None:
        """Remove a session's turn that cannot run after all, and raise the reason in its listener."""
        self._sequences.pop(sequence.id, None)
        self._dispatcher.refuse(sequence.id, error)

    def _step(self) -> None:
        """Fill free rows, run the model, and choose the next tokens. A failure ends only the requests of its batch."""
        with Uninterrupted(), self._dispatcher.turn, self._swapper or nullcontext():
            self._dispatcher.sweep(self.cancel)
            if self._agreement is not None:
                self._agreement.check(self._sequences.values())
            self._check_adapters()
            with Guard(self._recover, self._scheduler.beginning):
                self._admit()
            self._read_again()
            runs = self._scheduler.plan()
            for run in runs:
                with Guard(self._recover, partial(getattr, run, "requests")):
                    logits = self._runner.run(run, self._kv)
                    self._sample(run, logits)
                self._dispatcher.wake()  # the listeners of this run need not wait for the next one
            self._settle(wait=0.0 if runs else _A_MOMENT)
            # requests whose listeners have gone while the step ran
            self._dispatcher.sweep(self.cancel)

    def _check_adapters(self) -> None:
        """End the running requests with an error if the model's adapters are no longer those under which they began."""
        with Guard(self._recover, lambda: list(self._sequences.values())):
            if self._runner.check_adapters():
                return
            self._runner.forget()  # recorded steps run the adapters of their time
            unread = SequenceStatus.WAITING, SequenceStatus.FINISHED
            begun = [sequence for sequence in self._sequences.values() if sequence.status not in unread]
            self._recover(SnapshotError(_SWITCHED), begun)

    def _settle(self, *, wait: float) -> None:
        """Conclude the turns of sessions whose snapshots have been written, or have failed to be, within ``wait``
        seconds.
        """
        if self._parked.turns:
            for sequence, event in self._parked.ready(wait):
                self._conclude(sequence, event)

    def _report(self, event: Event) -> None:
        """Put an event into its request's box; if nobody listens, keep it for the next `step` to return."""
        if not self._dispatcher.deliver(event):
            self._unreported.append(event)

    def _admit(self) -> None:
        """Give free rows to waiting requests, swap sequences in and out, and close gaps between the rows in use.

        If all rows are free and the next policy needs other ones, replace them first.
        """
        # without rows after a change of them that failed, even the same policy needs new ones
        while (turn := self._scheduler.next_policy()) is not None and not (self.rows and turn == self._kv.policy):
            # a failure ends the requests that wait for these rows, so the loop comes to others
            with Guard(self._recover, partial(self._scheduler.waiting_for, turn)):
                self._runner.forget()  # recorded steps and staged copies hold the memory that the new rows need
                if self._swapper is not None:
                    self._swapper.clear()
                self._use(self._admission.replace(self._kv, turn), self._scheduler.waiting)
        for sequence in self._scheduler.admit(self._kv.takes):
            with self._guarded(sequence):
                begin(sequence, cast(int, sequence.row), self._kv, self._prefix_cache)
        if self._swapper is not None:
            self._swapper.turn(self._scheduler, self._kv, self._prefix_cache, self._guarded)
        while (gap := self._scheduler.gap()) is not None:
            with self._guarded(gap.sequence):
                self._kv.move(gap.source, gap.target)
                self._scheduler.move(gap)

    def _read_again(self) -> None:
        """Restart sequences whose text has just outgrown the model's original context, where longer texts have other
        rotary frequencies: their rows are emptied, and all tokens are read again.
        """
        if (border := self._admission.rule.read_again) is None:
            return
        for sequence in self._scheduler.running:
            if sequence.status is SequenceStatus.DECODE and len(sequence.prompt) <= border == sequence.fed:
                with self._guarded(sequence):
                    sequence.begin_again()
                    self._kv.begin(
                        cast(int, sequence.row),
                        policy=sequence.policy,
                        budget=sequence.budget,
                        sequence=sequence.request.sequence,
                        pins=(*sequence.held_pins, *sequence.pins),
                        prompt_tokens=len(sequence.to_read),
                    )

    def _session_host(self) -> SessionHost:
        """Return the functions and objects of this engine that its sessions use."""
        return SessionHost(
            admission=self._admission,
            dispatcher=self._dispatcher,
            check_open=self._check_open,
            new_number=lambda: self._count,
            enter=self._enter,
            enqueue=self._enqueue,
            refuse=self._refuse,
            step=self._step,
            cancel=self.cancel,
            settle=partial(self._settle, wait=math.inf),
        )

    def _guarded(self, sequence: Sequence) -> Guard:
        """Return a context in which a failure ends this request and no other."""
        return Guard(self._recover, partial(list, (sequence,)))

    def _sample(self, run: ModelRun, logits: Tensor) -> None:
        """Count the run's tokens as read, evict what is dropped from prompts, and store common beginnings of prompts.
        Then sample and report the next token of every row that has reached the end of its prompt.

        Requests that waited for an equal prompt draw their first tokens from the same logits, and come first.

        Args:
            run: the run, which has succeeded.
            logits: after each row's last token.
        """
        ready = run.commit()
        if run.reads:
            self._drop(run.requests)
            for sequence in run.requests:
                self._prefix_cache.keep(sequence, self._kv)
        if not ready:
            return
        twins = [
            (place, reader, twin)
            for place, reader in ready
            if not reader.token_ids
            for twin in self._duplicates.of(reader)
            # with messages that were left out the reader's prompt may have become too long for the twin's answer; such
            # a twin waits on, and reads its own prompt when the reader ends
            if not reader.skipped or self._admission.fits(len(reader.prompt), twin.request.sampling)
        ]
        places = [*(place for place, *_ in twins), *(place for place, _ in ready)]
        sequences = [*(twin for *_, twin in twins), *(sequence for _, sequence in ready)]
        # logits of a whole batch are not copied
        chosen = logits if len(sequences) == len(logits) and not twins else logits[places]
        tokens = self._sampler.draw(chosen, sequences)
        # taken before any request gets its token: one that ends with it loses its row
        contents = {reader.id: self._kv.take(cast(int, reader.row)) for _, reader, _ in twins}
        for n, (_, reader, twin) in enumerate(twins):
            with self._guarded(twin):
                self._begin_duplicate(twin, reader, contents[reader.id], whole(tokens[n], twin), n)
        for sequence, token in zip(sequences[len(twins) :], tokens[len(twins) :], strict=True):
            with self._guarded(sequence):
                self._append(sequence, whole(token, sequence))

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """Evict the tokens that leave the memories of prompts at the places to which they have just been read."""
        for sequence in sequences:
            if sequence.drops and sequence.row is not None and (gone := sequence.gone):
                with self._guarded(sequence):
                    self._kv.drop(
                        sequence.row,
                        gone,
                        policy=sequence.policy,
                        budget=sequence.budget,
                        sequence=sequence.request.sequence,
                        pins=sequence.pins,
                        prompt_tokens=len(sequence.to_read),
                    )

    def _begin_duplicate(self, twin: Sequence, reader: Sequence, contents: Contents, token: int, place: int) -> None:
        """Begin a request from the prefilled prompt of another one with the same tokens. It gets its first token at
        once, and then waits for a row.

        Args:
            twin: the request.
            reader: the request that has read the prompt.
            contents: the memory of its prompt.
            token: its first token.
            place: its place in the queue.
        """
        self._duplicates.leave(twin)
        twin.begin_prefilled(contents, reader)
        unknown = twin.memory_usage, twin.lost
        self._measure(twin, cast(int, reader.row))  # if this token is its last one, it gets no row of its own
        self._append(twin, token)
        if twin.status is SequenceStatus.PREFILLED:
            twin.memory_usage, twin.lost = unknown
            self._scheduler.waiting.insert(place, twin)

    def _append(self, sequence: Sequence, token: int) -> None:
        """Append a token to a sequence and report it. If it is the last one, end the request.

        A request that only reads ends without the token.
        """
        event = Event(sequence.id, None, "") if sequence.reads else sequence.take(token)
        if sequence.reads:
            sequence.finish("length")
        if sequence.status is not SequenceStatus.FINISHED:
            self._report(event)
        elif (pending := self._end(sequence)) is None:
            self._conclude(sequence, event)
        else:
            self._parked.add(sequence, event, pending)

    def _end(self, sequence: Sequence) -> Pending | None:
        """Free the row of a finished sequence, after measuring it, and giving its memory to whoever keeps it: the
        session of a turn, the conversations, and the result if it asks for the tokens in memory. If this fails, the
        request ends with an error.

        Returns:
            The write to the disk that the result must wait for; ``None`` if there is none.
        """
        pending = None
        remember = self._conversations.keep if self._conversations.wants(sequence) else None
        keepers = [keep for keep in (sequence.keep, remember) if keep is not None]
        try:
            if sequence.row is not None:
                self._measure(sequence, sequence.row)
            if (keepers or sequence.request.return_memory) and sequence.row is not None:
                contents = self._kv.take(sequence.row)
                if sequence.request.return_memory:
                    sequence.memory = HeldTokens.of((*sequence.prompt, *sequence.token_ids), contents)
                pending = joined([keep(sequence, contents) for keep in keepers])
        except Exception as error:  # of a callback, or a full memory: one request must not end the others
            sequence.finish("error", reason_of(error))
        self._free(sequence)
        return pending

    def _measure(self, sequence: Sequence, row: int) -> None:
        """Copy a row's memory usage, and the share of attention that its evicted tokens carried, into a request."""
        sequence.memory_usage, sequence.lost = self._kv.memory_of(row), lost_mass.mean(self._kv.lost_of(row))

    def _conclude(self, sequence: Sequence, event: Event) -> None:
        """Remove a finished request, and report its last event with the result."""
        self._forget(sequence)
        self._report(replace(event, result=sequence.result()))

    def _free(self, sequence: Sequence) -> None:
        """Free the row of a sequence, or remove it from the queue; do nothing if it has neither.

        A duplicate that waited for its prompt takes its place at the head of the queue.
        """
        if sequence.row is not None:
            self._kv.end(sequence.row)
        self._scheduler.leave(sequence)
        if (heir := self._duplicates.leave(sequence)) is not None:
            self._scheduler.waiting.appendleft(heir)

    def _forget(self, sequence: Sequence) -> None:
        """Free the row or queue entry of a request, remove the request from the engine, and tell the session whose turn
        it was.
        """
        self._free(sequence)  # does nothing if the request has ended in a row, which was freed then
        if self._sequences.pop(sequence.id, None) is not None and sequence.left:
            sequence.left(sequence)

    def _use(self, rows: KVManager, waiting: Iterable[Sequence] = ()) -> None:
        """Replace the engine's rows and its scheduler, which starts with these waiting requests."""
        self._kv = rows
        self._scheduler = Scheduler(rows.count, alone=rows.alone, waiting=waiting, **self._pacing)

    def _give_back(self) -> None:
        """Free all memory but that of sessions: rows, recorded steps, prefixes, host copies and grammars."""
        self._runner.forget()
        self._prefix_cache.clear()
        if self._swapper is not None:
            self._swapper.clear()
        self._kv.allocate(0)
        self._admission.grammars.close()

    def _recover(self, error: BaseException, touched: GenericSequence[Sequence]) -> None:
        """End the requests that a failure has touched: free their rows, and report their last events with the error.

        Raise the error again, with nothing changed, if the model is split over processes and the error is not one of
        kvkeep.
        """
        if self._agreement is not None and not isinstance(error, KVKeepError):
            raise error  # the other processes may not have failed, and would wait for ever
        self._kv.renew()  # a layer that was left half way refuses to go on
        failed = [sequence for sequence in touched if sequence.id in self._sequences]
        for sequence in failed:
            sequence.finish("error", reason_of(error))
            self._forget(sequence)
        for sequence in failed:
            self._report(Event(sequence.id, None, sequence.rest(), sequence.result()))
        with suppress(Exception):  # a handler of the user
            _log.debug("A step failed.", exc_info=error)  # its requests say why they end

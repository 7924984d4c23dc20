"""Who runs next: the scheduler gives rows to waiting requests and plans the runs of each step.

Each step feeds one token to every running row. Before it, at most one run feeds prompts, so a running row never waits
for more than one; a few prompt tokens share the rows' run. After a long run of prompts, steps without prompts follow:
one for every ``decode_every`` tokens. Where all requests together shall end soonest, running rows wait for all prompts
that have a row, so that each step has as many rows as there are.

The rows of a run have one adapter. A step has a run for each adapter of the running rows, and reads prompts of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from kvkeep.engine.sequence import Sequence, SequenceStatus
from kvkeep.policies.base import Policy
from kvkeep.types import Phase

# The input of one run of the model: new tokens of some rows.


@dataclass(frozen=True)
class InputBatch:
    """New tokens of neighbouring rows, padded to one length. No request changes before `commit`.

    Attributes:
        start: the first row.
        rows: the request in each row from ``start`` on; ``None`` for a row that is fed nothing.
        tokens: the tokens that each row is fed; empty for ``None``.
        positions: the position of each row's first token in its sequence.
        phase: whether the tokens belong to prompts or were generated.
        fresh: whether every row begins its prompt.
    """

    start: int
    rows: GenericSequence[Sequence | None]
    tokens: GenericSequence[GenericSequence[int]]
    positions: GenericSequence[int]
    phase: Phase
    fresh: bool = False

    @property
    def stop(self) -> int:
        """Return the number of the row after the last one."""
        return self.start + len(self.rows)

    @property
    def requests(self) -> list[Sequence]:
        """Return the sequences that are fed to the model."""
        return [sequence for sequence in self.rows if sequence is not None]

    @property
    def chooses_budgets(self) -> bool:
        """Return whether every row begins its prompt, and at least one request has a guard, which chooses its budget at
        the prompt's end; see `kvkeep.engine.budget_guard`.
        """
        return self.fresh and any(sequence.levels for sequence in self.requests)

    def commit(self) -> list[tuple[int, Sequence]]:
        """Count the tokens of the batch as read by the model, in each request.

        Returns:
            The requests whose next token follows from this run, each with its place in the batch.
        """
        for sequence, tokens in zip(self.rows, self.tokens, strict=True):
            if sequence is not None:
                sequence.commit(len(tokens))
        return [
            (i, sequence)
            for i, sequence in enumerate(self.rows)
            if sequence is not None and sequence.status is SequenceStatus.DECODE
        ]


@dataclass(frozen=True)
class ModelRun:
    """One run of the model over one or several batches, whose rows need not be neighbours.

    The model gets the tokens of several batches as one sequence, so its matrices are read once. Each layer attends and
    evicts batch by batch. All sequences have the same adapter.

    Attributes:
        batches: the batches, in the order of their tokens.
    """

    batches: GenericSequence[InputBatch]

    @property
    def reads(self) -> bool:
        """Return whether the run has tokens of prompts. Their batches come before those of generated tokens."""
        return self.batches[0].phase is Phase.PREFILL

    @property
    def requests(self) -> list[Sequence]:
        """Return the sequences that are fed to the model."""
        return [sequence for batch in self.batches for sequence in batch.requests]

    def commit(self) -> list[tuple[int, Sequence]]:
        """Count the tokens of all batches as read by the model, in each request.

        Returns:
            The requests whose next token follows from this run, each with its place among the rows of all batches.
        """
        ready, before = [], 0
        for batch in self.batches:
            ready += [(before + place, sequence) for place, sequence in batch.commit()]
            before += len(batch.rows)
        return ready


# Who runs next.

SHARED_TOKENS = 512
"""Most prompt tokens that several prompts share in a run if no running row waits; a single chunk may be longer."""

PADDING = 5
"""Most tokens of padding per row that joins a batch. A batch of its own takes as long as about so many tokens."""

STEP_TOKENS = {"cpu": 32}
"""Prompt tokens that take as long as a decode step of a few rows, by device; measured, see ``lab/log/engine.md``."""

OTHER_STEP_TOKENS = 256
"""The same for other devices, which compute faster in proportion to their memory."""

PROMPT_SHARE = 4
"""While prompts are read beside running rows, they get so many times the time of the rows."""

MIXED_TOKENS = {"cpu": 256}
"""Most prompt tokens that share a run with the running rows, by device; elsewhere a step of rows is a recorded graph.

A run saved is a reading of the weights and a walk through the model saved. With more tokens this is a small part of the
run, and a prompt that fails, most likely for lack of memory, would end the running rows with it.
"""

PATIENCE = 4
"""A request that needs other rows is passed over at most this many times per row; then the rows are replaced."""


def pace(device: torch.device) -> int:
    """Return the default of ``decode_every`` for a device: after how many prompt tokens each running row gets a token.

    The prompts' first tokens then come a quarter later than without running rows, and tokens of running rows take five
    times as long as without prompts.
    """
    return pace_of(device.type)


def pace_of(kind: str) -> int:
    """Return the default of ``decode_every`` for a type of device: ``cpu``, ``cuda``."""
    return PROMPT_SHARE * STEP_TOKENS.get(kind, OTHER_STEP_TOKENS)


def most_mixed_tokens(device: torch.device) -> int:
    """Return the most prompt tokens that share a run with the running rows on a device; 0 if none may."""
    return MIXED_TOKENS.get(device.type, 0)


class Gap(NamedTuple):
    """A sequence, its row, and a free row before it."""

    sequence: Sequence
    source: int
    target: int


class PromptChunk(NamedTuple):
    """The next tokens of a prompt, with the row and the request that they belong to."""

    row: int
    owner: Sequence
    tokens: GenericSequence[int]


class Swap(NamedTuple):
    """A sequence that gives up its row, and the one that takes it."""

    row: int
    leaving: Sequence
    coming: Sequence


class Scheduler:
    """Gives rows to requests, and plans which of them the model runs.

    Args:
        rows: number of rows.
        chunk: tokens of a prompt that are fed in one run; ``None``: a whole prompt.
        decode_every: prompt tokens that are worth a run of generated tokens; at least one follows each run of prompts.
        mixed_tokens: most prompt tokens that share a run with the running rows.
        prompts_first: whether running rows wait until no prompt is left to read.
        alone: whether every run of the model is limited to one row.
        waiting: requests that wait already.

    Attributes:
        waiting: the requests without a row, the longest waiting first.
    """

    def __init__(
        self,
        rows: int,
        *,
        chunk: int | None,
        decode_every: int,
        mixed_tokens: int = 0,
        prompts_first: bool = False,
        alone: bool,
        waiting: Iterable[Sequence] = (),
    ) -> None:
        self.waiting = deque(waiting)
        self._rows: list[Sequence | None] = [None] * rows
        self._chunk = chunk
        self._alone = alone
        self._decode_every, self._mixed_tokens = decode_every, mixed_tokens
        self._prompts_first = prompts_first
        self._owed = 0
        self._passed_over = 0

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences that have a row."""
        return [sequence for sequence in self._rows if sequence is not None]

    def admit(self, takes: Callable[[Policy], bool]) -> list[Sequence]:
        """Give free rows to waiting requests, the longest waiting first, and return those that got one.

        Nobody is admitted while a request has been passed over too often.

        Args:
            takes: returns whether the present rows can hold a sequence under a policy. Other requests are passed over.
        """
        admitted: list[Sequence] = []
        while self.waiting and self._passed_over <= PATIENCE * len(self._rows):
            sequence = next((w for w in self.waiting if takes(w.policy)), None)
            if sequence is None or (row := self._free_row(sequence)) is None:
                break
            self._passed_over = 0 if sequence is self.waiting[0] else self._passed_over + 1
            sequence.row, self._rows[row] = row, sequence
            self.waiting.remove(sequence)
            admitted.append(sequence)
        return admitted

    def swap(self, takes: Callable[[Policy], bool], host_rows: int, *, least: int) -> Swap | None:
        """Choose a swap: the running sequence whose time slice is longest, and the waiting one that gets its row.
        Return ``None`` if there is no such pair.

        Nothing moves before `exchange`, but the longest waiting request counts as passed over if these rows cannot hold
        it; after it was passed over too often, there is no pair. Prompts are read to their ends before their rows are
        given up.

        Args:
            takes: returns whether the present rows can hold a sequence under a policy.
            host_rows: sequences that may wait after they have begun. If so many wait, the coming sequence is one of
                them.
            least: the fewest tokens of a slice.
        """
        full = sum(sequence.status is SequenceStatus.SWAPPED for sequence in self.waiting) >= host_rows
        able = [sequence for sequence in self.waiting if takes(sequence.policy)]
        coming = next((sequence for sequence in able if sequence.status is SequenceStatus.SWAPPED or not full), None)
        ripe = [
            sequence
            for sequence in self.running
            if sequence.status is SequenceStatus.DECODE and len(sequence.token_ids) - sequence.resumed >= least
        ]
        if coming is None or not ripe or self._passed_over > PATIENCE * len(self._rows):
            return None
        self._passed_over += able[0] is not self.waiting[0]
        # Of equal slices, that of the oldest request ends, whatever rows the sequences are in.
        leaving = max(ripe, key=lambda sequence: (len(sequence.token_ids) - sequence.resumed, -sequence.id))
        return Swap(cast(int, leaving.row), leaving, coming)

    def next_hosted(self, takes: Callable[[Policy], bool]) -> Sequence | None:
        """Return the first swapped-out sequence whose policy ``takes`` accepts; ``None`` if there is none."""
        return next(
            (
                sequence
                for sequence in self.waiting
                if sequence.status is SequenceStatus.SWAPPED and takes(sequence.policy)
            ),
            None,
        )

    def exchange(self, swap: Swap) -> None:
        """Give the row of the leaving sequence to the coming one, and put the leaving one at the end of the queue.
        Their memories are the caller's to move.
        """
        row, leaving, coming = swap
        self.waiting.remove(coming)
        self.waiting.append(leaving)
        leaving.row, coming.row, self._rows[row] = None, row, coming

    def _free_row(self, coming: Sequence) -> int | None:
        """Return a free row for a sequence, preferably next to one with the same policy and adapter; ``None`` if all
        are taken.

        A layer steps once per run of equal policies, and rows of other adapters between them are padding.
        """
        free = [i for i, sequence in enumerate(self._rows) if sequence is None]
        beside = [
            (i, other)
            for i in free
            for other in (*self._rows[max(0, i - 1) : i], *self._rows[i + 1 : i + 2])
            if other is not None and other.policy == coming.policy
        ]
        like = [i for i, other in beside if other.request.adapter == coming.request.adapter]
        return next(iter(like or [i for i, _ in beside] or free), None)

    def next_policy(self) -> Policy | None:
        """Return the policy of the longest waiting request, if no row is in use; else ``None``.

        Requests count as not passed over from then on.
        """
        if self.running or not self.waiting:
            return None
        self._passed_over = 0
        return self.waiting[0].policy

    def waiting_for(self, policy: Policy) -> list[Sequence]:
        """Return the requests in the queue whose policy is this one."""
        return [sequence for sequence in self.waiting if sequence.policy is policy or sequence.policy == policy]

    def beginning(self) -> list[Sequence]:
        """Return the running requests that have read nothing yet; without any, the longest waiting request.

        These end if giving out rows fails: somebody must, or each later step would fail in the same way.
        """
        return [sequence for sequence in self.running if not sequence.fed] or list(self.waiting)[:1]

    def leave(self, sequence: Sequence) -> None:
        """Free the row of a request, or remove it from the queue."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.row is not None:
            self._rows[sequence.row] = None
            sequence.row = None

    def gap(self) -> Gap | None:
        """Return the last decoding sequence and a free row before it, to which it should move; ``None`` if there is
        nothing to gain.

        A step computes every row up to the last running one, so rows whose prompts are still to be read come behind.
        """
        # a waiting request is about to fill the gap; rows that run alone have none
        if self.waiting or self._alone or None not in self._rows:
            return None
        target = self._rows.index(None)
        decoding = [
            (i, sequence)
            for i, sequence in enumerate(self._rows)
            if sequence is not None and sequence.status is SequenceStatus.DECODE
        ]
        if not decoding or decoding[-1][0] < target:
            return None
        source, sequence = decoding[-1]
        return Gap(sequence, source, target)

    def move(self, gap: Gap) -> None:
        """Assign a sequence to the free row of a gap. Its memory is moved by the KV manager."""
        self._rows[gap.source], self._rows[gap.target], gap.sequence.row = None, gap.sequence, gap.target

    def plan(self) -> list[ModelRun]:
        """Return the model runs of this step: prompt chunks, if it is their turn, and one token for every decoding row,
        unless these wait until all prompts are read (``prompts_first``).
        """
        waits = self._prompts_first and any(sequence.status is SequenceStatus.PREFILL for sequence in self.running)
        steps = [] if waits else self._decode()
        is_turn = not steps or self._owed < self._decode_every
        prompts = self._feed(self._most_tokens(waited_for=bool(steps))) if is_turn else []
        read = sum(len(tokens) for batch in prompts for tokens in batch.tokens)
        # prompt tokens that were read while rows ran; a token of all running rows pays for `decode_every` of them
        self._owed = max(0, self._owed + read - self._decode_every * len(steps)) if steps else 0
        if self._alone:
            return [ModelRun([batch]) for batch in [*prompts, *steps]]
        if not steps or not prompts or read > self._mixed_tokens:
            return [ModelRun(batches) for batches in ([prompts] if prompts else []) + [[step] for step in steps]]
        shared = next((step for step in steps if _adapter(step) == _adapter(prompts[0])), None)
        with_prompts = prompts if shared is None else [*prompts, shared]
        return [ModelRun(with_prompts), *(ModelRun([step]) for step in steps if step is not shared)]

    def _decode(self) -> list[InputBatch]:
        """Return a batch for each adapter, with the next token of every decoding row."""
        decoding = [
            sequence if sequence is not None and sequence.status is SequenceStatus.DECODE else None
            for sequence in self._rows
        ]
        if self._alone:
            groups: list[tuple[int, list[Sequence | None]]]
            groups = [(i, [sequence]) for i, sequence in enumerate(decoding) if sequence]
        else:
            adapters = list(dict.fromkeys(sequence.request.adapter for sequence in decoding if sequence))
            groups = [_of_adapter(decoding, adapter, from_first=len(adapters) == 1) for adapter in adapters]
        return [
            InputBatch(
                start,
                group,
                [sequence.token_ids[-1:] if sequence else [] for sequence in group],
                [sequence.fed if sequence else 0 for sequence in group],
                Phase.DECODE,
            )
            for start, group in groups
            if group
        ]

    def _most_tokens(self, *, waited_for: bool) -> int:
        """Return the most prompt tokens that several prompts share in a run; 0 if every run has one row.

        Args:
            waited_for: whether running rows wait for the end of the run.
        """
        if self._alone:
            return 0
        if self._chunk is None:
            return SHARED_TOKENS
        # rows that run wait for no more than a chunk at a time
        return self._chunk if waited_for else max(self._chunk, SHARED_TOKENS)

    def _feed(self, most: int) -> list[InputBatch]:
        """Return batches with the next chunk of the oldest prompt, however long it is, and with chunks of later prompts
        of the same adapter, as far as they fit into ``most`` tokens together.
        """
        chosen: list[PromptChunk] = []
        prompts = [sequence for sequence in self.running if sequence.status is SequenceStatus.PREFILL]
        for sequence in sorted(prompts, key=lambda sequence: sequence.id):
            if chosen and sequence.request.adapter != chosen[0].owner.request.adapter:
                continue  # the rows of a run have one adapter
            stop = sequence.readable if self._chunk is None else min(sequence.readable, sequence.fed + self._chunk)
            tokens = sequence.to_read[sequence.fed : stop]
            if not chosen or len(tokens) <= most:  # the oldest prompt never waits for room
                most -= len(tokens)
                chosen.append(PromptChunk(cast(int, sequence.row), sequence, tokens))
        return [_batch(pieces) for pieces in _neighbours(sorted(chosen))]


def _of_adapter(
    decoding: GenericSequence[Sequence | None], adapter: str | None, *, from_first: bool
) -> tuple[int, list[Sequence | None]]:
    """Return the batch rows of one adapter, as the first row's index and the sequences from there on, with ``None`` for
    rows that are not its own.

    Rows behind the last one cost nothing; those between are padding. So are rows before the first one if ``from_first``
    is set: a batch that always begins with the first row can be repeated as it was.
    """
    mine = [sequence if sequence and sequence.request.adapter == adapter else None for sequence in decoding]
    places = [i for i, sequence in enumerate(mine) if sequence]
    first = 0 if from_first else places[0]
    return first, mine[first : places[-1] + 1]


def _adapter(batch: InputBatch) -> str | None:
    """Return the adapter of a batch's sequences."""
    return batch.requests[0].request.adapter


def _neighbours(pieces: GenericSequence[PromptChunk]) -> list[list[PromptChunk]]:
    """Group prompt chunks of neighbouring rows into batches that need little padding. The chunks are sorted by row."""
    groups: list[list[PromptChunk]] = []
    for piece in pieces:
        if groups and _fits(groups[-1], piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _fits(group: GenericSequence[PromptChunk], piece: PromptChunk) -> bool:
    """Return whether a chunk may join a batch: it is in the next row, all or none begin a prompt, and little padding is
    needed. A prompt whose beginning was read before is alone.
    """
    lengths = [len(chunk.tokens) for chunk in (*group, piece)]
    padding = len(lengths) * max(lengths) - sum(lengths)
    owners = [chunk.owner for chunk in (*group, piece)]
    begins = {owner.begins for owner in owners}
    alone = any(owner.reading is not None and owner.fed for owner in owners)  # its beginning was read before
    return group[-1].row + 1 == piece.row and len(begins) == 1 and not alone and padding <= PADDING * len(group)


def _batch(pieces: GenericSequence[PromptChunk]) -> InputBatch:
    """Return a batch of prompt chunks of neighbouring rows, in the order of the rows."""
    requests = [piece.owner for piece in pieces]
    tokens, fed = [piece.tokens for piece in pieces], [sequence.fed for sequence in requests]
    return InputBatch(pieces[0].row, requests, tokens, fed, Phase.PREFILL, fresh=requests[0].begins)


# Equal prompts: the first one is read, and the others begin with its memory.
#
# Several answers to one prompt differ in their random numbers only, so they have the same memory after the prompt. The
# logits after its last token are the same as well: each answer draws its first token from them.

SHORTEST = 256
"""Tokens of a prompt that is worth waiting for; the memory of a shorter one is copied more slowly than it is read."""

MOST = 256
"""Requests that may wait before an engine takes no more from an iterable."""


class DuplicatePrompts:
    """Requests that wait until an equal prompt has been read."""

    def __init__(self) -> None:
        self._readers: dict[Hashable, Sequence] = {}
        # the key under which each reader was registered, by the reader's id: its prompt may change when it gets its row
        self._keys: dict[int, Hashable] = {}
        self._waiting: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Count the sequences that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """Return whether so many sequences wait that no more should be taken."""
        return len(self) >= MOST

    def joins(self, sequence: Sequence) -> bool:
        """Register a request. Return whether it waits for another request that is to read an equal prompt.

        Otherwise the request reads its prompt, and later equal ones may wait for it. Short prompts, and those with
        log-probabilities, never wait.
        """
        if sequence.scored or len(sequence.prompt) < SHORTEST:
            return False
        if (reader := self._readers.get(key := _key(sequence))) is None:
            self._register(key, sequence)
            return False
        self._waiting.setdefault(reader.id, []).append(sequence)
        return True

    def of(self, reader: Sequence) -> list[Sequence]:
        """Return a list of the requests that wait for the prompt that ``reader`` has read, and let no more join them.
        They stay registered until `leave`.
        """
        self._close(reader)
        return list(self._waiting.get(reader.id, ()))

    def leave(self, sequence: Sequence) -> Sequence | None:
        """Forget a request. If others wait for its prompt, return the first of them, which must now read the prompt
        itself.
        """
        for waiting in self._waiting.values():
            if sequence in waiting:
                waiting.remove(sequence)
        others = self._waiting.pop(sequence.id, [])
        self._close(sequence)
        if not others:
            return None
        heir = others.pop(0)
        self._register(_key(heir), heir)
        self._waiting[heir.id] = others
        return heir

    def _register(self, key: Hashable, reader: Sequence) -> None:
        """Let requests with this key wait for a reader from now on."""
        self._readers[key], self._keys[reader.id] = reader, key

    def _close(self, sequence: Sequence) -> None:
        """Let no more requests wait for a reader; do nothing if it is none."""
        key = self._keys.pop(sequence.id, None)
        if self._readers.get(key) is sequence:
            del self._readers[key]


def _key(sequence: Sequence) -> Hashable:
    """Return a key that is equal for requests whose prompts lead to the same memory, and may be read as one.

    Requests of two owners never are: each may go on from a memory of its own, and ``cached_tokens`` would tell one what
    the other asks.
    """
    # A snapshot counts by its identity: comparing two of them would mean comparing all of their bytes.
    return sequence.settings, sequence.request.owner, id(sequence.request.snapshot), sequence.prompt

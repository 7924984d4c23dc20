"""The state of a request between its arrival and its result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import cast

from torch import Tensor

from kvkeep.cache.prompt_kv import PromptReading
from kvkeep.engine.detokenizer import StopText
from kvkeep.engine.drops import Drops, dropped
from kvkeep.engine.grammar import Constraint
from kvkeep.engine.host_copies import Pinned
from kvkeep.engine.request import Event, FinishReason, HeldTokens, Logprob, Request, Result
from kvkeep.engine.sampling_params import RepetitionDetectionParams
from kvkeep.kv.lost_mass import LostMass
from kvkeep.pins import Spans, count, spans
from kvkeep.policies._keep_prompt import keeps_whole
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.snapshot import Pending
from kvkeep.types import MemoryUsage

_FREE = {
    *("prompt", "messages", "raw", "chat", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("sampling", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "ignore_end"),
    *("structured_outputs", "logprobs"),
    *("policy", "budget", "keep_prompt", "sequence", "snapshot", "owner", "keep_as", "noted_messages", "reposition"),
    "return_memory",
}
"""Fields of requests that do not change the memory of a prompt, or are taken care of elsewhere."""


class RepetitionDetector:
    """Tells whether a growing text repeats itself.

    Args:
        rule: which repetitions count.

    Cost:
        a token is compared with its equals among the last ``max_pattern_size`` tokens.
    """

    def __init__(self, rule: RepetitionDetectionParams) -> None:
        self._rule, self._length = rule, 0
        self._positions: dict[int, deque[int]] = {}  # token → where it stands among the last tokens
        self._equal: dict[int, int] = {}  # pattern size → tokens at the end that equal the one so far before them

    def add(self, token_id: int) -> bool:
        """Add a token. Return whether the text now ends with a repeated pattern."""
        rule, position = self._rule, self._length
        before = self._positions.setdefault(token_id, deque())
        while before and position - before[0] > rule.max_pattern_size:
            before.popleft()
        sizes = [position - other for other in before if position - other >= rule.min_pattern_size]
        self._equal = {size: self._equal.get(size, 0) + 1 for size in sizes}
        before.append(position)
        self._length += 1
        # the first time of a pattern equals nothing before it, and counts as well
        return any(size + equal >= rule.repeated_tokens(size) for size, equal in self._equal.items())


class SequenceStatus(Enum):
    """Where a request stands between its arrival and its result."""

    WAITING = "waiting"
    """It has had no row yet, and nothing of it was read."""

    PREFILL = "prefill"
    """It has a row, and the model reads its prompt."""

    DECODE = "decode"
    """It has a row and its prompt was read: it gets a token in each step."""

    PREFILLED = "prefilled"
    """An equal prompt was read, so it has its first token; it waits for a row of its own."""

    SWAPPED = "swapped"
    """It has given up its row to others, and its memory waits in main memory."""

    FINISHED = "finished"
    """It has a reason for its end. Its memory may still be on its way to the disk."""


@dataclass(frozen=True, eq=False)
class Hosted:
    """A sequence that has begun and waits in main memory for a row.

    Attributes:
        contents: its memory, in ordinary main memory or pinned.
        memory_usage: bytes of the row that it had.
    """

    contents: Contents | Pinned
    memory_usage: MemoryUsage

    def load(self) -> Contents:
        """Return the sequence's memory, from where it can be put into a row."""
        return self.contents.load() if isinstance(self.contents, Pinned) else self.contents


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    Attributes:
        id: the number that `Engine.add` gave.
        request: the request; its prompt is token ids.
        policy: the policy that it runs under.
        budget: tokens kept per layer and head.
        ends: tokens that end the text.
        tail: turns tokens into text and looks for stop texts; ``None`` without a tokenizer.
        constraint: the tokens that its form allows next; ``None``: all.
        status: where it stands. `start`, `commit`, `begin_prefilled`, `begin_again`, `swap_out` and `finish`
            change it.
        row: its row; ``None`` while it waits.
        fed: tokens that the model has seen, of the prompt and new ones; counted when a step has succeeded.
        token_ids: the new tokens.
        logprobs: an entry for each new token, if asked for.
        read_again: new tokens that are read again together with the prompt.
        prompt_logprobs: an entry for each token of the prompt but the first that the model has seen, if asked for.
        finish_reason: why it has ended; ``None`` while it runs.
        error: the reason, if a step failed.
        used: marks the tokens of the vocabulary that occur in it, for a repetition penalty.
        counts: how often each token of the vocabulary was generated, for presence and frequency penalties.
        counted: the number of new tokens in ``counts``.
        memory_usage: bytes of its row at its end.
        lost: the attention that its evicted tokens carried.
        memory: the tokens that its memory held at its end, if asked for.
        levels: the budgets among which its guard chooses at the end of the prompt, in order; empty without a guard.
        reads: whether it ends as soon as its prompt has been read.
        cached: tokens of the prompt that the model need not read, because their memory was there.
        borders: a hash of its prompt's tokens at each border of chunks, once it is needed.
        recalled: whether it goes on from the memory of an earlier chat.
        reading: what is known of its prompt already, and kept of it for later prompts; ``None``: nothing.
        load: returns the memory that its row begins with; ``None`` for an empty row.
        held: tokens of the prompt for which the memory stands that it continues.
        held_pins: the spans that are pinned there.
        drops: tokens that leave its memory, those of the memory that it continues included.
        skipped: tokens of the prompt that its client has left out: they were dropped from the memory it continues.
        read_anew: why it does not go on from the memory of an earlier chat of which messages were left out.
        hosted: its memory in main memory, while it has given up its row to others.
        resumed: the number of its new tokens when it last got a row.
        keep: takes the memory of its row when it ends well; its result may have to wait for the disk.
        left: told when it has ended in any way, and its row is free.
        times: seconds of a clock at which it was ``added``, ``started``, and had its ``first`` and ``last`` token.
        stopped: whether its next token is its last one, since its user has heard enough.
        repetition: tells whether its text repeats itself; ``None`` if that does not end it.
    """

    id: int
    request: Request
    policy: Policy
    budget: int
    ends: frozenset[int]
    tail: StopText | None = None
    constraint: Constraint | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    row: int | None = None
    fed: int = 0
    token_ids: list[int] = field(default_factory=list)
    read_again: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    used: Tensor | None = None
    counts: Tensor | None = None
    counted: int = 0
    memory_usage: MemoryUsage = field(default_factory=MemoryUsage)
    lost: LostMass = field(default_factory=LostMass)
    memory: HeldTokens | None = None
    levels: tuple[int, ...] = ()
    reads: bool = False
    cached: int = 0
    borders: list[bytes] | None = None
    recalled: bool = False
    reading: PromptReading | None = None
    load: Callable[[], Contents | None] | None = None
    held: int = 0
    held_pins: Spans = ()
    drops: Drops = ()
    skipped: int = 0
    read_anew: str = ""
    hosted: Hosted | None = None
    resumed: int = 0
    keep: Callable[[Sequence, Contents], Pending | None] | None = None
    left: Callable[[Sequence], None] | None = None
    times: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    repetition: RepetitionDetector | None = field(init=False)

    def __post_init__(self) -> None:
        rule = self.request.sampling.repetition_detection
        self.repetition = RepetitionDetector(rule) if isinstance(rule, RepetitionDetectionParams) else None
        self.mark("added")

    def mark(self, event: str) -> None:
        """Record the present time of a monotonic clock, in seconds, under an event's name."""
        self.times[event] = time.perf_counter()

    @property
    def prompt(self) -> GenericSequence[int]:
        """Return the token ids of the prompt; an empty tuple while they are not known."""
        found = self.request.prompt
        return () if found is None or isinstance(found, str) else found

    @property
    def to_read(self) -> GenericSequence[int]:
        """Return the tokens to prefill: the prompt, and after `begin_again` also the tokens generated until then."""
        return (*self.prompt, *self.token_ids[: self.read_again]) if self.read_again else self.prompt

    def begin_again(self) -> None:
        """Note that all of the sequence's tokens are to be read again as a prompt, in its row, which the caller
        empties.
        """
        # the guard has chosen a budget when the prompt was read first
        self.fed, self.read_again, self.levels, self.reading = 0, len(self.token_ids), (), None
        self.status = SequenceStatus.PREFILL

    @property
    def begins(self) -> bool:
        """Return whether the sequence's row holds no token yet: none was read since it got the row, and no memory was
        put there. A beginning of the prompt that comes with its first run, see `PromptReading`, does not count.
        """
        return self.fed == (0 if self.reading is None else self.reading.known)

    @property
    def readable(self) -> int:
        """Return up to how many tokens from the beginning may be read at once: to the next drop, or else all."""
        return next((drop.after for drop in self.drops if drop.after > self.fed), len(self.to_read))

    @property
    def gone(self) -> Spans:
        """Return the spans of the tokens that are dropped from the memory right after the last token that was read."""
        return dropped(drop for drop in self.drops if drop.after == self.fed)

    def recall(self, prompt: GenericSequence[int], drops: Drops) -> None:
        """Replace the prompt by one that has the messages again which the client has left out, and the drops by
        ``drops``, with which they leave the memory. What the prompt has grown by is counted as skipped.
        """
        self.skipped += len(prompt) - len(self.prompt)
        self.request, self.drops, self.borders = self.request.replaced(prompt=tuple(prompt)), drops, None

    @property
    def pins(self) -> Spans:
        """Return the spans of the prompt that may not be evicted: those of the request, and all that is to be read if
        prompts stay whole.
        """
        pins = cast(Spans, self.request.pins)
        return spans((*pins, (self.held, len(self.prompt)))) if keeps_whole(self.policy) else pins

    @property
    def settings(self) -> tuple[Hashable, ...]:
        """Return, as a key, all settings on which the memory of the prompt depends.

        The settings stay the same while the request runs: a guarded request has the budget that it asked for. A field
        added to `Request` in the future is part of them, unless it is named in `_FREE`.
        """
        budget = self.levels[-1] if self.levels else self.budget
        others = (getattr(self.request, field.name) for field in fields(self.request) if field.name not in _FREE)
        return self.policy, budget, self.request.sequence if self.policy.stochastic else None, *others

    @property
    def scored(self) -> bool:
        """Return whether the request asks for log-probabilities of its prompt, so that no stored prefix may stand in
        for it.
        """
        return self.request.prompt_logprobs is not None

    def start(self) -> None:
        """Note that the sequence has got a row, for the first time or again: it decodes if it has new tokens, and reads
        its prompt otherwise. A new time slice begins.
        """
        if self.status is SequenceStatus.WAITING:
            self.mark("started")
        self.resumed = len(self.token_ids)
        self.status = SequenceStatus.DECODE if self.token_ids else SequenceStatus.PREFILL

    def commit(self, n: int) -> None:
        """Count ``n`` more tokens as read by the model. The sequence decodes once its prompt is read."""
        self.fed += n
        if not self.prompt_left:
            self.status = SequenceStatus.DECODE
            if self.reading is not None:
                self.reading.read()

    def begin_prefilled(self, contents: Contents, reader: Sequence) -> None:
        """Start the sequence with the memory of its prompt, which another request has read. It still waits for a row.

        Args:
            contents: the memory of the prompt.
            reader: the other request. Its guard may have chosen the budget, and it may have gone on from a memory whose
                messages the prompt leaves out.
        """
        self.mark("started")
        self.status = SequenceStatus.PREFILLED
        self.load, self.cached, self.budget = lambda: contents, contents.seen, reader.budget
        if reader.skipped:
            self.recall(reader.prompt, reader.drops)

    def swap_out(self, hosted: Hosted) -> None:
        """Let the sequence wait for a row, with its memory in main memory."""
        self.hosted, self.status = hosted, SequenceStatus.SWAPPED

    @property
    def prompt_left(self) -> int:
        """Return the number of prompt tokens that the model has not seen."""
        return max(0, len(self.to_read) - self.fed)

    def take(self, token_id: int) -> Event:
        """Append a new token and return its event. Finish the sequence if this is its last token.

        Raises:
            KVKeepError: the request's grammar does not allow the token.
        """
        if self.constraint:
            self.constraint.take(token_id)  # first, since nothing may have changed if it raises
        read = 0
        if not self.token_ids:
            self.mark("first")
            read = len(self.prompt) - self.cached
        self.token_ids.append(token_id)
        repeats = self.repetition is not None and self.repetition.add(token_id)
        looks = len(self.token_ids) > self.request.sampling.min_new_tokens
        ended = token_id in self.ends  # no part of the text, also where the tokenizer has it as an ordinary token
        shown = not ended or self.request.include_stop_str_in_output
        piece, stopped = self.tail.add(token_id, looks=looks) if self.tail and shown else ("", False)
        if stopped or ended or self.stopped or (self.constraint and self.constraint.complete):
            self.finish("stop")
        elif len(self.token_ids) >= self.request.sampling.max_new_tokens:
            self.finish("length")
        elif repeats and looks:
            self.finish("repetition")
        if self.status is SequenceStatus.FINISHED and self.tail:  # no further token can decide what is held back
            piece += self.tail.end()
        logprob = self.logprobs[-1] if self.request.logprobs is not None else None
        length = len(self.prompt) - self.skipped
        return Event(self.id, token_id, piece, logprob=logprob, read_tokens=read, prompt_tokens=length)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Mark the sequence as finished, with a reason, and drop its memory outside of a row."""
        self.finish_reason, self.error, self.hosted = reason, error, None
        self.status = SequenceStatus.FINISHED
        self.mark("last")

    def rest(self) -> str:
        """Return the text held back until now (for stop texts or half characters), after a failed step; empty if there
        is none, or decoding fails.
        """
        with suppress(BaseException):  # perhaps the tokenizer is what fails, or a second Ctrl-C comes
            return self.tail.end() if self.tail else ""
        return ""

    @property
    def _hides_end(self) -> bool:
        """Return whether the last token is an end token that the text leaves out."""
        ended = self.finish_reason == "stop" and self.token_ids[-1] in self.ends
        return ended and not self.request.include_stop_str_in_output

    def result(self) -> Result:
        """Return the `Result` of a finished sequence."""
        assert self.finish_reason is not None
        at, n, guard = self.times, len(self.token_ids), self.request.guard
        started = at.get("started", at["last"])  # a request may end before it has had a row
        return Result(
            id=self.id,
            token_ids=tuple(self.token_ids),
            text=self.tail.text if self.tail else "",
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt) - self.skipped,
            cached_tokens=self.cached - self.skipped,
            dropped_tokens=count(dropped(self.drops)),
            skipped_tokens=self.skipped,
            read_anew=self.read_anew,
            logprobs=tuple(self.logprobs[:n]),  # one more is there if its token could not be added
            prompt_logprobs=tuple(self.prompt_logprobs),
            queued_s=started - at["added"],
            ttft_s=at["first"] - at["added"] if n else None,
            prefill_s=at["first"] - started if n else None,
            tpot_s=(at["last"] - at["first"]) / (n - 1) if n > 1 else None,
            error=self.error,
            memory_usage=self.memory_usage,
            budget=self.budget,
            lost_mass=self.lost,
            memory=self.memory,
            end_token=self._hides_end,
            guarded=None if guard is None or self.lost.prompt is None else self.lost.prompt <= guard,
        )

"""Requests to the engine, their results, and the state of a request between the two."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.engine.sampling import Sampling, whole_within
from kvkeep.engine.stops import StopText
from kvkeep.errors import InputError
from kvkeep.memory import Memory
from kvkeep.policies.base import Policy

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen, and how many.
        policy: the eviction policy or its string; by default the engine's.
        budget: tokens kept per layer and head; by default, and at most, the engine's.
        stop: texts that end the generation; they are not part of the result. The engine needs a tokenizer for them.
        ignore_end: go on when the model wants to end its text.
        logprobs: report each token's log-probability, and those of this many of the likeliest tokens.
        sequence: identity of the request for everything random (drawn tokens, policies). Equal requests of the same
            identity get the same tokens.

    Raises:
        InputError: the prompt has no token, a value has another type, or a number is out of range.
        BudgetError: the budget is not a whole number of 1 or more.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    policy: str | Policy | None = None
    budget: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
    sequence: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _token_ids(self.prompt))
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "sequence", whole_within("sequence", self.sequence, -(2**63), 2**63 - 1))
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling={self.sampling!r} is no kvkeep.Sampling.")
        if not isinstance(self.ignore_end, bool):
            raise InputError(f"ignore_end={self.ignore_end!r} is neither True nor False.")
        if self.policy is not None and not isinstance(self.policy, str | Policy):
            raise InputError(f"policy={self.policy!r} is neither a policy nor the name of one.")
        if self.budget is not None:
            object.__setattr__(self, "budget", budgets.check_one(self.budget))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", whole_within("logprobs", self.logprobs, 0, 100))


def _token_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids of a list, an array or a tensor of one axis as Python's numbers.

    Raises:
        InputError: there are none, or the prompt is something else.
    """
    found = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        kind = "a text" if isinstance(found, str | bytes) else f"of the type {type(found).__name__}"
        raise InputError(f"The prompt is {kind}; give token ids, for example tokenizer(text).input_ids.")
    ids = tuple(found)
    if not ids:
        raise InputError("The prompt has no tokens.")
    if set(map(type, ids)) == {int}:
        return ids
    return tuple(whole_within("A token id of the prompt", one, -(2**63), 2**63 - 1) for one in ids)


def _texts(stop: object) -> tuple[str, ...]:
    """Return stop texts as a tuple.

    Raises:
        InputError: one of them is not a text, or is empty.
    """
    found = (stop,) if isinstance(stop, str) else stop
    texts = tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"stop={stop!r} is no text and no sequence of texts.")
    if not all(texts):
        raise InputError("An empty stop text would end every generation before it begins.")
    return texts


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, before temperature and other changes.

    Attributes:
        token_id: the token that was chosen.
        value: natural logarithm of its probability.
        top: the likeliest tokens with their values, most likely first.
    """

    token_id: int
    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    """A finished request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_ids: the new tokens, the end token included.
        text: the new tokens as text, without special tokens and without a stop text; empty without a tokenizer.
        finish_reason: ``stop`` (the model or a stop text ended it), ``length``, ``cancelled``, or ``error`` (a step
            failed; the tokens before it are there).
        prompt_tokens: length of the prompt.
        logprobs: one entry per new token, if asked for.
        queued_s: time from the request's arrival until it got a row.
        ttft_s: time from the request's arrival to its first token, the queue included; ``None`` without a token.
        prefill_s: time from getting a row to the first token, ``ttft_s - queued_s``; ``None`` without a token.
        tpot_s: time per token after the first; ``None`` with fewer than two.
        error: the reason, if a step failed.
        memory: bytes of its row at its end; zeros if it was cancelled or ended by an error.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[Logprob, ...]
    queued_s: float
    ttft_s: float | None
    prefill_s: float | None
    tpot_s: float | None
    error: str | None = None
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Event:
    """The outcome of one step for one request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_id: the new token; ``None`` if the step failed.
        text: text that has become final, often a word, sometimes nothing.
        result: the finished request, if this was its last token or the step failed.
    """

    id: int
    token_id: int | None
    text: str
    result: Result | None = None


@dataclass(eq=False)
class Generation:
    """A request that waits or runs.

    Attributes:
        id: the number that `Engine.add` gave.
        request: the request.
        policy: the policy that it runs under.
        budget: tokens kept per layer and head.
        ends: tokens that end the text.
        tail: turns tokens into text and looks for stop texts; ``None`` without a tokenizer.
        row: its row; ``None`` while it waits.
        fed: tokens that the model has seen, of the prompt and new ones; counted when a step has succeeded.
        token_ids: the new tokens.
        logprobs: an entry for each new token, if asked for.
        finish_reason: why it has ended; ``None`` while it runs.
        error: the reason, if a step failed.
        used: marks the tokens of the vocabulary that occur in it, for a repetition penalty.
        memory: bytes of its row at its end.
        times: seconds of a clock at which it was ``added``, ``started``, and had its ``first`` and ``last`` token.
    """

    id: int
    request: Request
    policy: Policy
    budget: int
    ends: frozenset[int]
    tail: StopText | None = None
    row: int | None = None
    fed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    used: Tensor | None = None
    memory: Memory = field(default_factory=Memory)
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark("added")

    def mark(self, event: str) -> None:
        """Note the time of an event."""
        self.times[event] = time.perf_counter()

    @property
    def prompt_left(self) -> int:
        """The number of prompt tokens that the model has not seen."""
        return max(0, len(self.request.prompt) - self.fed)

    def take(self, token_id: int) -> Event:
        """Add a new token, and end the request if this is its last one."""
        if not self.token_ids:
            self.mark("first")
        self.token_ids.append(token_id)
        piece, stopped = self.tail.add(token_id) if self.tail else ("", False)
        if stopped or token_id in self.ends:
            self.finish("stop")
        elif len(self.token_ids) >= self.request.sampling.max_new_tokens:
            self.finish("length")
        if self.finish_reason and self.tail:
            piece += self.tail.end()
        return Event(self.id, token_id, piece)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Note that it ends, and why."""
        self.finish_reason, self.error = reason, error
        self.mark("last")

    def rest(self) -> str:
        """Return the text that was held back, after a failed step."""
        with suppress(BaseException):  # perhaps the tokenizer is what fails, or a second Ctrl-C comes
            return self.tail.end() if self.tail else ""
        return ""

    def result(self) -> Result:
        """Return the finished request as the user gets it."""
        assert self.finish_reason is not None
        at, n = self.times, len(self.token_ids)
        started = at.get("started", at["last"])
        return Result(
            id=self.id,
            token_ids=tuple(self.token_ids),
            text=self.tail.text if self.tail else "",
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt),
            logprobs=tuple(self.logprobs[:n]),
            queued_s=started - at["added"],
            ttft_s=at["first"] - at["added"] if n else None,
            prefill_s=at["first"] - started if n else None,
            tpot_s=(at["last"] - at["first"]) / (n - 1) if n > 1 else None,
            error=self.error,
            memory=self.memory,
        )

"""What is asked of the engine and what comes back."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex

from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.engine.sampling import Sampling
from kvkeep.engine.stops import StopText
from kvkeep.errors import InputError
from kvkeep.memory import Memory
from kvkeep.policies.base import Policy

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how it is to be continued.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen, and how many.
        policy: the eviction policy or its string; by default the engine's.
        budget: tokens kept per layer and head, at most the engine's, which is the default.
        stop: texts that end the generation; they are not part of the result. The engine needs a tokenizer for them.
        ignore_end: go on when the model wants to end its text.
        logprobs: report the logarithm of each token's probability, and of so many of the likeliest beside it.
        sequence: identity for everything random, the draw of tokens and policies: equal requests with equal identity
            get the same tokens.

    Raises:
        InputError: there is no token, something has another type, or a number is out of range.
        BudgetError: the budget is no whole number of 1 or more.
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
        object.__setattr__(self, "sequence", _whole("sequence", self.sequence, -(2**63), 2**63 - 1))
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling={self.sampling!r} is no kvkeep.Sampling.")
        if not isinstance(self.ignore_end, bool):
            raise InputError(f"ignore_end={self.ignore_end!r} is neither True nor False.")
        if self.policy is not None and not isinstance(self.policy, str | Policy):
            raise InputError(f"policy={self.policy!r} is neither a policy nor the name of one.")
        if self.budget is not None:
            object.__setattr__(self, "budget", budgets.check_one(self.budget))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", _whole("logprobs", self.logprobs, 0, 100))


def _token_ids(prompt: object) -> tuple[int, ...]:
    """Token ids as Python's numbers; they may come as a list, an array or a tensor of one axis.

    Raises:
        InputError: there are none, or they are something else.
    """
    found = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise InputError(f"The prompt is {_kind(found)}; give token ids, for example tokenizer(text).input_ids.")
    ids = tuple(found)
    if not ids:
        raise InputError("The prompt has no tokens.")
    if set(map(type, ids)) == {int}:
        return ids
    return tuple(_whole("A token id of the prompt", one, -(2**63), 2**63 - 1) for one in ids)


def _texts(stop: object) -> tuple[str, ...]:
    """Stop texts.

    Raises:
        InputError: they are no texts, or one is empty.
    """
    found = (stop,) if isinstance(stop, str) else stop
    texts = tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"stop={stop!r} is no text and no sequence of texts.")
    if not all(texts):
        raise InputError("An empty stop text would end every generation before it begins.")
    return texts


def _whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number, also of NumPy.

    Raises:
        InputError: it is something else, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InputError(f"{name}={value!r} is no whole number.")
    try:
        number = operator.index(value)
    except Exception as error:  # an array of several numbers, for example
        raise InputError(f"{name} is {_kind(value)}, no whole number.") from error
    if not low <= number <= high:
        raise InputError(f"{name}={number} is outside {low} … {high}.")
    return number


def _kind(value: object) -> str:
    return "a text" if isinstance(value, str | bytes) else f"of the type {type(value).__name__}"


@dataclass(frozen=True)
class Logprob:
    """How likely a token was, before temperature and other changes.

    Attributes:
        token_id: the token that was chosen.
        value: natural logarithm of its probability.
        top: the likeliest tokens with theirs, most likely first.
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
        text: the same as text, without special tokens and without a stop text; empty without a tokenizer.
        finish_reason: ``stop`` (the model or a stop text ended it), ``length``, ``cancelled``, or ``error`` (a step
            failed; the tokens before it are there).
        prompt_tokens: length of the prompt.
        logprobs: one entry per token, if asked for.
        queued_s: time from the request's arrival until it got a row.
        ttft_s: time from the request's arrival to its first token, the queue included; ``None`` if there was none.
        prefill_s: time from getting a row to the first token, ``ttft_s - queued_s``; ``None`` if there was none.
        tpot_s: time per further token; ``None`` if there was only one.
        error: what failed; ``None`` unless that is why it ended.
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
    """What one step brought for one request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_id: the new token; ``None`` if the step failed.
        text: text that has become final, often a word, sometimes nothing.
        result: the whole, if this was the last token, or if the step failed.
    """

    id: int
    token_id: int | None
    text: str
    result: Result | None = None


@dataclass(eq=False)
class Generation:
    """A request on its way: where it stands, and what has been written so far.

    Attributes:
        id: number of the request.
        request: what was asked for.
        policy: the policy it runs under; requests with equal ones share a batch.
        budget: tokens kept per layer and head.
        ends: tokens that end the text.
        tail: turns tokens into text and looks for stop texts; ``None`` without a tokenizer.
        row: its row; ``None`` while it waits.
        fed: tokens that the model has seen, of the prompt and new ones; moves when a step has succeeded.
        token_ids: the new tokens.
        finish_reason: why it has ended; ``None`` while it runs.
        error: what failed, if that is why.
        used: which tokens of the vocabulary occur in it, for a repetition penalty.
        memory: bytes of its row when it had come to its end.
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

    def mark(self, what: str) -> None:
        """Note the time, in seconds."""
        self.times[what] = time.perf_counter()

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that the model has not seen."""
        return max(0, len(self.request.prompt) - self.fed)

    def take(self, token_id: int) -> Event:
        """Add a new token, and see whether it is the last one."""
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
        """Note why it ends."""
        self.finish_reason, self.error = reason, error
        self.mark("last")

    def result(self) -> Result:
        """What the user gets."""
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

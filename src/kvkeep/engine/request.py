"""What is asked of the engine and what comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvkeep.engine.stops import StopText
from kvkeep.errors import InputError
from kvkeep.models.text import Sampling
from kvkeep.policies.base import Policy

FinishReason = Literal["stop", "length", "cancelled"]


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
        sequence: identity for policies with randomness: equal requests with equal identity keep the same tokens.

    Raises:
        InputError: there is no token, or a number is out of range.
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
        if not len(self.prompt):
            raise InputError("The prompt has no tokens.")
        if any(not text for text in self.stop):
            raise InputError("An empty stop text would end every generation before it begins.")
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise InputError(f"logprobs={self.logprobs} is outside 0 … 100.")


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
        finish_reason: ``stop`` (the model or a stop text ended it), ``length`` or ``cancelled``.
        prompt_tokens: length of the prompt.
        logprobs: one entry per token, if asked for.
        queued_s: time until the request got a row.
        ttft_s: time from then to the first token; ``None`` if there was none.
        tpot_s: time per further token; ``None`` if there was only one.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[Logprob, ...]
    queued_s: float
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True)
class Event:
    """What one step brought for one request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_id: the new token.
        text: text that has become final, often a word, sometimes nothing.
        result: the whole, if this was the last token.
    """

    id: int
    token_id: int
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
        fed: prompt tokens that the model has seen.
        token_ids: the new tokens.
        finish_reason: why it has ended; ``None`` while it runs.
        used: which tokens of the vocabulary occur in it, for a repetition penalty.
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
    used: Tensor | None = None
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark("added")

    def mark(self, what: str) -> None:
        """Note the time, in seconds."""
        self.times[what] = time.perf_counter()

    @property
    def length(self) -> int:
        """Tokens that the model has seen once all of this step are fed."""
        return self.fed + len(self.token_ids)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that the model has not seen."""
        return len(self.request.prompt) - self.fed

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

    def finish(self, reason: FinishReason) -> None:
        """Note why it ends."""
        self.finish_reason = reason
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
            logprobs=tuple(self.logprobs),
            queued_s=started - at["added"],
            ttft_s=at["first"] - started if n else None,
            tpot_s=(at["last"] - at["first"]) / (n - 1) if n > 1 else None,
        )

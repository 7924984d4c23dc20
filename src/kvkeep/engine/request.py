"""Requests to the engine, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep import budget as budgets
from kvkeep.engine.prompts import checked_guard, conversation, functions, stop_texts, token_ids
from kvkeep.engine.sampling import Sampling, whole_within
from kvkeep.engine.structure import Structured, structure_of
from kvkeep.errors import InputError
from kvkeep.kv.lost_mass import LostMass
from kvkeep.kv.memory_usage import Memory
from kvkeep.pins import Span, spans
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Snapshot

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt or a conversation, and how it is to be continued.

    Attributes:
        prompt: a text or token ids. A text is the user's message in the tokenizer's chat template, if there is one.
        messages: a conversation in place of a prompt, each message with ``role`` and ``content``.
        tools: functions of which the chat template tells the model, each ``{"type": "function", "function": {…}}``.
            They need messages, and a template that takes tools.
        raw: take the prompt's text as it is, without the chat template.
        sampling: how tokens are chosen, and how many.
        policy: the eviction policy or its string; by default the engine's.
        budget: tokens kept per layer and head; by default, and at most, the engine's.
        stop: texts that end the generation; they are not part of the result. The engine needs a tokenizer for them.
        ignore_end: go on when the model wants to end its text.
        structured_outputs: the form of the text, by one of ``{"json": schema}``, ``{"json_object": True}``, ``{"regex":
            "[a-z]+"}``, ``{"choice": ["yes", "no"]}`` and ``{"grammar": "GBNF or Lark"}``. The text ends where the form
            does. It needs the extra ``kvkeep[structured]``.
        logprobs: report each token's log-probability, and those of this many of the likeliest tokens.
        prompt_logprobs: report the log-probability of each token of the prompt but the first, and those of this many of
            the likeliest tokens. The prompt is then read in full, whatever prompts it shares a beginning with.
        sequence: identity of the request for everything random (drawn tokens, policies). Equal requests of the same
            identity get the same tokens.
        pins: spans of the prompt's positions that no policy may evict, such as ``((0, 120),)``; kept as
            `kvkeep.pins.spans` returns them.
        guard: take the smallest of a quarter, half and all of the budget at which the prompt's cut loses at most this
            share of attention (`Result.lost_mass`), or all of it if none does; by default the engine's.
        memory: the memory that the prompt continues. Policy and budget are then by default the memory's.

    Raises:
        InputError: there is nothing to continue, a value has another type, or a number is out of range.
        BudgetError: the budget is not a whole number of 1 or more.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    raw: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    policy: str | Policy | None = None
    budget: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    structured_outputs: Structured | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    sequence: int = 0
    pins: Sequence[Span] = ()
    guard: float | None = None
    memory: Snapshot | None = None

    def __post_init__(self) -> None:
        self._take_text()
        object.__setattr__(self, "pins", spans(self.pins))
        object.__setattr__(self, "guard", checked_guard(self.guard))
        object.__setattr__(self, "stop", stop_texts(self.stop))
        object.__setattr__(self, "structured_outputs", structure_of(self.structured_outputs))
        object.__setattr__(self, "sequence", whole_within("sequence", self.sequence, -(2**63), 2**63 - 1))
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling={self.sampling!r} is no kvkeep.Sampling.")
        if not isinstance(self.ignore_end, bool):
            raise InputError(f"ignore_end={self.ignore_end!r} is neither True nor False.")
        if self.policy is not None and not isinstance(self.policy, str | Policy):
            raise InputError(f"policy={self.policy!r} is neither a policy nor the name of one.")
        if self.memory is not None and not isinstance(self.memory, Snapshot):
            raise InputError(f"memory={self.memory!r:.80} is no kvkeep.Snapshot.")
        if self.budget is not None:
            object.__setattr__(self, "budget", budgets.check_one(self.budget))
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_within(name, count, 0, 100))
        if self.prompt_logprobs is not None and self.memory is not None:
            raise InputError(
                "`prompt_logprobs` needs the whole prompt to be read, and this request continues a memory."
            )

    def _take_text(self) -> None:
        """Check the prompt or the messages, and turn token ids into a tuple of Python's numbers."""
        if not isinstance(self.raw, bool):
            raise InputError(f"raw={self.raw!r:.80} is neither True nor False.")
        if (self.prompt is None) == (self.messages is None):
            raise InputError("A request has either a prompt (text or token ids) or messages; give one of them.")
        if self.messages is not None:
            if self.raw:
                raise InputError("raw=True leaves the chat template out, and messages need it; give a prompt instead.")
            object.__setattr__(self, "messages", conversation(self.messages))
            object.__setattr__(self, "tools", functions(self.tools))
        elif self.tools:
            raise InputError("tools are told by the chat template, and a prompt goes without; give messages instead.")
        elif not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", token_ids(self.prompt))
        elif not self.prompt.strip():
            raise InputError("The prompt is an empty text; give some words.")


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
        budget: tokens kept per layer and head: what the request asked for, or what its guard has chosen.
        lost_mass: the share of attention that evicted tokens carried; unknown if it was cancelled or ended by an error.
        guarded: whether the prompt's cut lost at most the guard; ``None`` without a guard, or if the loss is unknown.
        cached_tokens: tokens of the prompt that were not read again: a session's or a snapshot's, or a common
            beginning of prompts.
        prompt_logprobs: one entry per token of the prompt but the first, if asked for.
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
    budget: int = 0
    lost_mass: LostMass = field(default_factory=LostMass)
    guarded: bool | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Event:
    """The outcome of one step for one request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_id: the new token; ``None`` if the step failed.
        text: text that has become final, often a word, sometimes nothing.
        result: the finished request, if this was its last token or the step failed.
        logprob: the new token's log-probability, if asked for.
        read_tokens: tokens of the prompt that were read for the first token; 0 in later events.
    """

    id: int
    token_id: int | None
    text: str
    result: Result | None = None
    logprob: Logprob | None = None
    read_tokens: int = 0


def last_result(events: Iterable[Event]) -> Result:
    """Return the result with which the events of a request end."""
    *_, last = events
    assert last.result is not None
    return last.result

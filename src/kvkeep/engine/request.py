"""Requests to the engine, and their results."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.engine.drops import drops_of
from kvkeep.engine.sampling_params import SAMPLING_ELSEWHERE, SamplingParams, whole, whole_within
from kvkeep.engine.schemas import compact
from kvkeep.errors import InputError, PolicyError, renames
from kvkeep.kv.lost_mass import LostMass
from kvkeep.pins import Span, Spans, spans
from kvkeep.policies._keep_prompt import checked_keep_prompt
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.snapshot import Snapshot
from kvkeep.types import MemoryUsage

# Checks of the texts, conversations and token ids that a request is made of.


def conversation(messages: object) -> tuple[dict[str, Any], ...]:
    """Return messages as a tuple of new dictionaries, after checking that each has a role and a content.

    An assistant's calls of tools are taken as OpenAI's clients write them: without a content, and with the text of a
    JSON object as arguments. Chat templates read an empty content, and the object.

    Raises:
        InputError: there is no message, or a message has no role or content that is a text.
    """
    found = () if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable) else tuple(messages)
    made = tuple(_for_templates(message) for message in found if isinstance(message, Mapping))
    if not made or len(made) < len(found) or not all(_has_texts(message) for message in made):
        raise InputError(
            f"messages={messages!r:.60} is no conversation; give a list of messages, each like "
            '{"role": "user", "content": "a text"}.'
        )
    return made


def _has_texts(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a role and a content that are texts."""
    return all(isinstance(message.get(name), str) for name in ("role", "content"))


def _for_templates(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message in which calls of tools have the form that chat templates read."""
    made, calls = dict(message), message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return made
    if made.get("content") is None:
        made["content"] = ""
    made["tool_calls"] = [_with_object(call) for call in calls]
    return made


def _with_object(call: object) -> object:
    """Return a copy of a call of a tool in which the arguments are an object, if they were the JSON text of one. Return
    any other call as it is.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(given, str):
        return call
    try:
        arguments = json.loads(given or "{}")  # some clients send an empty text for no arguments
        # a number that JSON does not have, or half of a character, could not be sent on to the template
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def functions(tools: object) -> tuple[dict[str, Any], ...]:
    """Return tools as a tuple of new dictionaries, after checking that each is a mapping.

    Raises:
        InputError: ``tools`` is no list of mappings.
    """
    # `None` is no mapping, so that the check below refuses what is no list
    found = tuple(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | Mapping) else (None,)
    if not all(isinstance(tool, Mapping) for tool in found):
        raise InputError(
            f'tools={tools!r:.60} is no list of tools like {{"type": "function", "function": {{"name": "…"}}}}.'
        )
    return tuple(dict(tool) for tool in found if isinstance(tool, Mapping))


def token_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids in a list, an array or a tensor of one axis, as Python integers.

    Raises:
        InputError: the prompt is empty, a batch, or no sequence of integers.
    """
    if isinstance(prompt, Mapping):
        raise InputError(f"The prompt is a {type(prompt).__name__}; give its token ids, for example prompt.input_ids.")
    found = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    # bytes would pass for a list of small numbers
    if isinstance(found, bytes) or not isinstance(found, Iterable):
        raise InputError(f"The prompt is of the type {type(prompt).__name__}; give a text or token ids.")
    ids = tuple(found)
    if not ids:
        raise InputError("The prompt has no tokens.")
    # the usual case, checked without a call for each token
    if set(map(type, ids)) == {int}:
        return ids
    if isinstance(ids[0], Mapping):
        raise InputError(
            "The prompt is a list of messages, and a prompt is a text or token ids; give a conversation as "
            "Request(messages=[...])."
        )
    # tensors and arrays without an axis are numbers, though they have an __iter__
    if isinstance(ids[0], Iterable) and not isinstance(ids[0], str) and getattr(ids[0], "ndim", None) != 0:
        raise InputError("The prompt is a batch of texts; give one request for each, for example prompt=input_ids[0].")
    return tuple(whole("A token id of the prompt", token) for token in ids)  # admission knows the vocabulary


def stop_texts(stop: object) -> tuple[str, ...]:
    """Return stop texts as a tuple; a single text becomes a tuple of one.

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


def stop_ids(found: object) -> tuple[int, ...]:
    """Return token ids that end a generation as a sorted tuple, each once.

    Raises:
        InputError: it is no sequence of token ids.
    """
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise InputError(f"stop_token_ids={found!r:.60} is no list of token ids.")
    return tuple(sorted({whole_within("stop_token_ids", token, 0, 2**31 - 1) for token in found}))


_LONGEST_NAME = 200
"""Bytes of a session's name; file systems take 255 with what is added."""


def check_name(name: object) -> str:
    """Return a session's name, after checking that it can be a file name.

    Raises:
        InputError: the name cannot be the name of a file.
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"name={name!r:.80} is no name of a session; give some letters or digits.")
    # Windows allows none of these characters, and temporary files of a session folder begin with a dot
    if any(character in '/\\<>:"|?*' or not character.isprintable() for character in name) or name.startswith("."):
        raise InputError(
            f"name={name!r:.80} cannot be the name of a session's file: give letters, digits, spaces, - and _, no path "
            "separators and no dot in front."
        )
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise InputError(f"name={name!r:.40}… is longer than {_LONGEST_NAME} bytes; give a shorter name.")
    return name


def variables(given: object) -> Mapping[str, Any]:
    """Return variables of a chat template as a new dictionary, after checking their names.

    Raises:
        InputError: they are no mapping from names to values, or one is a field of the request.
    """
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f'chat_template_kwargs={given!r:.60} is no mapping such as {{"enable_thinking": False}}.')
    if own := given.keys() & {"add_generation_prompt", "continue_final_message"}:
        raise InputError(f"chat_template_kwargs has {min(own)}, which is a field of the request. Give it there.")
    return dict(given)


def checked_guard(guard: object) -> float | None:
    """Return a guard as a float, after checking that it is in [0, 1]; ``None`` stays ``None``.

    Raises:
        InputError: the guard is no number from 0 to 1.
    """
    if guard is None:
        return None
    if isinstance(guard, bool) or not isinstance(guard, int | float) or not 0 <= guard <= 1:
        raise InputError(
            f"guard={guard!r:.60} is no share of attention; give a number from 0 to 1, such as 0.1 for a tenth."
        )
    return float(guard)


# The form that an answer must have: a JSON schema, a regular expression, a choice of texts, or a grammar.

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

MOST_CHARACTERS = 2**17
"""Characters of a form; a longer one takes long to compile."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_EXAMPLE = '{"json": {"type": "object"}}'


@dataclass(frozen=True)
class Structure:
    """The form that an answer must have.

    Attributes:
        kind: how the text is to be read. ``grammar`` is GBNF or Lark; ``lark`` is Lark, which kvkeep writes for
            tools.
        text: the schema, the list of choices as JSON, the regular expression or the grammar.
    """

    kind: Kind
    text: str


Structured: TypeAlias = "Mapping[str, Any] | Structure"
"""A form by the names of vLLM's ``structured_outputs``, such as ``{"regex": "[a-z]+"}``."""


def structure_of(given: object) -> Structure | None:
    """Return the form of an answer that a mapping in the manner of vLLM's ``structured_outputs`` asks for.

    A `Structure` and ``None`` are returned as they are.

    Args:
        given: a mapping with one of ``json`` (a schema, also as text), ``json_object`` (true), ``regex``, ``choice`` (a
            list of texts) and ``grammar`` (GBNF or Lark).

    Raises:
        InputError: ``given`` is no such mapping, names no form or several, or is too long.
    """
    if given is None or isinstance(given, Structure):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"structured_outputs={given!r:.60} is no mapping such as {_EXAMPLE}.")
    found = {name: value for name, value in given.items() if value is not None and (name, value) != _NO_OBJECT}
    for name in found:
        if name not in _KINDS:
            alike = difflib.get_close_matches(str(name)[:80], _KINDS, 1)
            remedy = f"did you mean {alike[0]}?" if alike else f"there are {', '.join(_KINDS)}."
            raise InputError(f"structured_outputs has no {str(name)[:80]!r}; {remedy}")
    if len(found) != 1:
        raise InputError(f"structured_outputs names {len(found)} forms; give one of {', '.join(_KINDS)}.")
    ((name, value),) = found.items()
    return checked(_READ[name](value))


_NO_OBJECT = ("json_object", False)  # the same as leaving it out


def json_structure(schema: object) -> Structure:
    """Return the form of JSON that follows a schema.

    Raises:
        InputError: the schema is no JSON object or text of one, or is too long.
    """
    return checked(Structure("json", json.dumps(compact(schema))))


def _object(value: object) -> Structure:
    """Return the form of any JSON object; refuse values other than ``True``.

    Raises:
        InputError: the value is another.
    """
    if value is not True:
        raise InputError(f"structured_outputs has json_object={value!r:.60}; give True, or leave it out.")
    return json_structure({"type": "object"})


def _choice(value: object) -> Structure:
    """Return the form of a choice among texts, after checking them.

    Raises:
        InputError: it is no list of texts, or is empty, or a text in it is.
    """
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) and text for text in value):
        raise InputError(f"structured_outputs has choice={value!r:.60}; give a list of texts that are not empty.")
    return Structure("choice", json.dumps(value, ensure_ascii=False))


def _text(kind: Kind, value: object) -> Structure:
    """Return the form of a regular expression or a grammar, after checking that it is a text.

    Raises:
        InputError: it is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise InputError(f"structured_outputs has {kind}={value!r:.60}; give a text that is not empty.")
    return Structure(kind, value)


_READ: Mapping[str, Callable[[object], Structure]] = {
    "json": json_structure,
    "json_object": _object,
    "choice": _choice,
    "regex": lambda value: _text("regex", value),
    "grammar": lambda value: _text("grammar", value),
}


def checked(found: Structure) -> Structure:
    """Return a form after a check of its length and characters.

    Raises:
        InputError: the form is too long, or has half of a character (an unpaired surrogate).
    """
    if len(found.text) > MOST_CHARACTERS:
        raise InputError(
            f"The {NAMES[found.kind]} has {len(found.text)} characters, and there may be {MOST_CHARACTERS}. Shorten it."
        )
    try:
        found.text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The {NAMES[found.kind]} has half of a character.") from error
    return found


NAMES = cast(
    "Mapping[Kind, str]",
    {
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "choice",
        "grammar": "grammar",
        "lark": "description of tools",
    },
)
"""Kinds as messages name them."""


FinishReason = Literal["stop", "length", "repetition", "cancelled", "error"]


_SAMPLING_NAMES = {**{field.name: field.name for field in dataclasses.fields(SamplingParams)}, **SAMPLING_ELSEWHERE}


@renames(
    {
        **{name: f"`sampling=SamplingParams({own}=…)`" for name, own in _SAMPLING_NAMES.items()},
        **dict.fromkeys(("sampling_params", "generation_config"), "`sampling=SamplingParams(…)`"),
        **dict.fromkeys(("prompt_token_ids", "input_ids", "text", "inputs"), "`prompt`"),
        **dict.fromkeys(("stop_strings", "stop_sequences"), "`stop`"),
        **dict.fromkeys(("guided_decoding", "response_format"), "`structured_outputs`"),
        "ignore_eos": "`ignore_end`",
        "eos_token_id": "`stop_token_ids`",
        "lora_request": "`adapter`",
    }
)
@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt or a conversation, and how it is to be continued.

    Attributes:
        prompt: a text or token ids. A text is the user's message in the tokenizer's chat template, if there is one.
        messages: a conversation in place of a prompt, each message with ``role`` and ``content``.
        tools: functions of which the chat template tells the model, each ``{"type": "function", "function": {…}}``.
            They need messages, and a template that takes tools.
        raw: take the prompt's text as it is, without the chat template.
        chat_template_kwargs: more variables of the chat template, such as ``{"enable_thinking": False}``.
        add_generation_prompt: end the prompt with the beginning of the model's answer, as the chat template writes it.
        continue_final_message: end the prompt within the last message, whose text the model goes on with.
        chat: the prompt's token ids are a conversation in the form of the chat template, as messages become anyway: the
            token with which the template ends an answer ends the text.
        sampling: how tokens are chosen, and how many.
        policy: the eviction policy or its string; by default the engine's.
        budget: tokens kept per layer and head; by default, and at most, the engine's.
        stop: texts that end the generation; they are not part of the result. The engine needs a tokenizer for them.
        stop_token_ids: more tokens that end the text, also with ``ignore_end``.
        include_stop_str_in_output: keep the stop text, or the token that ended the text, in the result's text.
        skip_special_tokens: leave special tokens out of the text.
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
        keep_prompt: whether the prompt stays in the slots while the answer is generated: ``True``, ``False``, or the
            share of the budget to which it is cut first; by default the engine's. See `BoundedCache`.
        guard: take the smallest of a quarter, half and all of the budget at which the prompt's cut loses at most this
            share of attention (`Result.lost_mass`), or all of it if none does; by default the engine's.
        snapshot: the memory that the prompt continues. Policy, budget and adapter are then by default the snapshot's.
        adapter: the name of an adapter that `kvkeep.load` has put into the model; by default the base model runs.
        cache_salt: a word; only requests with the same one share beginnings of prompts and memories of conversations.
        owner: whose conversation it is, in an engine with ``conversation_memory``. The prompt goes on from the memory
            of an earlier one of the same owner, if it begins with its tokens; ``""``: from none.
        keep_as: the name of the session that keeps the memory at the end, for later requests of the owner.
        noted_messages: the messages that the prompt's token ids stand for, as that session notes them.
        drops: tokens that leave the memory while the prompt is read, as pairs such as ``(90, [(20, 60)])``: once the
            first 90 tokens have been read, every head evicts those at positions 20 to 59.
        reposition: whether tokens behind those that are dropped move up, see `Session.drop`.
        return_memory: say in the result which tokens the memory holds at the end.

    Raises:
        InputError: there is nothing to continue, a value has another type, or a number is out of range.
        BudgetError: the budget is not a whole number of 1 or more.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    raw: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy: str | Policy | None = None
    budget: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_end: bool = False
    structured_outputs: Structured | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    sequence: int = 0
    pins: Sequence[Span] = ()
    keep_prompt: bool | int | float | None = None
    guard: float | None = None
    snapshot: Snapshot | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    owner: str = ""
    keep_as: str | None = None
    noted_messages: Sequence[Mapping[str, Any]] = ()
    drops: Sequence[tuple[int, Sequence[Span]]] = ()
    reposition: bool | None = None
    return_memory: bool = False

    def __post_init__(self) -> None:
        self._take_text()
        object.__setattr__(self, "pins", spans(self.pins))
        object.__setattr__(self, "drops", drops_of(self.drops))
        object.__setattr__(self, "guard", checked_guard(self.guard))
        object.__setattr__(self, "keep_prompt", checked_keep_prompt(self.keep_prompt))
        object.__setattr__(self, "stop", stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", stop_ids(self.stop_token_ids))
        object.__setattr__(self, "structured_outputs", structure_of(self.structured_outputs))
        object.__setattr__(self, "sequence", whole_within("sequence", self.sequence, -(2**63), 2**63 - 1))
        if not isinstance(self.sampling, SamplingParams):
            raise InputError(f"sampling={self.sampling!r} is no kvkeep.SamplingParams.")
        self._check_types()
        if self.budget is not None:
            object.__setattr__(self, "budget", budgets.check_one(self.budget))
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_within(name, count, 0, 100))
        if self.prompt_logprobs is not None and self.snapshot is not None:
            raise InputError(
                "`prompt_logprobs` needs the whole prompt to be read, and this request continues a snapshot."
            )

    def _check_types(self) -> None:
        """Refuse values of another type in fields that are used as they are.

        Raises:
            InputError: a value has another type.
        """
        for name in ("ignore_end", "include_stop_str_in_output", "skip_special_tokens", "return_memory"):
            if not isinstance(flag := getattr(self, name), bool):
                raise InputError(f"{name}={flag!r:.80} is neither True nor False.")
        if self.policy is not None and not isinstance(self.policy, str | Policy):
            raise InputError(f"policy={self.policy!r} is neither a policy nor the name of one.")
        if self.reposition is not None and not isinstance(self.reposition, bool):
            raise InputError(f"reposition={self.reposition!r:.80} is neither True, False nor None.")
        if not isinstance(self.owner, str):
            raise InputError(f"owner={self.owner!r:.80} is no text.")
        kinds = (("snapshot", Snapshot, "kvkeep.Snapshot"), ("adapter", str, "name of an adapter"))
        if self.keep_as is not None:
            check_name(self.keep_as)
        for name, kind, what in (*kinds, ("cache_salt", str, "text")):
            if (given := getattr(self, name)) is not None and not isinstance(given, kind):
                raise InputError(f"{name}={given!r:.80} is no {what}.")

    def replaced(self, **fields: object) -> Request:
        """Return a copy with other values of some fields, which have been checked already.

        `dataclasses.replace` would check all fields again; the engine fills a request in after that was done.
        """
        made = copy.copy(self)
        vars(made).update(fields)
        return made

    @property
    def templated(self) -> dict[str, Any]:
        """Return the arguments for `kvkeep.models.tokenization.encode_chat` that differ from their defaults."""
        found = {
            "chat_template_kwargs": self.chat_template_kwargs or None,
            "add_generation_prompt": None if self.add_generation_prompt else False,
            "continue_final_message": self.continue_final_message or None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _take_text(self) -> None:
        """Check the prompt or the messages, and what goes with each. Token ids become a tuple of Python integers, and
        messages and tools tuples of new dictionaries.

        Raises:
            InputError: there is neither a prompt nor messages, or both; the one given is empty or of another form; or
                a field is set that is for the other.
        """
        for name in ("raw", "chat", "add_generation_prompt", "continue_final_message"):
            if not isinstance(flag := getattr(self, name), bool):
                raise InputError(f"{name}={flag!r:.80} is neither True nor False.")
        object.__setattr__(self, "chat_template_kwargs", variables(self.chat_template_kwargs))
        if (self.prompt is None) == (self.messages is None):
            raise InputError("A request has either a prompt (text or token ids) or messages; give one of them.")
        if self.messages is not None:
            if self.raw:
                raise InputError("raw=True leaves the chat template out, and messages need it; give a prompt instead.")
            object.__setattr__(self, "messages", conversation(self.messages))
            object.__setattr__(self, "tools", functions(self.tools))
        elif self.templated:
            raise InputError(
                f"{min(self.templated)} is for messages, and this request has a prompt; give messages instead."
            )
        elif self.tools:
            raise InputError("tools are told by the chat template, and a prompt goes without; give messages instead.")
        elif not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", token_ids(self.prompt))
        elif not (self.prompt if self.raw else self.prompt.strip()):
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


@dataclass(frozen=True, eq=False)
class HeldTokens:
    """Which tokens a memory holds.

    Attributes:
        token_ids: all tokens that it has seen.
        positions: of the tokens that each layer holds, ``(Hk, used)``; ``-1``: an empty slot.
        pins: spans of positions that may not be evicted.
    """

    token_ids: Sequence[int] = ()
    positions: tuple[Tensor, ...] = ()
    pins: Spans = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], contents: Contents) -> HeldTokens:
        """Return which tokens a memory holds: the ids of all that it has seen, the positions that lie in its slots, as
        copies in main memory, and its pins.

        Args:
            token_ids: those of its text, which may have more than the memory has seen.
            contents: the memory.
        """
        layers = contents.layers
        positions = tuple(layer.positions.cpu() for layer in layers)
        return cls(token_ids[: contents.seen], positions, layers[0].pins if layers else ())


@dataclass(frozen=True)
class Result:
    """A finished request.

    Attributes:
        id: the number that `Engine.add` gave.
        token_ids: the new tokens, the end token included.
        text: the new tokens as text, without special tokens, a stop text, and the token that ended it, unless the
            request asks for them; empty without a tokenizer.
        finish_reason: ``stop`` (the model, a stop text or `Session.stop` ended it), ``length``, ``repetition`` (it
            repeated itself, see `SamplingParams`), ``cancelled``, or ``error`` (a step failed; the tokens before it
            are there).
        prompt_tokens: length of the prompt.
        logprobs: one entry per new token, if asked for.
        queued_s: time from the request's arrival until it got a row.
        ttft_s: time from the request's arrival to its first token, the queue included; ``None`` without a token.
        prefill_s: time from getting a row to the first token, ``ttft_s - queued_s``; ``None`` without a token.
        tpot_s: time per token after the first; ``None`` with fewer than two.
        error: the reason, if a step failed.
        memory_usage: bytes of its row at its end; zeros if it was cancelled or ended by an error.
        budget: tokens kept per layer and head: what the request asked for, or what its guard has chosen.
        lost_mass: the share of attention that evicted tokens carried; unknown if it was cancelled or ended by an error.
        guarded: whether the prompt's cut lost at most the guard; ``None`` without a guard, or if the loss is unknown.
        cached_tokens: tokens of the prompt that were not read again: a session's or a snapshot's, or a common
            beginning of prompts.
        prompt_logprobs: one entry per token of the prompt but the first, if asked for.
        end_token: whether the last token is one that ends a text, and no part of it.
        dropped_tokens: tokens of the conversation that were dropped from its memory on request.
        skipped_tokens: dropped tokens that the client has left out, so that they are no part of the prompt.
        read_anew: why the request does not go on from a memory of which its client has left out messages.
        memory: the tokens that its memory held at its end, if asked for; ``None``: the request ended without a row.
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
    memory_usage: MemoryUsage = field(default_factory=MemoryUsage)
    budget: int = 0
    lost_mass: LostMass = field(default_factory=LostMass)
    guarded: bool | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Logprob, ...] = ()
    end_token: bool = False
    dropped_tokens: int = 0
    skipped_tokens: int = 0
    read_anew: str = ""
    memory: HeldTokens | None = None


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
        prompt_tokens: length of the prompt; 0 in events without a token.
    """

    id: int
    token_id: int | None
    text: str
    result: Result | None = None
    logprob: Logprob | None = None
    read_tokens: int = 0
    prompt_tokens: int = 0


def last_result(events: Iterable[Event]) -> Result:
    """Take all events of a request, and return the result that the last one has."""
    *_, last = events
    assert last.result is not None
    return last.result


# The arguments of the engine's callers: requests, texts that become requests, and policies.

Asked: TypeAlias = "Request | str | Sequence[int] | Sequence[Mapping[str, Any]]"
"""A request, or what becomes one: a text, token ids, or the messages of a conversation."""


def request_of(asked: Any, sampling: SamplingParams | None = None) -> Request:
    """Return a request as it is, or make one of a text, token ids or messages.

    Args:
        asked: a request, or what becomes one.
        sampling: how tokens are chosen, for all but requests, which have their own.

    Raises:
        InputError: ``asked`` is none of these, or ``sampling`` is no `SamplingParams`.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InputError(
            f"The second argument is how tokens are chosen, and {type(sampling).__name__} is no kvkeep.SamplingParams. "
            "Several requests are given as one list: engine.generate([first, second])."
        )
    if isinstance(asked, Request):
        return asked
    chosen = SamplingParams() if sampling is None else sampling
    if isinstance(asked, Mapping):
        raise InputError(
            f"{asked!r:.80} is a single message, and a request is a text or a whole conversation. Give the list of its "
            "messages, or Request(messages=[...])."
        )
    # a tensor without an axis is a number, though it has an __iter__
    if isinstance(asked, bytes) or not isinstance(asked, Iterable) or getattr(asked, "ndim", None) == 0:
        raise InputError(
            f"{asked!r:.80} is no text and no kvkeep.Request; give a text, Request(messages=[...]), or token ids as "
            "Request(prompt=ids)."
        )
    if isinstance(asked, Sequence) and len(asked) > 0 and isinstance(asked[0], Mapping):
        return Request(messages=asked, sampling=chosen)
    return Request(prompt=cast("str | Sequence[int]", asked), sampling=chosen)


def turn_of(asked: Any, sampling: SamplingParams | None) -> Request:
    """Return a session's turn as a request. Refuse fields that the session decides, such as the policy.

    Raises:
        InputError: ``asked`` is nothing that `request_of` takes, or names a policy, budget, sequence, snapshot, adapter
            or drops, or what belongs to a whole conversation (`Request.templated`, but for ``chat_template_kwargs``).
    """
    request = request_of(asked, sampling)
    if request.drops:
        raise InputError("A session drops tokens with session.drop(...), and a turn names none. Leave `drops` out.")
    own = request.policy, request.budget, request.snapshot, request.adapter, request.sequence
    if own != (None, None, None, None, 0):
        raise InputError(
            "A session has its policy, budget, sequence, snapshot and adapter from engine.session(...); a turn names "
            "none."
        )
    if whole := request.templated.keys() - {"chat_template_kwargs"}:
        raise InputError(
            f"{min(whole)} belongs to a whole conversation, and a session's turn adds new messages. Leave it out, or "
            "send the conversation without a session."
        )
    return request


def listed(asked: object) -> Iterable[Any]:
    """Return an iterable of requests and texts itself; a single request or text becomes a list of one.

    Raises:
        InputError: ``asked`` is neither a text, nor a request, nor an iterable.
    """
    if isinstance(asked, str | Request):
        return [asked]
    if isinstance(asked, Mapping | bytes) or not isinstance(asked, Iterable):
        raise InputError(
            f"{type(asked).__name__} is no list of requests; give texts, conversations such as "
            "Request(messages=[...]), or other kvkeep.Requests."
        )
    return asked


def check_numbers(budget: object, **others: object) -> None:
    """Check a budget and other numbers of tokens, rows or bytes, each under its argument's name; skip ``None``.

    Raises:
        BudgetError: a number is not an integer, is below 1, or is more than any memory holds.
    """
    budgets.check_one(budget)
    for name, number in others.items():
        if number is not None:
            budgets.check_one(number, name)


def usable(policy: object) -> Policy:
    """Return a policy, parsed if it is a string, after checking that its instances compare and hash by their options.

    Raises:
        PolicyError: ``policy`` is no policy, or cannot be compared or hashed, which decides whether requests share
            rows.
    """
    found = parse(policy) if isinstance(policy, str) else policy
    if not isinstance(found, Policy):
        raise PolicyError(f"{policy!r:.80} is neither a policy nor the name of one.")
    try:
        # the engine groups rows by policy, so equal policies must compare as equal
        tells = hash(found) is not None and found == found
    except Exception:  # a class may raise anything there
        tells = False
    fields = {field.name for field in dataclasses.fields(found)}
    # what is no option may decide without being compared, and two policies would count as one
    others = {name for name in vars(found).keys() - fields if not _is_remembered(type(found), name)}
    if not tells or others:
        raise PolicyError(
            f"Policies of {type(found).__name__} cannot be told apart by their options. Make the class a frozen "
            "dataclass whose fields are numbers, texts or tuples: @dataclass(frozen=True, kw_only=True)."
        )
    return found


def _is_remembered(kind: type, name: str) -> bool:
    """Return whether an attribute is a cached property, so that its value follows from the options."""
    return isinstance(inspect.getattr_static(kind, name, None), cached_property)

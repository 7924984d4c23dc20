"""The model that is served: its name, its engine, and its tokenizer."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import HeldTokens
from kvkeep.errors import InputError
from kvkeep.models import tokenization
from kvkeep.models.chat_templates import fill, reads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.message_tokens import message_spans, message_starts, system_places
from kvkeep.models.special_tokens import added_tokens
from kvkeep.openai.messages import BY_WORDS, HERMES, TOOL_FORMS, ToolForm, ToolUse
from kvkeep.openai.requests import Prompt
from kvkeep.pins import Spans, from_start
from kvkeep.policies.base import Policy


@dataclass(frozen=True)
class ServedModel:
    """A model, ready to answer.

    Attributes:
        engine: runs it.
        checkpoint: its configuration and tokenizer.
        created: seconds since 1970 at which it was loaded.
        longest: the most tokens of a prompt; ``None``: no limit.
        tool_use: how it uses tools.
    """

    engine: Engine
    checkpoint: Checkpoint
    created: int = field(default_factory=lambda: int(time.time()))
    longest: int | None = None
    tool_use: ToolUse = BY_WORDS

    @property
    def max_model_len(self) -> int | None:
        """Return the number of positions that the model was trained for; ``None`` if unknown. It is no limit of the
        server.
        """
        return self.checkpoint.trained_length

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens in the model's vocabulary."""
        size: int = self.checkpoint.config.get_text_config(decoder=True).vocab_size
        return size

    @functools.cached_property
    def longest_token(self) -> int:
        """Return the number of characters of the vocabulary's longest token, by which `encode` refuses long texts
        unread.
        """
        return max(map(len, self.checkpoint.tokenizer.get_vocab()))

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
        bounded: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt. A text and messages go through the chat template; token ids are only
        checked.

        Args:
            prompt: a text, token ids, or messages, one at least.
            tools: functions of which the chat template tells the model.
            raw: take a text as it is, without the chat template.
            bounded: refuse a text or messages that are too long by their characters alone, before they are tokenized.
                Tokens are not counted.
            template: more arguments of `kvkeep.models.tokenization.encode_chat`, or of `encode` for a text.

        Raises:
            KVKeepError: the prompt cannot be encoded, or is too long at a glance.
        """
        if bounded:
            self._check_length(prompt)
        if isinstance(prompt, str):
            plain: list[int] = tokenization.encode(self.checkpoint, prompt, raw=raw, **(template or {}))[0].tolist()
            return plain
        # a list has entries of one kind; the filters are for type checkers
        if isinstance(prompt[0], int):
            return self.known([token for token in prompt if isinstance(token, int)])
        messages = [message for message in prompt if isinstance(message, dict)]
        how = template or {}
        # of these arguments a text knows only this one
        plain_text = self.checkpoint.tokenizer.chat_template is None and not how.keys() - {"add_special_tokens"}
        if plain_text and len(messages) == 1 and messages[0]["role"] == "user":
            # as everywhere in kvkeep, a text without a template
            return self.encode(messages[0]["content"], bounded=bounded, template=how)
        chat: list[int] = tokenization.encode_chat(self.checkpoint, messages, tools, **how)[0].tolist()
        return chat

    def message_pins(
        self,
        prompt: Prompt,
        places: Collection[int] | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> Spans:
        """Return the spans of a conversation's tokens that are some of its messages; ``()`` without a chat template, or
        without such messages. With the first message, they begin at position 0.

        Args:
            prompt: messages; a text or token ids have no spans.
            places: indexes of the messages; ``None``: the system's.
            tools: functions of which the chat template tells the model.
            template: more arguments of `kvkeep.models.tokenization.encode_chat`.

        Raises:
            InputError: see `kvkeep.models.message_tokens.message_spans`; or there is no such message, or special tokens
                are added before the template's.
        """
        messages = [] if isinstance(prompt, str) else [message for message in prompt if isinstance(message, dict)]
        chosen = system_places(messages) if places is None else sorted({_place(place, messages) for place in places})
        given = dict(template or {})
        if not chosen or self.checkpoint.tokenizer.chat_template is None:
            return ()
        if given.pop("add_special_tokens", False):  # spans are found in what the template writes, where these are not
            raise InputError("add_special_tokens moves the tokens of messages, so these cannot be pinned by index.")
        variables = {**given.pop("chat_template_kwargs", {}), **given}
        if variables.pop("continue_final_message", False):  # the prompt then ends within a message, before any answer
            variables["add_generation_prompt"] = False
        found = message_spans(self.checkpoint, messages, chosen, tools, variables)
        # with what the template writes before it: fused steps know of pins at the beginning only
        return from_start(found) if chosen[0] == 0 else found

    def message_starts(
        self,
        messages: Sequence[Mapping[str, Any]],
        places: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> dict[int, int]:
        """Return how many of a conversation's tokens come before some of its messages: index → tokens. An index is left
        out where the chat template does not tell it.

        Args:
            messages: the conversation.
            places: the indexes; ``len(messages)`` is the answer that follows.
            tools: functions of which the chat template tells the model.
            template: more arguments of `kvkeep.models.tokenization.encode_chat`.

        Raises:
            InputError: see `kvkeep.models.message_tokens.message_starts`; or there is no chat template, or special
                tokens are added before it.
        """
        given = dict(template or {})
        if self.checkpoint.tokenizer.chat_template is None or given.pop("add_special_tokens", False):
            raise InputError("Messages are dropped by what the chat template alone writes, so they cannot be here.")
        variables = {**given.pop("chat_template_kwargs", {}), **given}
        return message_starts(self.checkpoint, messages, places, tools, variables)

    def can_pin(self, pins: Spans, *, policy: str | Policy | None, budget: int | None, share: float) -> bool:
        """Return whether the engine can pin tokens: they take at most the share ``share`` of the budget, and the policy
        evicts tokens and can keep these. For ``None``, the engine's own policy and budget count.

        Raises:
            KVKeepError: there is no such policy, or the budget is out of range.
        """
        return self.engine.can_pin(pins, policy=policy, budget=budget, share=share)

    def reads(self, variable: str) -> bool:
        """Return whether the model's chat template reads a variable of this name."""
        return reads(self.checkpoint.tokenizer, variable)

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse a text or messages that have more characters than the server's longest prompt could, were each token
        the longest one; so that the slow tokenizer does not see them.

        Check nothing without a limit of the server; token ids pass.

        Raises:
            InputError: there are more.
        """
        if self.longest is None:
            return
        texts = (
            [prompt]
            if isinstance(prompt, str)
            else [message.get("content") or "" for message in prompt if isinstance(message, dict)]
        )
        characters, most = sum(map(len, texts)), self.longest * self.longest_token
        if characters > most:
            raise InputError(
                f"This server takes {self.longest} tokens, which are at most {most} characters; the prompt has "
                f"{characters}. Shorten the prompt."
            )

    def known(self, ids: Sequence[int]) -> list[int]:
        """Return token ids as a list, after a check that each is in the model's vocabulary.

        Raises:
            InputError: a token is not in the vocabulary.
        """
        size = self.vocabulary
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise InputError(f"The prompt has token {wrong}, and the model knows 0 to {size - 1}.")
        return list(ids)

    def text_of(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids, with special tokens unless ``special`` is false."""
        return str(self.checkpoint.tokenizer.decode(list(ids), skip_special_tokens=not special))

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """Return what decodes single tokens, for log-probabilities; made once, since it remembers tokens."""
        return TokenTexts(self.checkpoint.tokenizer)

    def shown(self, memory: HeldTokens, budget: int) -> dict[str, Any]:
        """Return what a memory holds as the API shows it: each position that any head of any layer holds, the share of
        all those heads that hold it, and its token's text; with the pins, and the number of tokens seen.

        It takes as long as decoding all held tokens, so call it in a thread.

        Args:
            memory: the memory.
            budget: its budget, which is only shown.
        """
        ids, heads = memory.token_ids, sum(len(layer) for layer in memory.positions)
        # torch joins no empty list, and before its first turn a session has no layers
        held = torch.cat([layer.flatten() for layer in memory.positions] or [torch.empty(0, dtype=torch.long)])
        positions, counts = held[held >= 0].unique(return_counts=True)
        # each behind the token that stood before it in the text: a token's text may depend on it
        texts = (
            self.token_texts.after(ids[position - 1] if position else None, ids[position])
            for position in positions.tolist()
        )
        return {
            "seen_tokens": len(ids),
            "budget": budget,
            "heads": heads,
            "positions": positions.tolist(),
            "shares": [round(count / heads, 4) for count in counts.tolist()],
            "texts": list(texts),
            "pins": [list(span) for span in memory.pins],
        }


def _place(place: int, messages: Sequence[object]) -> int:
    """Return the index of a message, counted from the first one also where it was given negative, from the end.

    Raises:
        InputError: there is no such message.
    """
    if not -len(messages) <= place < len(messages):
        raise InputError(f"There is no message {place} to pin: the conversation has {len(messages)}.")
    return place % len(messages)


# Which form of calls a model uses, found by a look at what its chat template writes.

AUTO = "auto"
_NAME = "kvkeep_probe"
_FUNCTION = {"name": _NAME, "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
# Mistral's templates refuse an id that has not nine letters and digits
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": {"probe": 1}}}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
_CALLED: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "1"},
]


def tool_use_of(checkpoint: Checkpoint, name: str = AUTO) -> ToolUse:
    """Find out how a model calls tools, from what its chat template writes for a probe conversation.

    Args:
        checkpoint: its tokenizer has the chat template.
        name: the form, one of `TOOL_FORMS`, or ``auto``: the form in which the template writes calls, or else Hermes'.

    Returns:
        The form, with the token of its mark. It is one by template only if the template writes calls in this form and
        tells the model of tools; otherwise the model is told in the form's own words.

    Raises:
        InputError: there is no such form.
    """
    if name != AUTO and name not in TOOL_FORMS:
        raise InputError(f"tool_form={name:.40} is none of {', '.join((AUTO, *TOOL_FORMS))}.")
    told, called = (_filled(checkpoint, messages) for messages in (_ASKED, _CALLED))
    written = next((form for form in TOOL_FORMS.values() if _writes(form, called)), None)
    form = (written or HERMES) if name == AUTO else TOOL_FORMS[name]
    return ToolUse(form, form is written and _NAME in told, _token(checkpoint, form))


def _filled(checkpoint: Checkpoint, messages: list[dict[str, Any]]) -> str:
    """Return the text that the chat template makes of a conversation with the probe's tool; empty if there is no
    template, or it fails with tools.
    """
    if checkpoint.tokenizer.chat_template is None:
        return ""
    try:
        return fill(checkpoint.tokenizer, messages, _TOOLS)
    except InputError:  # a template that fails with tools has no form for them
        return ""


def _writes(form: ToolForm, text: str) -> bool:
    """Return whether a text contains a call of the probe's tool as this form writes calls, with the mark only where the
    form needs it.
    """
    marks = [form.mark] if form.needs_mark else [""]
    return any(f"{mark}{begin}{_NAME}{form.middle}{{" in text for mark in marks for begin in form.opens)


def _token(checkpoint: Checkpoint, form: ToolForm) -> int | None:
    """Return the id of the special token with which calls of this form begin, so that texts do not show it; ``None`` if
    the model has no such special token, or if the mark stands between two calls as well.
    """
    # texts of answers do not show special tokens, and what stands between two calls is read from the text
    if form.next is not None and form.mark in form.next:
        return None
    added = added_tokens(checkpoint.tokenizer).items()
    return next((token for token, text in added if text.special and text.content == form.mark), None)

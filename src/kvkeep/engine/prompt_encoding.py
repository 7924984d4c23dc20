"""The token ids and messages that a memory stands for, and the token ids of the requests that go on from it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from kvkeep.engine.drops import Drops, dropped, drops_of
from kvkeep.engine.request import Request, conversation
from kvkeep.engine.sampling_params import whole_within
from kvkeep.errors import InputError, SnapshotError
from kvkeep.models import chat_templates, tokenization
from kvkeep.models.chat_templates import control_tokens
from kvkeep.models.checkpoint import Checkpoint, Model, Tokenizer
from kvkeep.models.message_tokens import message_starts
from kvkeep.models.tokenization import Opening, opened, opening_of, unused_mark
from kvkeep.pins import Span, Spans, spans
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.snapshot import Snapshot, SnapshotAbout

_LARGEST = 2**31 - 1  # token id: files hold them in 32 bits
_MOST_NEW = 64
"""Messages of a turn whose tokens are told apart: the template is filled in once for each, while others wait."""


@dataclass(frozen=True)
class ConversationHistory:
    """The part of a sequence that a request continues.

    Attributes:
        ids: the token ids that the memory stands for.
        pending: token ids that follow, and that the model has not read: usually the last token of an answer.
        messages: the conversation that they are, ending with an answer; empty if they are something else.
        opening: set while they end inside of the user's first message, see `kvkeep.models.tokenization`.
        pins: the spans that its memory holds pinned.
        budgets: the budget of its memory in each layer; a tuple where heads have their own.
        shortest: the fewest tokens to which its memory can be cut back; ``None``: not at all, or not known.
        drops: tokens that have left its memory on request.
        starts: the number of tokens before each message, -1 where the template does not tell; ``()``: not known at all.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    pending: tuple[int, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    opening: Opening | None = None
    pins: Spans = ()
    budgets: tuple[int | tuple[int, ...], ...] = ()
    shortest: int | None = None
    drops: Drops = ()
    starts: tuple[int, ...] = ()

    @property
    def dropped(self) -> Spans:
        """Return the spans of positions of all tokens that have left the history's memory because a client said so."""
        return dropped(self.drops)

    def held_in(self, contents: Contents) -> ConversationHistory:
        """Return a copy of the history with the pins and the layers' budgets that ``contents``, its memory, has."""
        layers = contents.layers
        return replace(self, pins=layers[0].pins if layers else (), budgets=tuple(layer.budget for layer in layers))

    @classmethod
    def of(cls, snapshot: Snapshot) -> ConversationHistory:
        """Return the history of a snapshot: its tokens, and the messages that a session has noted in it.

        Raises:
            SnapshotError: the token ids are not known, or the note was not written by a session.
        """
        if snapshot.tokens is None:
            raise SnapshotError(
                "The snapshot does not say which tokens it stands for, and the engine counts them. Give their ids when "
                "you take it: cache.snapshot(row, tokens=ids)."
            )
        return cls._noted(snapshot.tokens, snapshot.note).held_in(snapshot.contents)

    @classmethod
    def described(cls, about: SnapshotAbout) -> ConversationHistory:
        """Return the history of a snapshot that lies in a file, from what the beginning of the file says of it.

        Raises:
            SnapshotError: see `of`.
        """
        if about.tokens is None:
            raise SnapshotError("The file does not say which tokens it stands for.")
        return replace(cls._noted(about.tokens, about.note), pins=about.pins, budgets=about.budgets)

    @classmethod
    def _noted(cls, tokens: torch.Tensor, note: Mapping[str, Any]) -> ConversationHistory:
        """Return the history of these tokens, with all that a session has noted beside them: messages, tokens that are
        not read yet, drops and so on, but without pins and budgets.

        Raises:
            SnapshotError: the note was not written by a session.
        """
        ids = array("i", tokens.tolist())
        try:
            pending = tuple(whole_within("pending", token, 0, _LARGEST) for token in note.get("pending", ()))
            messages = conversation(note["messages"]) if note.get("messages") else ()
            opening = opening_of(note["opening"]) if note.get("opening") is not None else None
            shortest = note.get("shortest")
            shortest = None if shortest is None else whole_within("shortest", shortest, 0, len(ids))
            drops = drops_of(note.get("drops", ()))
            starts = tuple(whole_within("starts", start, -1, _LARGEST) for start in note.get("starts", ()))
            if (drops and drops[-1].after > len(ids)) or len(starts) not in (0, len(messages)):
                raise InputError("its drops or its messages do not fit its tokens.")
        except (InputError, TypeError, AttributeError) as error:
            raise SnapshotError(
                "The snapshot's note is none that a session writes. Take the snapshot again."
            ) from error
        return cls(ids, pending, messages, opening, shortest=shortest, drops=drops, starts=starts)

    def spans_of(self, places: Iterable[int]) -> Spans:
        """Return the spans of the tokens of messages, with those by which the template begins and ends each.

        Args:
            places: indexes of messages; -1 is the last one.

        Raises:
            InputError: there is no such message, it is not known which tokens are its own, or it is the last answer,
                which the model has not read to its end.
        """
        found, total = list[Span](), len(self.messages)
        for place in places:
            if isinstance(place, bool) or not isinstance(place, int) or not -total <= place < total:
                raise InputError(f"There is no message {place!r:.40} to drop: the conversation has {total}.")
            at = place % total
            if at == total - 1:
                raise InputError(
                    f"Message {at} is the last answer, and its end is read with the next turn. Drop it after that "
                    "turn, or take the turn back."
                )
            start, stop = self.starts[at : at + 2] if self.starts else (-1, -1)
            if min(start, stop) < 0:
                raise InputError(
                    f"It is not known which tokens are those of message {at} alone: the chat template writes it "
                    "together with others, messages that were left out came before it, or an earlier version has "
                    "saved it. Give spans of tokens instead."
                )
            found.append((start, stop))
        return spans(found)

    @property
    def tokens(self) -> torch.Tensor:
        """Return the ids of the tokens in the memory, as a tensor."""
        return torch.tensor(self.ids, dtype=torch.int32)

    @property
    def note(self) -> dict[str, Any]:
        """Return what a snapshot notes beside its tokens, as a mapping for JSON: pending tokens and messages, and of
        the other fields those that are set. Pins and budgets are not among them, since the memory has them.
        """
        found: dict[str, Any] = {"pending": list(self.pending), "messages": list(map(dict, self.messages))}
        found |= {} if self.shortest is None else {"shortest": self.shortest}
        found |= {"drops": [[drop.after, list(map(list, drop.spans))] for drop in self.drops]} if self.drops else {}
        found |= {"starts": list(self.starts)} if self.starts else {}
        return found if self.opening is None else {**found, "opening": asdict(self.opening)}


# Texts and conversations of requests as token ids.


class PromptEncoder:
    """Turns the texts of requests into token ids.

    Args:
        model: the model, attached.
        tokenizer: the engine's, if it has one.
        limit: the number of positions that the model has learned, if it is limited.
        ends: tokens that end a text.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, limit: int | None, ends: Collection[int] = ()
    ) -> None:
        self._model, self._tokenizer, self._limit, self._ends = model, tokenizer, limit, frozenset(ends)

    @functools.cached_property
    def turn_ends(self) -> frozenset[int]:
        """Return the tokens with which the chat template ends an answer."""
        return frozenset() if self._tokenizer is None else chat_templates.turn_ends(self._tokenizer)

    @functools.cached_property
    def turn_starts(self) -> frozenset[int]:
        """Return the control tokens of the tokenizer that do not end a turn: those with which messages may begin."""
        return frozenset() if self._tokenizer is None else frozenset(control_tokens(self._tokenizer)) - self.turn_ends

    def is_chat(self, request: Request) -> bool:
        """Return whether a request's prompt is, or becomes, a conversation in the form of the chat template; ``False``
        if the tokenizer has none.
        """
        if getattr(self._tokenizer, "chat_template", None) is None:
            return False
        return request.chat or request.messages is not None or (isinstance(request.prompt, str) and not request.raw)

    def ids_of(self, request: Request) -> tuple[int, ...]:
        """Return the token ids of a request.

        Texts go through the chat template unless ``raw``; token ids are returned as they are.

        Raises:
            InputError: there is no tokenizer or no chat template, or the template fails.
        """
        if request.messages is None and not isinstance(request.prompt, str):
            return tuple(cast(Sequence[int], request.prompt))
        checkpoint = self._checkpoint(request)
        if isinstance(request.prompt, str):
            ids = tokenization.encode(checkpoint, request.prompt, raw=request.raw)
        else:
            ids = tokenization.encode_chat(checkpoint, request.messages or (), request.tools, **request.templated)
        return tuple(ids[0].tolist())

    def opened(self, asked: str, *, system: str | None, raw: bool) -> tuple[list[int], Opening]:
        """Return the token ids of a text about which questions will be asked, and the place in the chat template where
        they go on.
        """
        # a request only for the error, which names what needs a tokenizer
        return opened(self._checkpoint(Request(prompt=asked)), asked, system=system, raw=raw)

    def continued(self, request: Request, past: ConversationHistory) -> tuple[int, ...]:
        """Return the token ids of a history followed by those of the request that continues it.

        The past stays as it is, also if the chat template would now write earlier turns in another way. The template
        decides how the last answer is closed: an end token that the model has not read gives way to that.

        Raises:
            InputError: see `ids_of`; or the request is a conversation, and the template does not show its last answer.
        """
        before = (*past.ids, *past.pending)
        if not before:
            return self.ids_of(request)
        if request.messages is None and not isinstance(request.prompt, str):
            return before + self.ids_of(request)
        checkpoint = self._checkpoint(request)
        if past.opening is not None:
            question, more = question_of(request, past.opening)
            return before + tuple(past.opening.rest(checkpoint, question, past.ids, more))
        new = self.messages_of(request)
        if not new:  # a text without the chat template
            return before + tuple(tokenization.encode_rest(checkpoint, cast(str, request.prompt))[0].tolist())
        ids = tuple(
            tokenization.encode_next(checkpoint, past.messages, new, request.tools, **request.templated)[0].tolist()
        )
        return before[: self._kept(past)] + ids

    def _kept(self, past: ConversationHistory) -> int:
        """Return how many tokens of a history stay when messages follow: all but an end token that was not read."""
        n = len(past.ids) + len(past.pending)
        # the new ids begin with the end of the last answer, as the template writes it
        ended = past.messages and past.pending and past.pending[-1] in self._ends | self.turn_ends
        return n - 1 if ended else n

    def starts_of(self, request: Request, past: ConversationHistory) -> tuple[int, ...]:
        """Return the number of tokens before each message that a request adds to a history, and before its answer.

        -1 where the template does not tell; ``()`` if nothing is known, as of a turn of very many messages.
        """
        new, known = self.messages_of(request, past), len(past.starts) == len(past.messages)
        if len(new) > _MOST_NEW or not new or not known or past.opening is not None or (past.ids and not past.messages):
            return ()
        checkpoint = self._checkpoint(request)
        variables = {**request.chat_template_kwargs, "add_generation_prompt": request.add_generation_prompt}
        try:
            # the past stays as it was read, so only what the template writes behind the last answer is counted
            if past.messages:
                mark = unused_mark((*past.messages, *new), "answer")
                shown = (*past.messages[:-1], {**past.messages[-1], "content": mark}, *new)
                base = self._kept(past)
            else:
                mark, shown, base = "", new, 0
            places = range(len(past.messages), len(shown) + 1)
            found = message_starts(checkpoint, shown, places, request.tools, variables, after=mark)
        except InputError:  # the turn itself says what is wrong with its template
            return ()
        return tuple(base + found[place] if place in found else -1 for place in places)

    def messages_of(self, request: Request, past: ConversationHistory | None = None) -> tuple[Mapping[str, str], ...]:
        """Return the messages that a request adds to a conversation, a text as the user's message; an empty tuple for
        token ids, or for a text without the chat template.

        Args:
            request: the request.
            past: what it continues. The first question about a remembered text is one message with that text.
        """
        if past is not None and past.opening is not None and (request.messages or isinstance(request.prompt, str)):
            question, more = question_of(request, past.opening)  # raw or not: it refuses what cannot follow the text
            return () if past.opening.raw else (*past.opening.messages(question), *more)
        if request.messages is not None:
            return tuple(request.messages)
        if not isinstance(request.prompt, str) or request.raw:
            return ()
        has_template = getattr(self._tokenizer, "chat_template", None) is not None
        return ({"role": "user", "content": request.prompt},) if has_template else ()

    def _checkpoint(self, request: Request) -> Checkpoint:
        """Return the tokenizer with the model's configuration; refuse if there is no tokenizer.

        Raises:
            InputError: there is no tokenizer.
        """
        if self._tokenizer is None:
            what = "messages need" if request.prompt is None else "a text needs"
            raise InputError(
                f"The engine has no tokenizer, and {what} one: make it with Engine(model, tokenizer), or give token "
                "ids as the prompt."
            )
        name = getattr(self._tokenizer, "name_or_path", None) or type(self._tokenizer).__name__
        return Checkpoint(name, self._model.config, self._tokenizer, self._limit, allow_pickle=False)


def question_of(request: Request, opening: Opening) -> tuple[str, tuple[Mapping[str, str], ...]]:
    """Return the question that a request asks about a remembered text, and the messages that follow the question.

    Raises:
        InputError: the request cannot follow such a text.
    """
    if request.messages is None:
        if request.raw and not opening.raw:
            raise InputError(
                "The memory was made with the chat template, so `raw=True` has no place. Leave it out, or remember "
                "the text with `raw=True`."
            )
        return cast(str, request.prompt), ()
    first, *more = request.messages
    if opening.raw or first["role"] != "user":
        why = "without the chat template" if opening.raw else "as the beginning of the user's first message"
        raise InputError(f"The memory holds a text {why}, so it is followed by a prompt, not by these messages.")
    return first["content"], tuple(more)

"""The tokens of single messages within a conversation, found through the chat template and the tokenizer's offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

from kvkeep.errors import InputError
from kvkeep.models.chat_templates import SYSTEM_ROLES, EndlessTemplateError, fill
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.files import explained
from kvkeep.models.special_tokens import special_tokens_of
from kvkeep.pins import Span, Spans, spans

_MARK = "kvkeepsystemmessage"
_CLOSING = 64
"""Characters behind the text of a message within which its end is looked for."""


def system_spans(checkpoint: Checkpoint, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Spans:
    """Return the positions of a prompt's tokens that hold the text of its system messages, as spans (first, one past
    the last); ``()`` if there are none.

    Args:
        checkpoint: the model and its tokenizer.
        prompt: a conversation; a text or token ids have no system message.

    Raises:
        InputError: see `message_spans`.
    """
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return ()
    messages = cast(Sequence[Mapping[str, str]], prompt)
    return message_spans(checkpoint, messages, system_places(messages))


def system_places(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indexes of the system messages of a conversation."""
    return [i for i, message in enumerate(messages) if message["role"] in SYSTEM_ROLES]


def message_spans(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    places: Collection[int],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Spans:
    """Return the spans (first, one past the last) of a conversation's tokens that hold the text of some of its
    messages, in order; spans that touch are one.

    The template is filled in once more with a mark in the place of each such message; the text before and after the
    mark shows where the message stands.

    Args:
        checkpoint: the model and its tokenizer.
        messages: the conversation.
        places: the indexes of the messages.
        tools: functions of which the template tells the model.
        variables: more variables of the template.

    Raises:
        InputError: the template fails, or does not show a message in one piece; or the tokenizer does not tell where
            its tokens stand.
    """
    if not places:
        return ()
    show = partial(fill, checkpoint.tokenizer, tools=tools, variables=variables)
    text = show(messages)
    offsets = _offsets(checkpoint, text)
    return spans([_tokens(offsets, _place(checkpoint, show, text, messages, i)) for i in places])


def _place(
    checkpoint: Checkpoint,
    show: Callable[[Sequence[Mapping[str, Any]]], str],
    text: str,
    messages: Sequence[Mapping[str, Any]],
    place: int,
) -> Span:
    """Return the characters of one message in a conversation's text, as a span (first, one past the last) of the text
    that the tokenizer reads, where quoted control tokens have their own characters again.

    Args:
        checkpoint: the model and its tokenizer.
        show: fills the template in.
        text: what it makes of the conversation.
        messages: the conversation.
        place: the index of the message.

    Raises:
        InputError: the template does not show the message in one piece.
    """
    mark = _MARK
    while any(mark in message["content"] for message in messages):  # the place of the mark must be the message's
        mark += "x"
    marked = [{**message, "content": mark} if i == place else dict(message) for i, message in enumerate(messages)]
    before, found, after = show(marked).partition(mark)
    stop = len(text) - len(after)
    # a template may repeat the message, change it, or let it change what stands around it
    whole = found and mark not in after and text.startswith(before) and text.endswith(after) and len(before) < stop
    special = special_tokens_of(checkpoint.tokenizer)
    role, content = messages[place]["role"], messages[place]["content"]
    told = content if role == "assistant" else special.quote(content)  # as `fill` does
    if not whole or text[len(before) : stop].strip() != told.strip():
        raise InputError(
            f"The chat template of {checkpoint.name} does not show the {role} message in one piece, so its tokens "
            "cannot be pinned."
        )
    read = special.renamed if special.is_quoted(text) else str
    return len(read(before)), len(read(text)) - len(read(after))


def _offsets(checkpoint: Checkpoint, text: str) -> list[Span]:
    """Return the characters of each token of a text, as spans (first, one past the last).

    Raises:
        InputError: the tokenizer does not know the characters.
        ModelFileError: the tokenizer fails.
    """
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        found = special_tokens_of(checkpoint.tokenizer).offsets(checkpoint.tokenizer, text)
    if not found:
        raise InputError(
            f"The tokenizer of {checkpoint.name} does not tell which characters its tokens hold, so a message's "
            "tokens cannot be pinned. It needs a tokenizer.json."
        )
    return [(int(start), int(stop)) for start, stop in found]


def _tokens(offsets: Sequence[Span], place: Span) -> Span:
    """Return the span of the tokens that overlap a span of characters; ``(0, 0)`` if none does."""
    inside = [i for i, (start, stop) in enumerate(offsets) if start < place[1] and stop > place[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


# Where messages begin: the template is filled in with the messages before each border alone.


def message_starts(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    places: Collection[int],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    after: str = "",
) -> dict[int, int]:
    """Return how many of a conversation's tokens come before each of some messages, by index. A message before which
    the template does not tell it is left out.

    A message takes all tokens up to the next one, those with which the template begins and ends it included.

    Args:
        checkpoint: the model and its tokenizer.
        messages: the conversation.
        places: the indexes of the messages; ``len(messages)`` is the answer that follows.
        tools: functions of which the template tells the model.
        variables: more variables of the template.
        after: a text that stands once in the filled template; only the tokens behind it count. 0 for messages that
            begin before it.

    Raises:
        InputError: the template fails, or the tokenizer does not tell where its tokens stand.
    """
    show = partial(fill, checkpoint.tokenizer, tools=tools)
    text = show(messages, variables=variables)
    closed = partial(show, variables={**(variables or {}), "add_generation_prompt": False})
    base = text.index(after) + len(after) if after else 0
    found = {place: _border(checkpoint, closed, text, messages, place) for place in places}
    borders = {place: max(base, border) for place, border in found.items() if border is not None}
    special = special_tokens_of(checkpoint.tokenizer)
    read = special.renamed if special.is_quoted(text[base:]) else str
    offsets = _offsets(checkpoint, text[base:])
    chars = {place: len(read(text[base:border])) for place, border in borders.items()}
    ends = list(accumulate((stop for _, stop in offsets), max))
    return {place: bisect_right(ends, at) for place, at in chars.items()}


def _border(
    checkpoint: Checkpoint,
    closed: Callable[[Sequence[Mapping[str, Any]]], str],
    text: str,
    messages: Sequence[Mapping[str, Any]],
    place: int,
) -> int | None:
    """Return how many characters of a conversation's text come before a message; ``None`` if the template writes the
    one before it in another way when messages follow, unless both are results of calls in one turn, or refuses it as
    the last one.

    Args:
        checkpoint: the model and its tokenizer.
        closed: fills the template in, without the beginning of an answer.
        text: what the template makes of the whole conversation.
        messages: the conversation.
        place: the index of the message.
    """
    try:
        before = _preamble(checkpoint, closed, messages[0]) if place == 0 else closed(messages[:place])
    except EndlessTemplateError:
        raise
    except InputError:
        return None
    if text.startswith(before):
        return len(before)
    shared = next((n for n, pair in enumerate(zip(text, before, strict=False)) if pair[0] != pair[1]), len(text))
    last = messages[place - 1]
    # templates may put results of calls that follow each other into one turn, and end it once
    grouped = place < len(messages) and last["role"] == messages[place]["role"] == "tool"
    shown = last["content"].strip() in text[max(0, shared - len(last["content"]) - _CLOSING) : shared]
    # with quoted control tokens, offsets would be those of another text
    if not (grouped and shown) or special_tokens_of(checkpoint.tokenizer).is_quoted(before):
        return None
    # what ends the turn may begin with the same letters as the next result
    return next((start for start, stop in _offsets(checkpoint, before) if start < shared < stop), shared)


def _preamble(
    checkpoint: Checkpoint, closed: Callable[[Sequence[Mapping[str, Any]]], str], first: Mapping[str, Any]
) -> str:
    """Return what the template writes before the first message, such as the token that begins a text; empty if it
    cannot be told.
    """
    token = getattr(checkpoint.tokenizer, "bos_token", None)
    once = closed([first])
    try:
        both = closed([first, first])
    except InputError:  # roles must alternate
        both = once
    # what a second message adds is a message without the beginning of a text
    again = both[len(once) :] if both.startswith(once) else ""
    if again and once.endswith(again):
        return once.removesuffix(again)
    return token if token and once.startswith(token) else ""

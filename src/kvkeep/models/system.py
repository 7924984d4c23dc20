"""The tokens of system messages within a conversation, found through the chat template and the tokenizer's offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvkeep.errors import InputError
from kvkeep.models.files import explained
from kvkeep.models.load import Checkpoint
from kvkeep.models.templates import fill
from kvkeep.pins import Span, Spans, spans

_MARK = "kvkeepsystemmessage"


def system_spans(checkpoint: Checkpoint, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Spans:
    """Return the spans of the tokens that hold the text of system messages, in `kvkeep.models.text.encode_chat`.

    The template is filled in once more with a mark in the place of each such message; the text before and after the
    mark shows where the message stands.

    Args:
        checkpoint: the model and its tokenizer.
        prompt: a conversation. In anything else, and without a system message, nothing is found.

    Raises:
        InputError: the template fails, or does not show a system message in one piece; or the tokenizer does not tell
            where its tokens stand.
    """
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return ()
    messages = cast(Sequence[Mapping[str, str]], prompt)
    places = [i for i, message in enumerate(messages) if message["role"] in ("system", "developer")]
    if not places:
        return ()
    text = fill(checkpoint.tokenizer, messages)
    offsets = _offsets(checkpoint, text)
    return spans([_tokens(offsets, _place(checkpoint, text, messages, i)) for i in places])


def _place(checkpoint: Checkpoint, text: str, messages: Sequence[Mapping[str, str]], place: int) -> Span:
    """Return the characters of a conversation's text that hold one message.

    Raises:
        InputError: the message is not there in one piece.
    """
    mark = _MARK
    while any(mark in message["content"] for message in messages):
        mark += "x"
    marked = [{**message, "content": mark} if i == place else dict(message) for i, message in enumerate(messages)]
    before, found, after = fill(checkpoint.tokenizer, marked).partition(mark)
    stop = len(text) - len(after)
    whole = found and mark not in after and text.startswith(before) and text.endswith(after) and len(before) < stop
    if not whole or text[len(before) : stop].strip() != messages[place]["content"].strip():
        raise InputError(
            f"The chat template of {checkpoint.name} does not show the system message in one piece, so its tokens "
            "cannot be pinned."
        )
    return len(before), stop


def _offsets(checkpoint: Checkpoint, text: str) -> list[Span]:
    """Return the characters of each token.

    Raises:
        InputError: the tokenizer does not know them.
    """
    options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True}
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        try:
            found = checkpoint.tokenizer(text, **options)["offset_mapping"]
        except (NotImplementedError, KeyError, TypeError):
            found = None
    if not found:
        raise InputError(
            f"The tokenizer of {checkpoint.name} does not tell which characters its tokens hold, so a system message's "
            "tokens cannot be pinned. It needs a tokenizer.json."
        )
    return [(int(start), int(stop)) for start, stop in found]


def _tokens(offsets: Sequence[Span], place: Span) -> Span:
    """Return the span of the tokens that hold some of these characters."""
    inside = [i for i, (start, stop) in enumerate(offsets) if start < place[1] and stop > place[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)

"""Messages that leave the memory of a chat, as a body names them: by their index, after another one was read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from kvkeep.engine.drops import Drop, Drops, drops_of
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import ParsedBody
from kvkeep.parameters import TRUNCATE_PROMPT_TOKENS
from kvkeep.pins import spans
from kvkeep.server.schemas import ChatBody, Generating

_INDEX = re.compile("-?[0-9]{1,9}", re.ASCII)
_MOST_PLACES = 512
"""Places between messages whose tokens are told apart: the template is filled in once for each."""


@runtime_checkable
class MessageFinder(Protocol):
    """What finds the tokens of messages."""

    def message_starts(
        self,
        messages: Sequence[Mapping[str, Any]],
        places: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> dict[int, int]:
        """Return how many of a conversation's tokens come before each of the messages ``places``, index → tokens; an
        index is left out where the chat template does not tell it.
        """


def message_drops(parameters: ParsedBody, body: Generating, served: MessageFinder) -> dict[str, Any]:
    """Return the options ``reposition`` and ``drops`` of an engine's request, made of ``reposition`` and
    ``drop_message`` of a chat's body: which tokens leave the memory after which, and whether those behind them move up
    (``None``: as the engine does). Without ``drop_message`` there are no ``drops``; a body that is no chat gets an
    empty dictionary.

    Args:
        parameters: the parameters of the body.
        body: the body.
        served: finds the tokens of messages.

    Raises:
        KVKeepError: there is no such message, it is dropped before it is read, or it is not known which tokens are its
            own.
    """
    if not isinstance(body, ChatBody):
        return {}
    total = len(body.messages or ())
    moves: bool | None = body.reposition if isinstance(body.reposition, bool) else None
    if isinstance(body.reposition, list) and body.reposition:
        # a list of messages asks that they move up, whichever these are, but each must exist
        moves = bool([_place(place, total, "reposition") for place in body.reposition])
    asked = _asked(body.drop_message, total)
    if not asked:
        return {"reposition": moves}
    if parameters.truncate is not None:
        raise ParameterError(TRUNCATE_PROMPT_TOKENS.name, "moves the tokens of messages, so these are not dropped")
    return {"reposition": moves, "drops": _drops(parameters, asked, total, served)}


def _drops(parameters: ParsedBody, asked: Mapping[int, Sequence[int]], total: int, served: MessageFinder) -> Drops:
    """Return which spans of a conversation's tokens are dropped, and after how many tokens, for the messages that a
    body names.

    Args:
        parameters: the parameters of the body.
        asked: index of a message → indexes of the messages that are dropped after it, as `_asked` returns them.
        total: messages of the body; one more, that tells of tools, may stand before them in the prompt.
        served: finds the tokens of messages.

    Raises:
        KVKeepError: all messages are named, messages at more than 512 places, or one of whose tokens it is not known
            which are its own.
    """
    messages = [message for message in parameters.prompts[0] if isinstance(message, dict)]
    told = int(len(messages) == total + 1 and messages[0]["role"] == "system")  # of tools, before all others
    if len(messages) != total + told:
        raise ParameterError("drop_message", "counts messages, and for this model some of them are written as one")
    dropped = {place for places in asked.values() for place in places}
    if len(dropped) == total:
        raise ParameterError(
            "drop_message", "names all messages: send a conversation without those that are not needed"
        )
    # messages that go together, one behind the other, are one span
    runs = {after: spans([(place, place + 1) for place in places]) for after, places in asked.items()}
    # the borders of what is dropped, and of what must be read before
    ends = {border for found in runs.values() for run in found for border in run} | {after + 1 for after in runs}
    if len(ends) > _MOST_PLACES:
        raise ParameterError(
            "drop_message",
            f"names messages at {len(ends)} places, and {_MOST_PLACES} are looked for: leave messages out of the body",
        )
    borders = sorted(told + border for border in ends)
    starts = served.message_starts(messages, borders, tools=parameters.described, template=parameters.template)
    if unknown := [border for border in borders if border not in starts]:
        place = unknown[0] - told
        raise ParameterError(
            "drop_message",
            f"cannot be followed: the chat template writes message {max(0, place - 1)} together with the one behind it",
        )
    return drops_of(
        [
            Drop(starts[told + after + 1], tuple((starts[told + first], starts[told + stop]) for first, stop in found))
            for after, found in runs.items()
        ]
    )


def _asked(given: Mapping[str, Sequence[int]] | Sequence[int] | None, total: int) -> dict[int, list[int]]:
    """Return which messages ``drop_message`` of a body drops after which: index of a message → indexes of those that
    are dropped once it is read, all counted from the first one. It is empty if none is dropped.

    Args:
        given: such a mapping, with negative indexes counted from the end, or only the messages that are dropped after
            the last one.
        total: messages of the body.

    Raises:
        ParameterError: there is no such message, or one is to be dropped before it is read.
    """
    if not given:
        return {}
    pairs: Mapping[str, Sequence[int]] = given if isinstance(given, Mapping) else {"-1": given}
    found: dict[int, list[int]] = {}
    for key, places in pairs.items():
        if not _INDEX.fullmatch(key):
            raise ParameterError("drop_message", f"has {key!r:.40}, which is no index of a message")
        after = _place(int(key), total, "drop_message")
        found.setdefault(after, []).extend(_place(place, total, "drop_message") for place in places)
        if (late := max(found[after], default=0)) > after:
            raise ParameterError("drop_message", f"drops message {late} after message {after}, before it is read")
    return {after: places for after, places in found.items() if places}


def _place(place: int, total: int, name: str) -> int:
    """Return the index of a message, counted from the first one also where it was given negative, from the end.

    Args:
        place: the index as it was given.
        total: messages of the conversation.
        name: the parameter, for errors.

    Raises:
        ParameterError: there is no such message.
    """
    if not -total <= place < total:
        raise ParameterError(name, f"names message {place}, and the conversation has {total}")
    return place % total

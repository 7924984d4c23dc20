"""Drops: tokens that leave a memory because a client says so, at a known place of its sequence."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from kvkeep.engine.sampling_params import whole_within
from kvkeep.errors import InputError
from kvkeep.pins import LAST, Span, Spans, common, count, end, spans, without


class Drop(NamedTuple):
    """Tokens that leave the memory of a sequence.

    Attributes:
        after: how many tokens the model has read when they leave.
        spans: their positions, all of them below ``after``.
    """

    after: int
    spans: Spans


Drops = tuple[Drop, ...]
"""Drops in the order of their places, of which no two have a position in common."""


def drops_of(given: object) -> Drops:
    """Return checked drops in the order of their places. Those at one place become one drop, each position belongs to
    the first drop that has it, and a drop without any position is left out.

    Raises:
        InputError: they are no pairs of a number and spans, or a span ends beyond the tokens read until then.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"drops={given!r:.60} are no list; give pairs of a number of tokens and spans of positions.")
    places = dict[int, list[Span]]()
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"The drop {pair!r:.60} is no pair of a number of tokens and spans of positions.")
        after, gone = whole_within("drops", pair[0], 1, LAST), spans(pair[1])
        if end(gone) > after:
            raise InputError(f"A drop after {after} tokens ends at position {end(gone)}: drop what was read by then.")
        places.setdefault(after, []).extend(gone)
    ordered = sorted(places)
    own = _first_owners([spans(places[after]) for after in ordered])
    return tuple(Drop(after, spans(gone)) for after, gone in zip(ordered, own, strict=True) if gone)


def _first_owners(several: Sequence[Spans]) -> list[list[Span]]:
    """Return, for each of several groups of spans, the spans of those of its positions that no earlier group has."""
    starts = sorted((start, owner, stop) for owner, own in enumerate(several) for start, stop in own)
    bounds = sorted({bound for own in several for span in own for bound in span})
    # between two bounds nothing changes; of the spans that are open there, the heap has the first owner's on top
    found, here, coming = [list[Span]() for _ in several], list[tuple[int, int]](), 0
    for first, last in pairwise(bounds):
        while coming < len(starts) and starts[coming][0] == first:
            heappush(here, starts[coming][1:])
            coming += 1
        while here and here[0][1] <= first:
            heappop(here)
        if here:
            found[here[0][0]].append((first, last))
    return found


def dropped(drops: Iterable[Drop]) -> Spans:
    """Return the spans of all positions that were dropped."""
    return spans([span for drop in drops for span in drop.spans])


def due(drops: Iterable[Drop], tokens: int) -> Spans:
    """Return the spans of all drops that have taken place once so many tokens were read: at that place or before it."""
    return dropped(drop for drop in drops if drop.after <= tokens)


def most_held(drops: Sequence[Drop], tokens: int) -> int:
    """Return the most tokens that a memory holds at once while so many are read, if nothing is evicted."""
    stops = [*(drop.after for drop in drops), tokens]  # a memory is fullest just before a drop, or at the end
    before = accumulate((count(drop.spans) for drop in drops), initial=0)
    return max(stop - gone for stop, gone in zip(stops, before, strict=True))


def check_drop(gone: Spans, *, read: int, dropped: int, pins: Spans) -> None:
    """Refuse a drop of pinned tokens, of tokens that were not read, and of everything.

    Args:
        gone: the positions, none of which was dropped before.
        read: how many tokens the model has read.
        dropped: how many of them were dropped before.
        pins: spans that may not be evicted.

    Raises:
        InputError: see above.
    """
    if end(gone) > read:
        raise InputError(
            f"The tokens up to position {end(gone)} are to be dropped, and the model has read {read}. The last token "
            "of an answer is read with the next turn."
        )
    if held := common(gone, pins):
        raise InputError(
            f"The tokens at positions {held[0][0]} to {held[0][1] - 1} are pinned. Pin others in place of them first, "
            "or leave them out of the drop."
        )
    if dropped + count(gone) >= read:
        raise InputError("Nothing would be left of the conversation. Begin a new one.")


# Messages that a client leaves out of a conversation.


class LeftOut(NamedTuple):
    """How a prompt goes on from a memory without some of its tokens.

    Attributes:
        spans: the positions in the memory that the prompt does not have.
        tokens: tokens of the memory that serve, those at these positions included.
        shared: tokens of the prompt that the memory has.
    """

    spans: Spans
    tokens: int
    shared: int


class Told(NamedTuple):
    """A message within the tokens of a conversation.

    Attributes:
        spans: its positions that were not dropped.
        ids: their tokens.
    """

    spans: Spans
    ids: array[int]


def told_apart(ids: Sequence[int], starts: Collection[int], gone: Spans = ()) -> tuple[Told, ...]:
    """Divide the tokens of a conversation into messages. Return them in order, each with the positions and ids of its
    tokens that were not dropped. A message of which all tokens were dropped is not among them.

    Args:
        ids: the tokens.
        starts: tokens of which each begins a message. What comes before the first one is a message, too.
        gone: positions that were dropped.
    """
    ids, found = array("i", ids), list[Told]()
    for start, stop in without(((0, len(ids)),), gone):
        bounds = [place for place in range(start + 1, stop) if ids[place] in starts]
        for first, last in pairwise((start, *bounds, stop)):
            here = Told(((first, last),), ids[first:last])
            if found and here.ids[0] not in starts:  # the rest of a message of which a part was dropped
                here = Told((*found[-1].spans, *here.spans), found.pop().ids + here.ids)
            found.append(here)
    return tuple(found)


def left_out(before: Sequence[Told], prompt: Sequence[Told]) -> LeftOut | None:
    """Return the positions of the messages of a memory that a prompt leaves out, how many tokens of the memory serve
    the prompt, and how many of the prompt's tokens these are. Return ``None`` if the prompt has not all other messages
    of the memory, in their order.

    The first message and the last answer are never left out. Of the answer the beginning is enough, since a template
    may write it in other tokens than it was drawn.

    Args:
        before: the messages of the memory, its last answer at the end.
        prompt: those of the prompt, without its last token: one is left to read.
    """
    # fewer than two are no first message and answer
    if len(before) < 2 or len(prompt) < 2 or before[0].ids != prompt[0].ids:
        return None
    *others, answer = before
    # the last answer is one of the messages that are found in order, or the one behind them
    there = 1 + _in_order([message.ids for message in others[1:]], [message.ids for message in prompt[1:]])
    answers = prompt[1 : there + 1]
    shared = [_shared(answer.ids, message.ids) for message in answers]
    if not any(shared):
        return None
    # of answers that say the same, the last one is meant: the others may have been left out
    place = max(range(len(shared)), key=lambda place: (shared[place], place))
    missing = _missing([message.ids for message in others[1:]], [message.ids for message in answers[:place]])
    gone = spans([span for index in missing for span in others[1 + index].spans])
    return LeftOut(gone, answer.spans[0][0] + shared[place], answers[place].spans[0][0] + shared[place])


def missing_messages(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many messages of a kept conversation are left out of a chat that goes on behind its last message and
    has the others in order; ``None`` if it does not. Messages are compared by role and content.

    Args:
        before: the messages of the conversation.
        messages: those of the chat, at least one of them behind the conversation's last; may be fewer than ``before``.
    """
    known, said = ([(message["role"], message["content"]) for message in part] for part in (before, messages))
    # the two at the end are the conversation's last message and one that goes on from it
    there = _in_order(known[:-1], said[:-2])
    number = next((n for n in reversed(range(there + 1)) if known and said[n : n + 1] == known[-1:]), None)
    return None if number is None else len(known) - 1 - number


def _in_order(before: Sequence[object], others: Sequence[object]) -> int:
    """Return how many of ``others``, counted from the first one, are found in ``before`` in this order, with or without
    more between them.
    """
    there = 0
    for known in before:
        if there == len(others):
            break
        there += known == others[there]
    return there


def _missing(before: Sequence[object], others: Sequence[object]) -> list[int]:
    """Return the indexes in ``before``, the last one first, of what ``others`` lack, all of which are found there in
    this order. Of equal ones in ``before``, the last counts as the one that is there.
    """
    left, missing = list(others), list[int]()
    for index in reversed(range(len(before))):
        if left and left[-1] == before[index]:
            left.pop()
        else:
            missing.append(index)
    return missing


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))

"""Drops: tokens that leave a memory because a client says so, at a known place of its sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    """Return drops in their order, after checking them. Each keeps the positions that no earlier one has.

    Raises:
        InputError: they are no pairs of a number and spans, or a span ends beyond the tokens read until then.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"drops={given!r:.60} are no list; give pairs of a number of tokens and spans of positions.")
    pairs: list[tuple[int, Spans]] = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"The drop {pair!r:.60} is no pair of a number of tokens and spans of positions.")
        after, gone = whole_within("drops", pair[0], 1, LAST), spans(pair[1])
        if end(gone) > after:
            raise InputError(f"A drop after {after} tokens ends at position {end(gone)}: drop what was read by then.")
        pairs.append((after, gone))
    found: list[Drop] = []
    for after, gone in sorted(pairs):
        if left := without(gone, dropped(found)):
            found.append(Drop(after, left))
    return tuple(found)


def dropped(drops: Iterable[Drop]) -> Spans:
    """Return the spans of all positions that were dropped."""
    return spans([span for drop in drops for span in drop.spans])


def due(drops: Iterable[Drop], tokens: int) -> Spans:
    """Return the spans that are dropped once so many tokens were read."""
    return dropped(drop for drop in drops if drop.after <= tokens)


def most_held(drops: Sequence[Drop], tokens: int) -> int:
    """Return the most tokens that a memory holds at once while so many are read, if nothing is evicted."""
    stops = [*(drop.after for drop in drops), tokens]
    return max(stop - count(dropped(drops[:place])) for place, stop in enumerate(stops))


def check_drop(gone: Spans, *, read: int, drops: Drops, pins: Spans) -> None:
    """Refuse a drop of pinned tokens, of tokens that were not read, and of everything.

    Args:
        gone: the positions.
        read: how many tokens the model has read.
        drops: earlier ones.
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
    if not without(((0, read),), spans((*dropped(drops), *gone))):
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


def left_out(ids: Sequence[int], gone: Spans, prompt: Sequence[int], starts: Collection[int]) -> LeftOut | None:
    """Return which messages of a memory a prompt leaves out, if it has all others in their order; else ``None``.

    The first message and the last answer are never left out. Of the answer the beginning is enough, since a template
    may write it in other tokens than it was drawn. One token of the prompt, at least, is left to read.

    Args:
        ids: the tokens that the memory stands for.
        gone: positions that it has dropped already.
        prompt: the new tokens.
        starts: tokens of which each begins a message.
    """
    kept = [place for span in without(((0, len(ids)),), gone) for place in range(*span)]
    *blocks, answer = _blocks(ids, kept, starts) or [[]]
    read, found = 0, list[Span]()
    for number, block in enumerate(blocks):
        tokens = [ids[place] for place in block]
        if list(prompt[read : read + len(tokens)]) == tokens:
            read += len(tokens)
        elif number == 0:
            return None
        else:
            found += [(place, place + 1) for place in block]
    pairs = zip(answer, prompt[read : len(prompt) - 1], strict=False)
    same = next((n for n, (place, token) in enumerate(pairs) if ids[place] != token), None)
    most = min(len(answer), len(prompt) - 1 - read)
    shared = most if same is None else same
    return LeftOut(spans(found), answer[0] + shared, read + shared) if shared > 0 else None


def _blocks(ids: Sequence[int], places: Sequence[int], starts: Collection[int]) -> list[list[int]]:
    """Divide places into runs that begin with one of these tokens; what comes before the first one is a run, too."""
    found: list[list[int]] = []
    for place in places:
        if not found or ids[place] in starts:
            found.append([])
        found[-1].append(place)
    return found


def missing_messages(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many messages of a conversation are missing in one that goes on from its last one, and has the others
    in order; ``None`` if it does not.
    """
    rest, missing, last = iter(messages), 0, False
    awaited = next(rest, None)
    for message in before:
        last = awaited is not None and _same(awaited, message)
        if last:
            awaited = next(rest, None)
        else:
            missing += 1
    return missing if last and awaited is not None else None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two messages say the same."""
    return bool(one["role"] == other["role"] and one["content"] == other["content"])

"""Drops: tokens that leave a memory because a client says so, at a known place of its sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvkeep.engine.sampling_params import whole_within
from kvkeep.errors import InputError
from kvkeep.pins import LAST, Spans, common, count, end, spans, without


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
    *runs, answer = _runs(ids, kept, starts) or [[]]
    told = _runs(prompt, range(len(prompt) - 1), starts)
    before, said = [[ids[place] for place in run] for run in runs], [[prompt[place] for place in run] for run in told]
    shared = [_shared([ids[place] for place in answer], tokens) for tokens in said]
    # of answers that say the same, the last one is meant: the others may have been left out
    for number in sorted(range(1, len(said)), key=lambda number: (shared[number], number), reverse=True):
        missing = _missing(before, said[:number])
        if shared[number] and missing is not None and 0 not in missing:
            found = spans([(place, place + 1) for index in missing for place in runs[index]])
            return LeftOut(found, answer[0] + shared[number], told[number][0] + shared[number])
    return None


def missing_messages(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many messages of a conversation are missing in one that goes on from its last one, and has the others
    in order; ``None`` if it does not.
    """
    known, said = ([(message["role"], message["content"]) for message in part] for part in (before, messages))
    for number in reversed(range(len(said) - 1)):
        if known and said[number] == known[-1] and (missing := _missing(known[:-1], said[:number])) is not None:
            return len(missing)
    return None


def _missing(before: Sequence[object], others: Sequence[object]) -> list[int] | None:
    """Return the indexes of what others do not have, of which each must be found before in this order; ``None`` if one
    is not. Of equal ones the last is taken.
    """
    left, missing = list(others), list[int]()
    for index in reversed(range(len(before))):
        if left and left[-1] == before[index]:
            left.pop()
        else:
            missing.append(index)
    return None if left else missing


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _runs(ids: Sequence[int], places: Sequence[int], starts: Collection[int]) -> list[list[int]]:
    """Divide places into runs that begin with one of these tokens; what comes before the first one is a run, too."""
    found: list[list[int]] = []
    for place in places:
        if not found or ids[place] in starts:
            found.append([])
        found[-1].append(place)
    return found

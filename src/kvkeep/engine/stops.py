"""Text that ends where a stop text begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvkeep.models.stream import TextPieces


class StopText:
    """Turns tokens into text that is never taken back, up to the first stop text.

    What could be the beginning of a stop text is held back until the next tokens decide.

    Args:
        decode: the text of tokens.
        stops: texts that end the generation.

    Cost:
        linear in the text and in the stop texts, however long what is held back becomes.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._pieces = TextPieces(decode)
        self._searches = [_Search(stop) for stop in stops]
        self._held: deque[str] = deque()
        self._n_held = 0
        self._stopped = False
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """All text that is final."""
        return "".join(self._said)

    def add(self, token_id: int) -> tuple[str, bool]:
        """The text that one more token makes final, and whether a stop text has been reached."""
        if self._stopped:
            return "", True
        return self._hand_out(self._pieces.add(token_id)), self._stopped

    def end(self) -> str:
        """What is left when no more tokens come."""
        if self._stopped:
            return ""
        piece = self._hand_out(self._pieces.end())
        return piece if self._stopped else piece + self._release(self._n_held)

    def _hand_out(self, piece: str) -> str:
        """Take more text in; what is final comes out."""
        self._held.append(piece)
        self._n_held += len(piece)
        undecided = [search.read(piece) for search in self._searches]
        self._stopped = any(search.found for search in self._searches)
        if self._stopped:
            undecided = [search.since for search in self._searches if search.found]
        return self._release(self._n_held - max(undecided, default=0))

    def _release(self, n: int) -> str:
        """The first ``n`` characters of what is held back, which holds them no longer."""
        parts = []
        self._n_held -= n
        while n > 0:
            part = self._held.popleft()
            if len(part) > n:
                self._held.appendleft(part[n:])
            parts.append(part[:n])
            n -= len(parts[-1])
        self._said.extend(parts)
        return "".join(parts)


class _Search:
    """A search for one text in a stream of characters, each of which is looked at once (Knuth, Morris and Pratt).

    Args:
        wanted: the text.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._matched = 0  # length of the longest end of the stream that is a beginning of the text
        self._shorter = _shorter_matches(wanted)
        self.found = False
        self.since = 0
        """Characters from the beginning of what was found to the end of the stream."""

    def read(self, piece: str) -> int:
        """Go on with more characters; how many at the end of the stream could be a beginning of the text."""
        for at, character in enumerate(piece, start=1):
            self._matched = _longer(self._wanted, self._shorter, self._matched, character)
            if self._matched == len(self._wanted):
                self.found, self.since = True, len(self._wanted) + len(piece) - at
                break
        return self._matched


def _shorter_matches(wanted: str) -> list[int]:
    """For each beginning of a text, by length, the longest shorter one with which it ends; -1 where there is none."""
    shorter = [-1]
    matched = -1
    for character in wanted:
        while matched >= 0 and wanted[matched] != character:
            matched = shorter[matched]
        matched += 1
        shorter.append(matched)
    return shorter


def _longer(wanted: str, shorter: list[int], matched: int, character: str) -> int:
    """How much of a text is matched after one more character."""
    while matched >= 0 and wanted[matched] != character:
        matched = shorter[matched]
    return matched + 1

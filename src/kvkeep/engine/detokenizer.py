"""Text that appears while a model is still writing, and ends where a stop text begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
"""The character to which half a character is decoded."""


class TextPieces:
    """Decodes tokens one by one into pieces of text that never change again.

    A token may be half a character, and its text may depend on the token before it (spaces). So a piece is the
    difference between the text with and without the new tokens, and is held back while it ends in the middle of a
    character. Only the tokens of the last two pieces are decoded again, so a token of a long text costs no more.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # first token that is decoded again
        self._done = 0  # tokens whose text has been handed out

    def add(self, token_id: int) -> str:
        """Return the text that one more token makes final: often a word, sometimes nothing."""
        self._ids.append(token_id)
        piece = self._pending()
        # the bytes of a character may lie in several tokens
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return piece

    def end(self) -> str:
        """Return the rest of the text, even if it ends in the middle of a character."""
        piece = self._pending()
        self._start = self._done = len(self._ids)
        return piece

    def _pending(self) -> str:
        known = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start :])[len(known) :]


class StopText:
    """Turns tokens into text that is never taken back, up to the first stop text.

    Text that could be the beginning of a stop text is held back until the next tokens decide.

    Args:
        decode: returns the text of tokens.
        stops: texts that end the generation.
        keeps: whether the stop text that is reached is part of the text.

    Cost:
        linear in the lengths of the text and of the stop texts, however much text is held back.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), *, keeps: bool = False
    ) -> None:
        self._pieces, self._keeps = TextPieces(decode), keeps
        self._searches = [_Search(stop) for stop in stops]
        self._held: deque[str] = deque()
        self._n_held = 0
        self._stopped = False
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """Return all text that is final."""
        return "".join(self._said)

    def add(self, token_id: int, *, looks: bool = True) -> tuple[str, bool]:
        """Return the text that one more token makes final, and whether a stop text has been reached.

        Args:
            token_id: the token.
            looks: whether stop texts are looked for; only the first tokens may go without.
        """
        if not looks:
            piece = self._pieces.add(token_id)
            self._said.append(piece)
            return piece, False
        if self._stopped:
            return "", True
        return self._hand_out(self._pieces.add(token_id)), self._stopped

    def end(self) -> str:
        """Return the rest of the text when no more tokens come."""
        if self._stopped:
            return ""
        piece = self._hand_out(self._pieces.end())
        return piece if self._stopped else piece + self._release(self._n_held)

    def _hand_out(self, piece: str) -> str:
        """Hold back one more piece, and return the text that has become final."""
        self._held.append(piece)
        self._n_held += len(piece)
        undecided = [search.read(piece) for search in self._searches]
        self._stopped = any(search.found for search in self._searches)
        if self._stopped:
            first = max((search for search in self._searches if search.found), key=lambda search: search.since)
            undecided = [first.since - (first.length if self._keeps else 0)]
        return self._release(self._n_held - max(undecided, default=0))

    def _release(self, n: int) -> str:
        """Return the first ``n`` characters of the text that is held back, and hold them no longer."""
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
    """Searches for one text in a stream and looks at each character once (Knuth, Morris and Pratt).

    Args:
        wanted: the text.

    Attributes:
        length: number of characters of the text.
        found: whether the text has been found.
        since: number of characters from the beginning of the text, where it was found, to the end of the stream.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted, self.length = wanted, len(wanted)
        self._matched = 0  # length of the longest beginning of the text with which the stream ends
        self._shorter = _shorter_matches(wanted)
        self.found = False
        self.since = 0

    def read(self, piece: str) -> int:
        """Read more characters; return how many at the end of the stream could be a beginning of the text."""
        for at, character in enumerate(piece, start=1):
            self._matched = _longer(self._wanted, self._shorter, self._matched, character)
            if self._matched == len(self._wanted):
                self.found, self.since = True, len(self._wanted) + len(piece) - at
                break
        return self._matched


def _shorter_matches(wanted: str) -> list[int]:
    """For each beginning of a text: the length of the longest shorter one with which it ends, or -1.

    Entry ``n`` belongs to the beginning of ``n`` characters.
    """
    shorter = [-1]
    matched = -1
    for character in wanted:
        while matched >= 0 and wanted[matched] != character:
            matched = shorter[matched]
        matched += 1
        shorter.append(matched)
    return shorter


def _longer(wanted: str, shorter: list[int], matched: int, character: str) -> int:
    """Return how many characters of a text are matched after one more character of the stream."""
    while matched >= 0 and wanted[matched] != character:
        matched = shorter[matched]
    return matched + 1

"""Text that ends where a stop text begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvkeep.models.stream import TextPieces


class StopText:
    """Turns tokens into text that is never taken back, up to the first stop text.

    What could be the beginning of a stop text is held back until the next tokens decide.

    Args:
        decode: the text of tokens.
        stops: texts that end the generation.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._pieces = TextPieces(decode)
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False
        self.text = ""

    def add(self, token_id: int) -> tuple[str, bool]:
        """The text that one more token makes final, and whether a stop text has been reached."""
        self._held += self._pieces.add(token_id)
        return self._hand_out(), self._stopped

    def end(self) -> str:
        """What is left when no more tokens come."""
        if self._stopped:
            return ""
        self._held += self._pieces.end()
        piece = self._hand_out()
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _hand_out(self) -> str:
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            piece, self._held, self._stopped = self._held[: min(found)], "", True
        else:
            n = len(self._held) - self._undecided()
            piece, self._held = self._held[:n], self._held[n:]
        self.text += piece
        return piece

    def _undecided(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop text."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return max(lengths, default=0)

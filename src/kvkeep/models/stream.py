"""Text that appears while a model is still writing: whole characters only, never taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
"""What half a character is decoded to."""


class TextPieces:
    """Decodes tokens one by one into pieces of text that never change again.

    A token may be half a character, and the text of a token may depend on the one before (spaces). So each piece is
    the difference between the text with and without the new tokens, and is held back while it ends in the middle of
    a character. Only the tokens of the last two pieces are decoded again, so a long text costs no more per token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # first token that is decoded again
        self._done = 0  # tokens whose text has been handed out

    def add(self, token_id: int) -> str:
        """The text that one more token makes final; often a word, sometimes nothing."""
        self._ids.append(token_id)
        piece = self._pending()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return piece

    def end(self) -> str:
        """What is left, even if it ends in the middle of a character."""
        piece = self._pending()
        self._start = self._done = len(self._ids)
        return piece

    def _pending(self) -> str:
        known = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start :])[len(known) :]

"""Text that appears while a model is still writing, and ends where a stop text begins; and the part of each token."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.models.checkpoint import Tokenizer

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
        """Add a token, and return the text that it makes final, which may be that of several tokens; empty while the
        text so far may end within a character.
        """
        self._ids.append(token_id)
        piece = self._pending()
        # the bytes of a character may lie in several tokens
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return piece

    def end(self) -> str:
        """Return the text that has not been returned yet, even if it ends in the middle of a character."""
        piece = self._pending()
        self._start = self._done = len(self._ids)
        return piece

    def _pending(self) -> str:
        """Return the text of the tokens whose text has not been handed out yet, as it reads after the tokens before."""
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
        """Return all text that `add` and `end` have returned so far."""
        return "".join(self._said)

    def add(self, token_id: int, *, looks: bool = True) -> tuple[str, bool]:
        """Return the text that one more token makes final, and whether a stop text has been reached. After a stop text,
        every token returns an empty text.

        Args:
            token_id: the token.
            looks: whether stop texts are looked for. If not, the text is returned at once, and nothing held back; only
                the first tokens may go without.
        """
        if not looks:
            piece = self._pieces.add(token_id)
            self._said.append(piece)
            return piece, False
        if self._stopped:
            return "", True
        return self._hand_out(self._pieces.add(token_id)), self._stopped

    def end(self) -> str:
        """Return the text held back until now, up to a stop text; empty if a stop text was reached before."""
        if self._stopped:
            return ""
        piece = self._hand_out(self._pieces.end())
        return piece if self._stopped else piece + self._release(self._n_held)

    def _hand_out(self, piece: str) -> str:
        """Append a piece to the text held back, and look for stop texts. Return the beginning of the text held back, as
        far as it cannot be part of a stop text; once one is found, return what comes before it, or with it if it is
        kept.
        """
        self._held.append(piece)
        self._n_held += len(piece)
        undecided = [search.read(piece) for search in self._searches]
        self._stopped = any(search.found for search in self._searches)
        if self._stopped:
            # of stop texts that end within one piece, the one that begins first is taken
            first = max((search for search in self._searches if search.found), key=lambda search: search.since)
            undecided = [first.since - (first.length if self._keeps else 0)]
        return self._release(self._n_held - max(undecided, default=0))

    def _release(self, n: int) -> str:
        """Remove the first ``n`` characters from the text held back, count them as handed out, and return them."""
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
        """Read more characters of the stream, up to the end of the wanted text if that is among them. Return how many
        of the characters read last could be the beginning of the wanted text.

        If the wanted text ends within the piece, set ``found``, and ``since`` to the number of characters from its
        beginning to the end of the piece.
        """
        for at, character in enumerate(piece, start=1):
            self._matched = _longer(self._wanted, self._shorter, self._matched, character)
            if self._matched == len(self._wanted):
                self.found, self.since = True, len(self._wanted) + len(piece) - at
                break  # the text ends here, so the rest of the piece is of no use
        return self._matched


def _shorter_matches(wanted: str) -> list[int]:
    """Return the failure table of Knuth, Morris and Pratt: for each prefix of the text, the length of its longest
    proper prefix that is also its suffix, or -1.
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
    """Return the length of the longest prefix of the wanted text with which the stream ends after one more character.

    Args:
        wanted: the text, of which less than all was matched before.
        shorter: its table, see `_shorter_matches`.
        matched: the length before the character.
        character: the next one of the stream.
    """
    while matched >= 0 and wanted[matched] != character:
        matched = shorter[matched]
    return matched + 1


# The part of a text that each of its tokens spells. A token may be some bytes of a character.

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""The characters in which vocabularies of byte-level BPE write bytes: as GPT-2 does, printable ones as themselves."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token of one byte, as vocabularies of SentencePiece write it."""


@dataclass(frozen=True)
class TextToken:
    """A token of a text.

    Attributes:
        text: the token as it is shown; a part of a character is U+FFFD.
        bytes: the part of the text that it spells; ``None`` for a special token that the text leaves out.
        start: characters of the text before the one in which it begins.
    """

    text: str
    bytes: bytes | None
    start: int


class TokenTexts:
    """Decodes single tokens of a tokenizer.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._special: dict[int, bool] = {}

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids, without special tokens if ``special`` is false."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def after(self, before: int | None, token: int) -> str:
        """Return the text that a token adds after the token ``before``; its text alone for ``None``. Many tokenizers
        drop white space at the start of a text, so a token decoded alone may look different.
        """
        if before is not None:
            first, both = self.decode([before]), self.decode([before, token])
            if both.startswith(first):
                return both.removeprefix(first)
        return self.decode([token])

    def is_special(self, token: int) -> bool:
        """Return whether ``skip_special_tokens`` leaves this token out of texts."""
        if token not in self._special:
            self._special[token] = bool(self.decode([token])) and not self.decode([token], special=False)
        return self._special[token]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text, special tokens included. They are kept for
        the next call.
        """
        if token not in self._bytes:
            self._bytes[token] = self._read(token)
        return self._bytes[token]

    def _read(self, token: int) -> bytes:
        """Return the bytes of a token from its entry in the vocabulary, or from its decoded text if the entry does not
        spell bytes.
        """
        entry: Any = self._tokenizer.convert_ids_to_tokens(token)  # a text, bytes, or nothing beyond the vocabulary
        alone = self.decode([token])
        if isinstance(entry, bytes):
            return entry
        if isinstance(entry, str):
            if (found := _BYTE.fullmatch(entry)) and alone != entry:  # else it is the text <0x41> itself
                return bytes.fromhex(found[1])
            # an entry is read byte by byte only for a part of a character: else the decoded text is the safer source
            if _REPLACEMENT in alone and all(character in _BYTE_LEVEL for character in entry):
                return bytes(_BYTE_LEVEL[character] for character in entry)
        # any ordinary token will do: the token is decoded in the middle of a text, not at its start
        anchor = self._tokenizer.encode("a", add_special_tokens=False)
        text = self.after(anchor[-1], token) if anchor else alone
        return text.encode("utf-8", "surrogatepass")  # an unpaired surrogate is no error, whatever tokenizer it is from


class TokenSpans:
    """Divides a growing text among its tokens, so that their bytes are the text's.

    Args:
        texts: decodes tokens.
        special: whether the text has special tokens.
    """

    def __init__(self, texts: TokenTexts, *, special: bool = False) -> None:
        self._texts, self._special = texts, special
        self._pieces = TextPieces(lambda ids: texts.decode(ids, special=special))
        self._group: list[int] = []
        self._length = 0

    def add(self, token_id: int) -> list[TextToken]:
        """Add a token. Return the tokens whose characters are complete now, each with its part of the text: often that
        token alone, sometimes none, sometimes several.
        """
        self._group.append(token_id)
        piece = self._pieces.add(token_id)
        return self._divided(piece) if piece else []

    def end(self) -> list[TextToken]:
        """Return the remaining tokens, even if they end in the middle of a character."""
        return self._divided(self._pieces.end())

    def _divided(self, piece: str) -> list[TextToken]:
        """Divide a piece of text among the tokens added since the last piece, and return these tokens."""
        group, self._group = self._group, []
        left_out = [not self._special and self._texts.is_special(token) for token in group]
        spelled = [token for token, out in zip(group, left_out, strict=True) if not out]
        parts, found = iter(self._parts(spelled, piece)), []
        # for `start`: it counts a character once all of its bytes have come
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        start, self._length = self._length, self._length + len(piece)
        for token, out in zip(group, left_out, strict=True):
            if out:
                found.append(TextToken(self._texts.decode([token]), None, start))
                continue
            part = next(parts)
            found.append(TextToken(part.decode("utf-8", "replace"), part, start))
            # the text may have one U+FFFD for several broken bytes, see `_alike`
            start = min(start + len(reader.decode(part)), self._length)
        return found

    def _parts(self, tokens: Sequence[int], piece: str) -> Sequence[bytes]:
        """Return the bytes of a piece of text that each token stands for. If the piece cannot be divided, the last
        token gets all of it, and the others nothing.
        """
        whole = piece.encode("utf-8", "surrogatepass")
        if len(tokens) == 1 and _REPLACEMENT not in piece:
            return [whole]
        parts = [self._texts.bytes_of(token) for token in tokens]
        if _alike(b"".join(parts), piece):
            return parts
        first = next((place for place, part in enumerate(parts) if part), None)
        if first is not None and _alike(b"".join(parts).removeprefix(b" "), piece):  # dropped at the start of a text
            return [*parts[:first], parts[first].removeprefix(b" "), *parts[first + 1 :]]
        return [b""] * (len(tokens) - 1) + [whole] if tokens else []


def _alike(raw: bytes, text: str) -> bool:
    """Return whether bytes decode to a text, treating a run of U+FFFD as one: tokenizers show broken bytes as one or as
    several.
    """
    return _joined(raw.decode("utf-8", "replace")) == _joined(text)


def _joined(text: str) -> str:
    """Return a text in which each run of U+FFFD is a single one."""
    return re.sub(f"{_REPLACEMENT}+", _REPLACEMENT, text)

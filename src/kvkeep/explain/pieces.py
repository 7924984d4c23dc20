"""Tokens as the pieces of text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.models.load import Tokenizer

_LONGEST = 8
"""Tokens of one character, at most; after so many, half a character is shown as it is."""
_HALF = "\ufffd"


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token, special ones too. A character of several tokens is the last one's; the others have none.

    Args:
        tokenizer: the model's tokenizer.
        ids: the tokens.
    """
    found, waiting, before = [""] * len(ids), list[int](), list[int]()
    for index, token in enumerate(ids):
        waiting.append(token)
        text = _decoded(tokenizer, before + waiting).removeprefix(_decoded(tokenizer, before))
        if text.endswith(_HALF) and len(waiting) < _LONGEST:
            continue
        found[index], before, waiting = text, waiting[-1:], []
    if waiting:
        found[-1] = _decoded(tokenizer, waiting)
    return found


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

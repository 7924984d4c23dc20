"""The tokens that may come next in an answer of a given form: a state per request, and a mask over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.errors import KVKeepError

if TYPE_CHECKING:
    from kvkeep.engine.generation import Generation

_BITS = 32
TOO_COMPLEX = "The grammar of the answer became too complex"


class Constraint:
    """The place in a grammar that a request has reached.

    Args:
        matcher: llguidance's state.
        vocabulary: the number of tokens that it knows.
        avoided: tokens that end a text, and are allowed only where nothing else is.

    Attributes:
        error: why no token can follow, if the grammar engine has failed.
    """

    def __init__(self, matcher: Any, vocabulary: int, avoided: Sequence[int] = ()) -> None:
        self._matcher, self.vocabulary, self._avoided = matcher, vocabulary, avoided
        self.error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the answer can have no further token."""
        return bool(self._matcher.is_stopped())

    def fill(self, words: Int[Tensor, " words"]) -> None:
        """Set the bits of the tokens that may follow; none if the grammar engine fails.

        Args:
            words: a row of int32 in main memory, a bit for each token.
        """
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            words.zero_()
            return
        before = words.clone() if self._avoided else words
        for token in self._avoided:
            words[token // _BITS] &= ~_bit(token)
        if self._avoided and not words.any():
            words.copy_(before)

    def take(self, token: int) -> None:
        """Go on after a token.

        Raises:
            KVKeepError: the grammar does not allow it.
        """
        if not self._matcher.consume_token(token):
            raise KVKeepError(failure(self._matcher.get_error()))


def failure(error: str) -> str:
    """The message of a request whose grammar engine has failed."""
    why = " ".join(error.partition("<state>")[0].split())
    return f"{TOO_COMPLEX} ({why:.100}). Use a simpler one."


def masked(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits with minus infinity for tokens that the requests' grammars do not allow."""
    bound = [(i, one.constraint) for i, one in enumerate(generations) if one.constraint is not None]
    if not bound:
        return logits
    V = logits.shape[-1]
    words = torch.zeros(len(bound), -(-bound[0][1].vocabulary // _BITS), dtype=torch.int32)
    for row, (_, constraint) in zip(words, bound, strict=True):
        constraint.fill(row)
    index = torch.tensor([i for i, _ in bound], device=logits.device)
    allowed = _bits(words.to(logits.device))[:, :V]
    return logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))


def _bits(words: Int[Tensor, "n words"]) -> Bool[Tensor, "n V"]:
    """Return the bits of whole numbers, the lowest one first."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words.view(torch.uint8)[..., None] >> places & 1).bool().flatten(1)


def _bit(token: int) -> int:
    """Return a whole number of 32 bits with the bit of a token."""
    found = 1 << token % _BITS
    return found - (1 << _BITS) if token % _BITS == _BITS - 1 else found

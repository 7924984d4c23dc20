"""Rotary positions: vectors turned to their positions and back, and keys moved to their ranks in the cache."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import UnsupportedOperationError

# Keys rotated to their ranks in the cache instead of their true positions.
#
# With ``true`` positions keys stay as the model rotated them. With ``slot`` positions (StreamingLLM) keys are stored
# unrotated. In each step the i-th oldest token of a head is rotated to position i, and the query to the end. No
# distance is then longer than the cache, however long the stream is.


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary embedding of a layer: pairs of dims that are rotated against each other.

    Attributes:
        frequencies: radians per position of each pair, float32. The other dims of a head are not rotated.
        scaling: factor on the rotated vectors (YaRN).
        dims: the first dim of each pair, and behind them the second dim of each. ``None``: the first ``F`` dims of a
            head are rotated against the next ``F`` (Llama, Mistral, Qwen, Gemma, GPT-NeoX, ...).
        longest: tokens of the longest text that has these frequencies (longrope); ``None``: every text has them.
        beyond: the rotation of longer texts.
    """

    frequencies: Float[Tensor, " F"]
    scaling: float = 1.0
    dims: tuple[int, ...] | None = None
    longest: int | None = None
    beyond: Rotation | None = None
    # caches of what the methods below compute
    _there: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)
    _latest: dict[torch.dtype, tuple[bytes, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _orders: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def apply(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return vectors rotated to their positions, and scaled. Padding (position -1) counts as position 0."""
        first, second, rest = self._split(x)
        cos, sin = self._wide(self.angles(positions, x.dtype))
        return self._joined([first * cos - second * sin, second * cos + first * sin, *rest]).to(x.dtype)

    def ahead(self, x: Float[Tensor, "B H T D"], by: Int[Tensor, "B H"]) -> Float[Tensor, "B H T D"]:
        """Return rotated vectors as they would be ``by`` positions later, one number for each head; they are not scaled
        again.
        """
        first, second, rest = self._split(x)
        angles = by[:, :, None, None].float() * self.on(x.device)
        cos, sin = angles.cos(), angles.sin()
        return self._joined([first * cos - second * sin, second * cos + first * sin, *rest]).to(x.dtype)

    def undo(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return rotated and scaled vectors as they were before `apply`, with cosine and sine rounded exactly as the
        model rounds them.

        At position four million float32 angles are off by a quarter of a radian. With equal rounding the error cancels.
        """
        return self._undone(x, self._wide(self.angles(positions, x.dtype)))

    def unrotated(
        self, query: Float[Tensor, "B Hq T D"], keys: Float[Tensor, "B Hk T D"], positions: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hk T D"]]:
        """Return a step's new queries and keys as they were before the rotation to their positions, see `undo`."""
        # a single token on a CPU: all layers of the step share its angles, and queries and keys take one call
        if positions.shape[1] > 1 or not positions.is_cpu:
            return self.undo(query, positions[:, None]), self.undo(keys, positions[:, None])
        angles = self.angles_now(positions, query.dtype)[:, None, None]
        both = self._undone(torch.cat([query, keys], dim=1), self._wide(angles))
        return both[:, : query.shape[1]], both[:, query.shape[1] :]

    def at_ranks(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk S D"],
        positions: Int[Tensor, "B #Hk S"],
        new: Int[Tensor, "B T"],
    ) -> tuple[Tensor, Tensor]:
        """Return unrotated queries and keys rotated to the ranks of their tokens: 0 is the oldest that a KV head holds.

        A query has the rank that its own token has in the KV head of its group.

        Args:
            query: new queries.
            keys: all keys that can be attended, new ones included.
            positions: true positions of the keys, -1 = empty. One head's positions if all heads agree.
            new: true positions of the queries, -1 = padding.
        """
        # the first new position; new tokens follow each other, so the newest one and their number name it
        first = new.amax(dim=1, keepdim=True) - (new >= 0).sum(dim=1, keepdim=True) + 1
        older = ((positions >= 0) & (positions < first[:, None])).sum(dim=-1, keepdim=True)
        own = older + (new - first).clamp(min=0)[:, None]
        # keys have a rank in each KV head, and so have the queries of its group
        own = own.repeat_interleave(query.shape[1] // positions.shape[1], dim=1)
        return self.apply(query, own), self.apply(keys, ranks(positions))

    def table(self, n: int, dtype: torch.dtype) -> Float[Tensor, "m F2"]:
        """Return a line of `angles` for each of positions 0 to at least ``n - 1``, on the CPU. The table is cached."""
        known = self._tables.get(dtype)
        if known is None or len(known) < n:
            self._tables[dtype] = known = self.angles(torch.arange(n), dtype)
        return known

    def angles_now(self, positions: Int[Tensor, "B 1"], dtype: torch.dtype) -> Float[Tensor, "B F2"]:
        """Return `angles` of one position per row, on the CPU. The last result is cached: all layers of a step ask for
        the same.
        """
        # read from memory as bytes: `tolist` would be a wait, which a graph cannot have
        held = positions.contiguous()
        known, asked = self._latest.get(dtype), ctypes.string_at(held.data_ptr(), held.nbytes)
        if known is None or known[0] != asked:
            self._latest[dtype] = known = (asked, self.angles(positions[:, 0], dtype))
        return known[1]

    def angles(self, positions: Int[Tensor, "*A"], dtype: torch.dtype) -> Float[Tensor, "*A F2"]:
        """Return for each position the scaled cosines of all pairs, then their sines, rounded to a dtype. Padding
        (position -1) counts as position 0.
        """
        angles = positions.clamp(min=0)[..., None].float() * self.on(positions.device)
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.scaling).to(dtype)

    def paired(self, x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
        """Return the vectors with the first dims of all pairs in front, then the second ones, then the other dims.

        Products of vectors stay the same if both are put in this order.
        """
        return x if self.dims is None else x.index_select(-1, self._order(x)[0])

    def on(self, device: torch.device) -> Float[Tensor, " F"]:
        """Return the frequencies on a device. They are copied there only once."""
        if device not in self._there:
            self._there[device] = self.frequencies.to(device)
        return self._there[device]

    def _split(self, x: Float[Tensor, "B H T D"]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the first dims of all pairs, the second dims, and a list with the dims that do not rotate, empty if
        there are none; in float32 or wider.
        """
        half = len(self.frequencies)
        x = self.paired(x).to(torch.promote_types(x.dtype, torch.float32))
        rest = x[..., 2 * half :]
        return x[..., :half], x[..., half : 2 * half], [rest] if rest.shape[-1] else []

    def _joined(self, parts: list[Tensor]) -> Float[Tensor, "B H T D"]:
        """Return the parts of `_split`, here in one list, as vectors whose dims are in the model's order again."""
        x = torch.cat(parts, dim=-1)
        return x if self.dims is None else x.index_select(-1, self._order(x)[1])

    def _order(self, x: Float[Tensor, "*A D"]) -> tuple[Int[Tensor, " D"], Int[Tensor, " D"]]:
        """Return the order of dims in which pairs are two halves, and its inverse, on the device of ``x``."""
        key = x.shape[-1], x.device
        if key not in self._orders:
            paired = self.dims or ()
            rest = sorted(set(range(x.shape[-1])).difference(paired))
            order = torch.tensor([*paired, *rest], device=x.device)
            self._orders[key] = order, order.argsort()
        return self._orders[key]

    def _undone(self, x: Float[Tensor, "B H T D"], angles: tuple[Tensor, Tensor]) -> Float[Tensor, "B H T D"]:
        """Return vectors without a rotation, and its scaling, that is given by its cosines and sines."""
        (first, second, rest), (cos, sin) = self._split(x), angles
        # rounded and scaled, cosine and sine are no unit vector: the inverse divides by its squared length
        size = cos * cos + sin * sin
        unturned = [(first * cos + second * sin) / size, (second * cos - first * sin) / size]
        return self._joined([*unturned, *rest]).to(x.dtype)

    def _wide(self, angles: Float[Tensor, "*A F2"]) -> tuple[Float[Tensor, "*A F"], Float[Tensor, "*A F"]]:
        """Return the cosines and the sines in `angles` apart, in float32 or wider."""
        cos, sin = angles.to(torch.promote_types(angles.dtype, torch.float32)).chunk(2, dim=-1)
        return cos, sin


# Longrope: a long text has other frequencies than a short one, and each token those of its text when it was read.


@dataclass(frozen=True, eq=False)
class TextRotation:
    """The rotary embedding of a layer for texts of known lengths, where short and long ones are rotated differently.

    Attributes:
        short: the rotation of texts of at most `longest` tokens.
        long: that of longer ones.
        longest: tokens of the longest short text.
        lengths: where each row's prompt ends. A later token was read when the text ended with it.
    """

    short: Rotation
    long: Rotation
    longest: int
    lengths: Int[Tensor, " B"]

    def undo(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return vectors as they were before their rotation, see `Rotation.undo`: each by the frequencies of its text
        when the token was read.
        """
        ends = torch.maximum(positions + 1, self.lengths.to(positions)[:, None, None])
        return self._either(ends[..., None], self.short.undo(x, positions), self.long.undo(x, positions))

    def ahead(self, x: Float[Tensor, "B H T D"], by: Int[Tensor, "B H"]) -> Float[Tensor, "B H T D"]:
        """Return a prompt's vectors as they would be ``by`` positions later, by the frequencies of this prompt."""
        return self._either(self.lengths[:, None, None, None], self.short.ahead(x, by), self.long.ahead(x, by))

    @property
    def frequencies(self) -> Float[Tensor, " F"]:
        """Return the frequencies of short texts, for the number of pairs."""
        return self.short.frequencies

    def on(self, device: torch.device) -> Float[Tensor, " F"]:
        """Raise an error, as the rows have different frequencies.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            "This model's rotary frequencies change with the length of the text. A policy can look at unrotated keys, "
            "and cannot compute angles of its own: choose another policy."
        )

    @property
    def scaling(self) -> float:
        """Return the factor on rotated vectors in short texts."""
        return self.short.scaling

    def paired(self, x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
        """Return vectors with the first dims of all rotated pairs in front, then the second ones, then the others."""
        return self.short.paired(x)

    def _either(self, ends: Int[Tensor, "*n"], short: Tensor, long: Tensor) -> Tensor:
        """Return ``long`` where a token's text has more than `longest` tokens, elsewhere ``short``.

        Args:
            ends: tokens of each token's text, in a shape that broadcasts with the vectors.
            short, long: vectors by the frequencies of short and of long texts.
        """
        return torch.where(ends > self.longest, long, short)


_lengths: ContextVar[Tensor | None] = ContextVar("lengths", default=None)


@contextmanager
def reading(lengths: Int[Tensor, "n T"] | None) -> Iterator[None]:
    """Tell rotary embeddings and layers how long the text of each token is, for runs within the context.

    Args:
        lengths: tokens of the text up to the end of its prompt, or up to the last token of the run if that is later;
            ``None``: each row of a batch is a text that ends with its largest position.
    """
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def lengths_read() -> Int[Tensor, "n T"] | None:
    """Return the lengths of texts that the innermost `reading` around this call was given; ``None`` outside of any."""
    return _lengths.get()


def ranks(positions: Int[Tensor, "B H S"]) -> Int[Tensor, "B H S"]:
    """Return the rank of each token among the tokens of its head, oldest first; -1 for an empty slot."""
    order = positions.argsort(dim=-1)  # empty slots, at -1, come first
    places = torch.empty_like(order)
    places.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    empty = (positions < 0).sum(dim=-1, keepdim=True)
    return (places - empty).clamp(min=-1)

"""Keys rotated to their ranks in the cache instead of their true positions.

With ``true`` positions keys stay as the model rotated them. With ``slot`` positions (StreamingLLM) keys are stored
unrotated. In each step the i-th oldest token of a head is rotated to position i, and the query to the end. No distance
is then longer than the cache, however long the stream is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding whose halves are rotated against each other (Llama, Mistral, Qwen, Gemma, GPT-NeoX, ...).

    Attributes:
        frequencies: radians per position, float32. The first ``2 F`` dims of a head are rotated, the rest is not.
        scaling: factor on the rotated vectors (YaRN).
    """

    frequencies: Float[Tensor, " F"]
    scaling: float = 1.0
    _there: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def apply(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Rotate each vector to its position."""
        first, second, rest = self._split(x)
        cos, sin = self._angles(x, positions)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1).to(x.dtype)

    def undo(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Invert `apply`, with cosine and sine rounded exactly as the model rounds them.

        At position four million float32 angles are off by a quarter of a radian. With equal rounding the error cancels.
        """
        first, second, rest = self._split(x)
        cos, sin = self._angles(x, positions)
        size = cos * cos + sin * sin
        unturned = [(first * cos + second * sin) / size, (second * cos - first * sin) / size]
        return torch.cat([*unturned, *rest], dim=-1).to(x.dtype)

    def unrotated(self, query: Tensor, keys: Tensor, positions: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """New queries and keys without the rotation to their true positions."""
        at = positions[:, None]
        return self.undo(query, at), self.undo(keys, at)

    def at_ranks(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk S D"],
        positions: Int[Tensor, "B Hk S"],
        new: Int[Tensor, "B T"],
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, given unrotated, rotated to the ranks of their tokens in each KV head.

        Args:
            query: new queries.
            keys: all keys that can be attended, new ones included.
            positions: true positions of the keys, -1 = empty.
            new: true positions of the queries, -1 = padding.
        """
        first = new.amax(dim=1, keepdim=True) - (new >= 0).sum(dim=1, keepdim=True) + 1
        older = ((positions >= 0) & (positions < first[:, None])).sum(dim=-1, keepdim=True)
        own = older + (new - first).clamp(min=0)[:, None]
        own = own.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        return self.apply(query, own), self.apply(keys, ranks(positions))

    def _on(self, device: torch.device) -> Float[Tensor, " F"]:
        """The frequencies on a device, copied there once."""
        if device not in self._there:
            self._there[device] = self.frequencies.to(device)
        return self._there[device]

    def _split(self, x: Float[Tensor, "B H T D"]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The two halves that are rotated against each other, and the remaining dims, in float32 or wider."""
        half = len(self.frequencies)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        rest = x[..., 2 * half :]
        return x[..., :half], x[..., half : 2 * half], [rest] if rest.shape[-1] else []

    def _angles(self, x: Tensor, positions: Int[Tensor, "B #H T"]) -> tuple[Tensor, Tensor]:
        """Cosine and sine, rounded to the vectors' dtype. Padding (position -1) counts as position 0."""
        angles = positions.clamp(min=0)[..., None].float() * self._on(x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (angles.cos() * self.scaling).to(x.dtype).to(wide), (angles.sin() * self.scaling).to(x.dtype).to(wide)


class AsItIs:
    """The rotation under true positions, which leaves queries and keys as the model rotated them."""

    def unrotated(self, query: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys unchanged."""
        return query, keys

    def at_ranks(self, query: Tensor, keys: Tensor, positions: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys unchanged."""
        return query, keys


def ranks(positions: Int[Tensor, "B H S"]) -> Int[Tensor, "B H S"]:
    """The place of each token among the tokens of its head, oldest first; -1 for an empty slot."""
    order = positions.argsort(dim=-1)
    places = torch.empty_like(order)
    places.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    empty = (positions < 0).sum(dim=-1, keepdim=True)
    return (places - empty).clamp(min=-1)

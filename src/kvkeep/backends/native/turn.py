"""The angles by which the kernel turns unrotated keys to their ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.rotary import Rotation


class Turn(NamedTuple):
    """Rows of cosines and sines, in the dtype of the keys.

    Attributes:
        angles: a row for each rank.
        back: a row for the true position of each query; ``None`` if queries are unrotated.
    """

    angles: Float[Tensor, "n F2"]
    back: Float[Tensor, "B F2"] | None = None

    def fits(self, query: Float[Tensor, "B Hq 1 D"], slots: int) -> bool:
        """Whether dtypes and shapes are those that are promised to the kernel: a rank for each slot and one more."""
        (n, width), B, D = self.angles.shape, query.shape[0], query.shape[-1]
        shape_fits = n > slots and width % 2 == 0 and 0 < width <= D
        back_fits = self.back is None or self.back.shape == (B, width)
        return shape_fits and back_fits and all(_is_plain(rows, query.dtype) for rows in self if rows is not None)

    def packed(self) -> tuple[int, int, int]:
        """Addresses and the number of dims that turn against as many others."""
        back = 0 if self.back is None else self.back.data_ptr()
        return self.angles.data_ptr(), back, self.angles.shape[1] // 2


def turn_of(rotation: Rotation, slots: int, dtype: torch.dtype, rotated_at: Int[Tensor, "B 1"] | None = None) -> Turn:
    """The turn of keys in so many slots.

    Args:
        rotation: the model's rotary embedding.
        slots: number of slots.
        dtype: dtype of the keys.
        rotated_at: positions to which queries and new keys are rotated; ``None`` if they are unrotated.
    """
    back = None if rotated_at is None else rotation.angles_now(rotated_at, dtype)
    return Turn(rotation.table(slots + 1, dtype), back)


def _is_plain(rows: Tensor, dtype: torch.dtype) -> bool:
    return rows.is_cpu and rows.dtype == dtype and rows.is_contiguous()

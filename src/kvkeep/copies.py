"""Slots beside a chunk of a prompt. A kernel reads both where they lie; whoever needs them side by side gets a copy."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.lazy import LazySlots, nothing
from kvkeep.types import Slots


class Beside(LazySlots):
    """Slots where they lie, followed by new tokens. In the copies, keys and values of empty slots are 0.

    Attributes:
        held: the slots.
        new: the new tokens.
    """

    held: Slots
    new: Slots
    _first: Beside | None

    @classmethod
    def of(cls, held: Slots, new: Slots, positions: Int[Tensor, "B Hk S"] | None = None) -> Beside:
        """Slots beside new tokens.

        Args:
            held: the slots, which must not change as long as the object is used.
            new: the new tokens.
            positions: the positions of both; by default those of ``held`` and ``new``.
        """
        if positions is None:
            positions = torch.cat([held.positions, new.positions], dim=2)
        made = cls(*nothing(positions), positions)
        made.held, made.new, made._first = held, new, None
        return made

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""
        return self._first.keys if self._first else self._joined(self.held.keys, self.new.keys)

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return self._first.values if self._first else self._joined(self.held.values, self.new.values)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> None:
        """Nothing is written into slots beside a chunk."""
        raise NotImplementedError

    def _joined(self, held: Tensor, new: Tensor) -> Tensor:
        found = torch.cat([held, new], dim=2)
        found[:, :, : held.shape[2]].masked_fill_((self.held.positions < 0)[..., None], 0.0)
        return found


def at(slots: Slots, positions: Int[Tensor, "B Hk S"]) -> Slots:
    """The same keys and values with other positions. Copies are made once for both."""
    if not isinstance(slots, Beside):
        return slots._replace(positions=positions)
    made = Beside.of(slots.held, slots.new, positions)
    made._first = slots._first or slots
    return made


def pieces(slots: Slots) -> tuple[Slots, ...]:
    """Keys and values that lie together, in the order of the slots: one piece, or slots and a chunk."""
    if not isinstance(slots, Beside):
        return (slots,)
    used = slots.held.positions.shape[2]
    return (
        Slots(slots.held.keys, slots.held.values, slots.positions[:, :, :used]),
        Slots(slots.new.keys, slots.new.values, slots.positions[:, :, used:]),
    )

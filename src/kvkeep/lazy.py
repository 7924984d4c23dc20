"""Slots that a backend may read where they lie, and of which everybody else gets copies side by side."""

from __future__ import annotations

import abc
import functools
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.types import Slots, View


class LazySlots(Slots):
    """Slots whose keys and values lie in memory in another form. Copies are made when they are first read."""

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """A copy of the keys."""
        return self.copy_keys()

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """A copy of the values."""
        return self.copy_values()

    @abc.abstractmethod
    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""

    @abc.abstractmethod
    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""

    @abc.abstractmethod
    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"] | None:
        """Write one token of each head into the given slots. Return which heads can use theirs; ``None``: all."""

    def __iter__(self) -> Any:
        return iter(self.copied())

    def __getitem__(self, item: Any) -> Any:
        return self.copied()[item]

    def _replace(self, **changes: Any) -> Slots:  # type: ignore[override]
        return self.copied()._replace(**changes)

    def copied(self) -> Slots:
        """The same slots as copies side by side."""
        return Slots(self.keys, self.values, self.positions)

    def forget(self) -> None:
        """Drop the copies, because the slots have changed."""
        vars(self).pop("keys", None)
        vars(self).pop("values", None)


class LazyView(View):
    """A view of such slots. Keys and values are copied when the policy first looks at them."""

    _slots: LazySlots

    @classmethod
    def of(cls, slots: LazySlots, **others: Any) -> LazyView:
        """A view of these slots.

        Args:
            slots: the slots.
            others: the other attributes of `View`.
        """
        view = cls(slots.positions, *nothing(slots.positions), **others)
        own = vars(view)
        del own["keys"], own["values"]
        own["_slots"] = slots
        return view

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """A copy of the keys."""
        return self._slots.keys

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """A copy of the values."""
        return self._slots.values


def nothing(positions: Int[Tensor, "B Hk S"]) -> tuple[Tensor, Tensor]:
    """Keys and values for the constructors of these classes, which never read them."""
    empty = positions.new_empty((*positions.shape, 0), dtype=torch.float32)
    return empty, empty

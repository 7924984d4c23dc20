"""A block's slots as a policy sees them."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.head_sharding import ALONE, Heads
from kvkeep.lazy import LazySlots, LazyView
from kvkeep.store.block import Block
from kvkeep.types import Phase, Slots, Turning, View


def view_of(  # noqa: PLR0913  the attributes of a view
    block: Block,
    slots: Slots,
    *,
    new: Int[Tensor, " B"],
    phase: Phase,
    layer: int,
    tables: tuple[Float[Tensor, "B A"], Bool[Tensor, "B A"]],
    rotation: Turning | None = None,
    turned: bool = True,
    heads: Heads = ALONE,
) -> View:
    """Slots of a block, alone or beside a chunk, as a policy sees them. Counters are live.

    Args:
        block: the block.
        slots: keys, values and positions.
        new: real tokens that each row received.
        phase: the kind of these tokens.
        layer: index of the layer in the model.
        tables: ``past`` and ``alive``, see `View`.
        rotation: see `View`.
        turned: see `View`.
        heads: see `View`.
    """
    others: dict[str, Any] = {
        "seen": block.seen,
        "budget": block.budget,
        "new": new,
        "prompt": block.prompt,
        "phase": phase,
        "layer": layer,
        "sequences": block.sequences,
        "past": tables[0],
        "alive": tables[1],
        "pins": block.pins,
        "rotation": rotation,
        "turned": turned,
        "heads": heads,
    }
    if isinstance(slots, LazySlots):
        return LazyView.of(slots, **others)
    return View(slots.positions, slots.keys, slots.values, **others)

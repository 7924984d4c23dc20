"""State for several policies in one block: the rows of an engine belong to sequences under different policies."""

from __future__ import annotations

from collections.abc import Mapping

from kvkeep.memory import bytes_of
from kvkeep.store.block import Block
from kvkeep.store.heads import empty, shared
from kvkeep.types import State


def lacks(block: Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> int:
    """The bytes that `add_state` would add.

    Args:
        block: a block whose state has general names: numbers for slots, `kvkeep.store.heads.places` for heads.
        starts: the policy's state of slots.
        heads: the policy's state of heads.
    """
    missing = max(0, len(starts) - len(block.of_slots())) * 4 * block.store.room
    return missing + bytes_of(_missing(block, heads, "meta").values())


def add_state(block: Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> None:
    """Add the state tensors that a policy needs and the block lacks; arguments as for `lacks`.

    Existing tensors stay the same objects.
    """
    for i in range(len(block.of_slots()), len(starts)):
        block.state[str(i)] = block.store.numbers(0.0)
    block.state |= _missing(block, heads)
    block.heads = block.heads.union(shared(heads))


def _missing(block: Block, heads: Mapping[str, str], device: str | None = None) -> State:
    """State of heads that a block does not have yet."""
    missing = {place: axes for place, axes in shared(heads).items() if place not in block.heads}
    if not missing:
        return {}
    keys, values = (x.to(device) for x in block.store.no_token())
    return empty(missing, keys, values)

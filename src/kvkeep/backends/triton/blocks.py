"""Sizes of the kernels' blocks, by device. A row that is not measured says so; nothing depends on it but speed.

The number of slots that one program reads is a property of the shapes alone, never of the batch: a row gets the
same bits alone and among others.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

MAX_DIM = 256
"""Largest head dim of keys and of values."""

MAX_GROUP = 64
"""Most query heads that may share a KV head."""


class Decode(NamedTuple):
    """Sizes of the attention of one token per row.

    Attributes:
        slots: slots in a tile.
        split: slots that one program reads.
        warps: warps of a program.
        stages: tiles on their way at a time.
    """

    slots: int
    split: int
    warps: int
    stages: int


DECODE: dict[str, dict[int, Decode]] = {
    # by compute capability, then by the bytes of a key, at most so many; compiled for these, not measured yet
    "9": {256: Decode(64, 256, 4, 5), 1024: Decode(16, 256, 4, 5)},
    "8": {128: Decode(64, 256, 4, 5), 256: Decode(32, 256, 4, 5), 1024: Decode(16, 256, 4, 5)},
    "": {1024: Decode(32, 256, 4, 2)},
}
"""Keys and values wait for positions, which takes stages of its own: 5 keep two tiles of each on their way. More slots
in a tile of long keys would not fit into the registers."""

SCAN = 1024
"""Slots that the kernels which pick a slot look at together."""

SCAN_WARPS = 4


def decode(device: torch.device, key_bytes: int, S: int) -> Decode:
    """Sizes for a device, keys of so many bytes and ``S`` slots."""
    rows = DECODE.get(_capability(device), DECODE[""])
    sizes = next((sizes for limit, sizes in rows.items() if key_bytes <= limit), rows[max(rows)])
    tile = min(sizes.slots, power(S))
    return sizes._replace(slots=tile, split=max(tile, min(sizes.split, power(S))))


def merge_tile(group: int) -> int:
    """Slots that a program looks at together when it holds the logits of so many query heads in registers."""
    return max(16, min(SCAN, 4096 // group))


def power(n: int, least: int = 16) -> int:
    """The power of two that is not below ``n``, nor below what a product of matrices takes."""
    return max(least, 1 << (n - 1).bit_length())


@functools.cache
def _capability(device: torch.device) -> str:
    """Compute capability; nothing for a device that has none."""
    return str(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else ""

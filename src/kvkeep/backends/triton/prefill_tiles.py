"""How large a tile of rows and keys each device gets in the prefill kernels.

None of the rows is measured yet. Nothing depends on them but speed and the order in which sums are added up.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.backends.triton import blocks


class Tile(NamedTuple):
    """What a program of a kernel works on at a time.

    Attributes:
        rows: query rows.
        slots: keys.
        warps: of 32 threads, in a program.
        stages: tiles that are on their way from memory at a time.
    """

    rows: int
    slots: int
    warps: int
    stages: int


CPU = Tile(32, 128, 4, 1)
"""For the interpreter, which takes its time for every tile."""

Table = dict[tuple[bool, int, int], Tile]
"""By roominess (shared memory of 160 KiB or more), bytes per element, and head dim, padded."""

FORWARD: Table = {
    (True, 2, 64): Tile(128, 64, 8, 3),
    (True, 2, 128): Tile(128, 64, 8, 3),
    (True, 2, 256): Tile(64, 64, 8, 2),
    (True, 4, 64): Tile(64, 32, 4, 2),
    (True, 4, 128): Tile(64, 32, 4, 2),
    (True, 4, 256): Tile(32, 32, 4, 2),
    (False, 2, 64): Tile(64, 64, 4, 2),
    (False, 2, 128): Tile(64, 32, 4, 2),
    (False, 2, 256): Tile(32, 32, 4, 2),
    (False, 4, 64): Tile(32, 32, 4, 2),
    (False, 4, 128): Tile(32, 32, 4, 1),
    (False, 4, 256): Tile(16, 16, 4, 1),
}

COLUMNS: Table = {
    (True, 2, 64): Tile(64, 128, 8, 3),
    (True, 2, 128): Tile(64, 128, 8, 3),
    (True, 2, 256): Tile(32, 64, 4, 3),
    (True, 4, 64): Tile(32, 64, 4, 2),
    (True, 4, 128): Tile(32, 64, 4, 2),
    (True, 4, 256): Tile(32, 32, 4, 2),
    (False, 2, 64): Tile(32, 128, 4, 2),
    (False, 2, 128): Tile(32, 64, 4, 2),
    (False, 2, 256): Tile(32, 32, 4, 2),
    (False, 4, 64): Tile(32, 32, 4, 2),
    (False, 4, 128): Tile(32, 32, 4, 1),
    (False, 4, 256): Tile(16, 16, 4, 1),
}


def forward(dim: int, like: Tensor) -> Tile:
    """For `prefill.forward`, by the larger head dim."""
    return _tile(FORWARD, dim, like)


def columns(dim: int, like: Tensor) -> Tile:
    """For `prefill.columns`."""
    return _tile(COLUMNS, dim, like)


def splits(programs: int, like: Tensor) -> int:
    """How many programs share the work of one, so that every multiprocessor has two.

    Args:
        programs: there are for one row of the batch: what a row gets must not depend on the others.
        like: a tensor on the device.
    """
    if not like.is_cuda:
        return 1
    return max(1, 2 * _multiprocessors(like.device) // programs)


def _tile(table: Table, dim: int, like: Tensor) -> Tile:
    if not like.is_cuda:
        return CPU
    return table[_is_roomy(like.device), like.element_size(), blocks.power(dim, least=64)]


@functools.cache
def _is_roomy(device: torch.device) -> bool:
    """Data centre GPUs from A100 on, and Orin; by compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) in ((8, 0), (8, 7)) or 9 <= major < 12


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Layers that have no block yet, made ready for rows that are put into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvkeep.errors import ShapeError
from kvkeep.layer import Layer
from kvkeep.store import Block, RowCopy, inference


@inference
def open_layer(layer: Layer, copies: Sequence[RowCopy], *, columns: int, device: torch.device | None = None) -> None:
    """Give a layer an empty block with one row for each copy, and at least as many slots as the copies' blocks had.

    Args:
        layer: a layer without a block.
        copies: what will be put into the rows.
        columns: columns that the layer has seen by then, padding included.
        device: where the block shall be; by default the first copy's device.

    Raises:
        ShapeError: the copies come from a store that is not the default one.
    """
    tensors = copies[0].tensors
    if not {"store.keys", "store.values"} <= tensors.keys():
        raise ShapeError("Rows of another store than the default one need a cache that holds such a store already.")
    like = (
        tensors[name][None, :, :0].expand(len(copies), -1, -1, -1).to(device) for name in ("store.keys", "store.values")
    )
    block = Block(*like, numbers=layer.budgets, starts=layer.policy.slots)
    block.widen(max(copy.capacity for copy in copies))
    layer.hold(block, columns=columns)

"""Blocks with room for rows that are put into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvkeep.budget import largest
from kvkeep.cache.layer import Layer
from kvkeep.errors import ShapeError
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.store import inference
from kvkeep.snapshot.contents import Contents


@inference
def new_block(
    layer: Layer,
    copies: Sequence[RowCopy],
    rows: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """An empty block for a layer, with at least as many slots as the blocks had from which the copies were taken.

    Args:
        layer: a layer without a block.
        copies: what will be put into the block.
        rows: rows of the block.
        device: where the block shall be; by default the first copy's device.
        dtype: the model's, which slots of codes do not show.

    Raises:
        ShapeError: the copies come from a store that is not the default one, or there is no memory for the block.
    """
    tensors = copies[0].tensors
    if not {"store.keys", "store.values"} <= tensors.keys():
        raise ShapeError("Rows of another store than the default one need a cache that holds such a store already.")
    keys, values = (tensor.to(device).expand(rows, -1, -1, -1) for tensor in layer.like(copies[0], dtype))
    budget = largest(layer.budgets)
    try:
        block = layer.new_block(keys, values)
        _widen(block, layer, copies)
    except (MemoryError, RuntimeError) as error:
        raise ShapeError(f"There is no memory for {rows} rows with a budget of {budget} tokens.") from error
    return block


def _widen(block: Block, layer: Layer, copies: Sequence[RowCopy]) -> None:
    """Give a block the slots per head of the blocks that copies were taken from, at most what its budget allows.

    A pool has room for every division of the budget already.
    """
    if not isinstance(block.store, PooledStore):
        block.widen(min(largest(layer.budgets) + 1, max(copy.capacity for copy in copies)))


@inference
def blocks_for(
    layers: Sequence[Layer], contents: Sequence[Contents], rows: int, *, dtype: torch.dtype | None = None
) -> list[Block]:
    """The block of each layer, with enough slots for what will be put in; a new one for a layer that has none.

    A new block is not yet the layer's own.

    Args:
        layers: the layers with slots.
        contents: what will be put in.
        rows: rows of a new block.
        dtype: the model's, for a new block whose slots hold codes.

    Raises:
        ShapeError: the contents have another number of layers.
    """
    blocks = []
    for i, layer in enumerate(layers):
        copies = [one.layers[i] for one in contents if len(one.layers) == len(layers)]
        if len(copies) < len(contents):
            raise ShapeError(f"It does not have {len(layers)} layers with slots, as this model has.")
        if not layer.allocated:
            blocks.append(new_block(layer, copies, rows, dtype=dtype))
            continue
        if any(max(copy.used, copy.most + 1) > layer.block.store.capacity for copy in copies):
            _widen(layer.block, layer, copies)
        blocks.append(layer.block)
    return blocks

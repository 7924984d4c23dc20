"""What the block of a layer is made of: its kind of store, its budgets, its pins, and the backend that works on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.backends import Backend, choose, in_codes, in_pool
from kvkeep.budget import Number, by_head
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import PooledStore, kind_of
from kvkeep.kv.row_copy import RowCopy, pins_of
from kvkeep.kv.store import Store
from kvkeep.pins import Spans, spans
from kvkeep.policies._keep_prompt import check_read, keeps_share
from kvkeep.policies.base import Policy
from kvkeep.rotary import Rotation


@dataclass(frozen=True)
class BlockPlan:
    """What a layer needs to know to allocate its block.

    Attributes:
        policy: the eviction policy, whose state the block holds.
        index: the layer's number in the model.
        store: the kind of store.
        sequences: identity of each row for randomness.
        pins: spans that the policy may not evict.
    """

    policy: Policy
    index: int
    store: type[Store]
    sequences: Sequence[int] | None
    pins: Sequence[Spans]

    def block(
        self,
        keys: Float[Tensor, "B Hk _ D"],
        values: Float[Tensor, "B Hk _ E"],
        *,
        budgets: Sequence[Number],
        heads: Heads,
        together: SharedBudget | None,
    ) -> Block:
        """Return an empty block for keys and values of these shapes: of one layer alone, or its part of the block that
        the layers in ``together`` have in common.

        Args:
            keys: keys of any number of tokens.
            values: their values.
            budgets: one for all rows, or one per row.
            heads: which heads this process holds.
            together: the layers that share their budget with this one, and the slots.
        """
        given: dict[str, Any] = {
            "numbers": budgets,
            "starts": self.policy.slots,
            "heads": self.policy.summaries,
            "sequences": self.sequences,
            "pins": self.pins,
            "store": self.store,
        }
        if together is not None:
            return together.block(self.index, keys, values, **given)
        # of a budget that heads of all processes share, most may come to those of this one
        room = heads.ranks if self.policy.spreads else 1
        block = Block(keys, values, room=room, **given)
        reach(block, self.policy, budgets, heads)
        return block

    def like(self, copy: RowCopy, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of zero tokens for one row, shaped as those of a copied row, from which a store can be
        made. ``dtype`` is the model's, which codes do not show; ``None``: that of the copy.
        """
        tensors = {
            name.removeprefix("store."): x[None] for name, x in copy.tensors.items() if name.startswith("store.")
        }
        return self.store.like(tensors, dtype)

    def filled_by(self, block: Block) -> BlockPlan:
        """Return this plan with the kind of store that a given block has."""
        return self if self.store is type(block.store) else replace(self, store=type(block.store))


def store_for(policy: Policy, numbers: Sequence[Number], kv_bits: str | None = None) -> type[Store]:
    """Return the class of store for a policy and its budgets: a pool if heads of a row have different budgets.

    Args:
        policy: the policy.
        numbers: the budgets.
        kv_bits: bits of keys and values, a name of `kvkeep.kv_bits.KV_BITS`; ``None``: the model's dtype.
    """
    return kind_of(kv_bits, pooled=bool(policy.spreads) or any(isinstance(number, tuple) for number in numbers))


def reach(block: Block, policy: Policy, numbers: Sequence[Number], among: Heads = ALONE) -> None:
    """Raise the most slots that one head of a block's pool may get, ``widest``, to what the policy's rule may give it.

    Without a pool, or if the policy does not divide a budget, do nothing.

    Args:
        block: the block.
        policy: the policy.
        numbers: budgets of the rows.
        among: which heads this process holds; the budget may be shared with those of others.
    """
    store = block.store
    if not isinstance(store, PooledStore) or policy.spreads is None:
        return
    heads = store.sizes.shape[1]
    means = {-(-sum(row) // heads) for row in by_head(numbers, heads)}
    most = max(policy.spreads.most(policy, mean, heads * among.ranks) for mean in means)
    # one slot more than its budget, as everywhere; the last entry of a pool belongs to no head
    store.widest = max(store.widest, min(most + 1, store.entries.shape[1] - 1))


def backend_for(block: Block, rotation: Rotation | None) -> Backend:
    """Return the backend that works on a block, wrapped for what it cannot read where it lies.

    Args:
        block: the slots. The device and the dtype choose; pools and codes are wrapped around the choice.
        rotation: the model's rotary embedding where tokens are attended at their rank in the cache.
    """
    backend = choose(block.seen.device, block.store.dtype)
    backend = backend if rotation is None else backend.at_ranks(rotation)
    if block.store.bits is not None:
        backend = in_codes(backend, turned=rotation is not None)
    return in_pool(backend) if isinstance(block.store, PooledStore) else backend


# Tokens of prompts that stay under `keep_prompt`, as pins of a block.


def pin_read(policy: Policy, block: Block, T: int, real: Bool[Tensor, "B T"] | None, *, window: int | None) -> None:
    """Pin tokens that are about to be read in a layer's own block, besides what it pins already.

    Args:
        policy: one that `keeps_whole`.
        block: the slots.
        T: new tokens per row.
        real: which of them are no padding; ``None``: all.
        window: sliding window of the layer.

    Raises:
        BudgetError: a row has no room. Nothing was changed.
    """
    starts = block.seen.tolist()
    counts = [T] * len(starts) if real is None else real.sum(dim=1).tolist()
    rows = [
        spans((*pins, (start, start + number)))
        for pins, start, number in zip(pins_of(block, slice(None)), starts, counts, strict=True)
    ]
    for row, pins in enumerate(rows):
        check_read(policy, _least_budget(policy, block, row), pins, window=window)
    block.pin(rows)


def _least_budget(policy: Policy, block: Block, row: int) -> int:
    """Return the smallest budget of a row's heads; the mean of them if they divide a common one by need."""
    if isinstance(block.budget, int):
        return block.budget
    return block.budget_of(row) // block.lost.shape[1] if policy.spreads else int(block.budget[row].min())


def lead_of(policy: Policy, block: Block) -> int:
    """Return how many first positions stay in every row, if these are all that `keep_prompt` and pins protect and are
    the same in all rows; else 0.

    A kernel that knows of first positions only can then take the step.
    """
    if keeps_share(policy):
        # one number holds for all rows, so their prompts must be equally long, and no pin may lie behind them
        ends = set(block.prompt.tolist())
        behind = block.pins is not None and any(
            pins and pins[-1][1] > min(ends) for pins in pins_of(block, slice(None))
        )
        return 0 if len(ends) > 1 or behind else ends.pop()
    # all rows must have the same pins, and these be one span from the first position on
    found = {*pins_of(block, slice(None))}
    alone = [pins for pins in found if len(pins) == 1 and pins[0][0] == 0]
    return alone[0][0][1] if len(alone) == len([*found]) == 1 else 0

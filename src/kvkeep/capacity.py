"""Room for what may not be evicted: the tokens of policies that never evict, and pins. It is checked before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvkeep.errors import CapacityError
from kvkeep.kv.block import Block
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.types import Phase


def check_room(
    policy: Policy, block: Block, T: int, real: Bool[Tensor, "B T"] | None, *, phase: Phase, window: int | None
) -> None:
    """Refuse new tokens for which a policy that does not evict has no room.

    Args:
        policy: the eviction policy.
        block: the slots.
        T: new tokens per row.
        real: which of them are no padding; ``None``: all.
        phase: what the tokens are. Those that are only read again need no room.
        window: sliding window of the layer.

    Raises:
        CapacityError: a row would hold more tokens than its budget.
    """
    grows = policy.grows is not None and phase is Phase.DECODE
    if phase is Phase.PROBE or (policy.evicts and not grows):
        return
    coming = T if real is None else real.sum(dim=1, keepdim=True)
    _check(block, coming + (block.held() if policy.evicts else block.seen[:, None]), window=window)


def _check(block: Block, needed: Int[Tensor, "B n"], *, window: int | None) -> None:
    """Refuse tokens for which there are no slots.

    Args:
        block: the slots and their budgets.
        needed: slots that each row would occupy in each head, or in all heads.
        window: sliding window of the layer. A budget that holds the whole window has room for any number of tokens.

    Raises:
        CapacityError: a row would hold more tokens than its budget.
    """
    if isinstance(block.budget, int) and bool((needed <= block.budget).all()):
        return  # the usual case, without the operators below
    room = torch.as_tensor(block.budget, device=needed.device).expand_as(needed)
    endless = torch.zeros_like(needed, dtype=torch.bool) if window is None else room >= window
    for row, head in (~endless & (needed > room)).nonzero()[:1].tolist():
        n, budget = int(needed[row, head]), int(room[row, head])
        raise CapacityError(
            f"Row {row} has reached {n} tokens, its budget is {budget}, and this policy "
            "never evicts here. Give a budget of at least the prompt plus its new tokens (under decode=grow: more "
            "room), or another policy."
        )


def check_pins(policy: Policy, budgets: Sequence[int], pins: Sequence[Spans], *, window: int | None) -> None:
    """Refuse pins for which a row has no room.

    Args:
        policy: protects tokens of its own.
        budgets: one number for all rows, or one per row.
        pins: one entry for all rows, or one per row.
        window: sliding window of the layer. Where the budget holds all of it, no token has to go before it expires.

    Raises:
        BudgetError: a row's pinned and protected tokens are more than its budget.
    """
    rows = max(len(budgets), len(pins))
    for row in range(rows if pins else 0):
        budget = budgets[row if len(budgets) == rows else 0]
        if window is None or budget < window:
            policy.check_pins(budget, pins[row if len(pins) == rows else 0])

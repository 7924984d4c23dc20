"""Room for a request's tokens in its budget, and for one row in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvkeep.cache.layer_layout import Layout
from kvkeep.engine.rows import Rows
from kvkeep.engine.staging import COPIES, Staging, block_bytes, bound
from kvkeep.errors import BudgetError, CapacityError, show_bytes
from kvkeep.models.load import Model
from kvkeep.policies.base import Policy


def check_room(layout: Layout, budget: int, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a prompt and new tokens for which a policy that does not evict them has too few slots.

    Args:
        layout: the policy, and how the budget is spread over the model's layers.
        budget: tokens per head.
        prompt_tokens: length of the prompt.
        new_tokens: the most tokens that are generated; the last one takes no slot.

    Raises:
        CapacityError: there are too few slots.
        BudgetError: the policy protects more than a layer's budget.
    """
    policy, room = layout.policy, layout.room(budget)
    if room is None or (policy.evicts and not policy.grows):
        return
    kept = min(prompt_tokens, room - policy.grows.room) if policy.grows else prompt_tokens
    needed = kept + new_tokens - 1
    if needed <= room:
        return
    uneven = room != budget
    where = f"a budget of {budget} gives some layer only {room}" if uneven else f"the budget is {room}"
    remedies = ["raise the `budget`" if uneven or policy.grows else f"give `budget={needed}`"]
    if kept <= room:
        remedies.append(f"ask for at most {room - kept + 1} new tokens")
    raise CapacityError(
        f"{policy} does not evict generated tokens: {prompt_tokens} tokens of the prompt and {new_tokens} new ones "
        f"need {needed} slots, and {where}. {' or '.join(remedies).capitalize()}."
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the free main memory, swap included; ``None`` if a device reports exhaustion itself or nothing is known.

    Without this number a process that allocates too much main memory is killed instead of being told. A limit on the
    process and others together, as containers have, counts as well.
    """
    source = Path("/proc/meminfo")
    if device.type != "cpu" or not source.exists():
        return None
    free = 1024 * sum(map(int, re.findall(r"^(?:MemAvailable|SwapFree): *(\d+) kB$", source.read_text(), re.MULTILINE)))
    return min([free, *_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _limits(root: Path, groups: Path) -> Iterator[int]:
    """What each control group (version 2) of this process still allows, swap aside; nothing where there are none."""
    try:
        own = next((line[3:] for line in groups.read_text().splitlines() if line.startswith("0::/")), None)
        folder = None if own is None else root / own.strip("/")
        for one in [] if folder is None else (folder, *folder.parents):
            if not one.is_relative_to(root):
                return
            limit = _read(one / "memory.max")
            if limit.isdecimal():
                cached = re.search(r"^inactive_file (\d+)$", _read(one / "memory.stat"), re.MULTILINE)
                yield max(0, int(limit) - int(_read(one / "memory.current") or 0) + int(cached[1] if cached else 0))
    except (OSError, ValueError):
        return


def _read(file: Path) -> str:
    """The content of a file without the white space at its end; nothing if there is none."""
    return file.read_text().strip() if file.is_file() else ""


def check_host_rows(host_rows: int, row_bytes: int, *, beside: int, pinned: bool = False) -> None:
    """Refuse sequences that wait in main memory if there is no room for them.

    Args:
        host_rows: the most that wait.
        row_bytes: bytes of a row.
        beside: rows that are about to be allocated in main memory as well.
        pinned: whether they wait in blocks of pinned memory.

    Raises:
        BudgetError: there is no room.
    """
    free = free_bytes(torch.device("cpu")) if host_rows else None
    each = -(-row_bytes // block_bytes(row_bytes)) * block_bytes(row_bytes) if pinned else row_bytes
    if free is None or host_rows * each + beside * row_bytes <= free:
        return
    fits = max(0, (free - beside * row_bytes) // each)
    rows = f" beside {beside} rows" if beside else ""
    raise BudgetError(
        f"host_rows={host_rows} takes up to {show_bytes(host_rows * each)} of main memory{rows}, and "
        f"{show_bytes(free)} are free. Give `host_rows={fits}` or less, or a smaller `budget`."
    )


def share_room(staging: Staging | None, kv_memory: int | None, row_bytes: int, count: int) -> int | None:
    """Let copies of rows on the device have what the rows leave of a limit, as far as they can use it.

    Args:
        staging: the copies; ``None``: there are none.
        kv_memory: the limit in bytes; ``None``: there is none.
        row_bytes: bytes of a row.
        count: rows.

    Returns:
        The most bytes that the rows may take; ``None``: no limit.
    """
    if staging is None or kv_memory is None:
        return kv_memory
    staging.most_bytes = min(max(0, kv_memory - count * row_bytes), COPIES * bound(row_bytes))
    return kv_memory - staging.most_bytes


def largest_budget(model: Model, policy: Policy, below: int, memory: int, **options: Any) -> int | None:
    """Return the largest budget with which one row fits into the memory; ``None`` if there is none.

    Args:
        model: the model, attached.
        policy: the policy that the row is made for.
        below: a budget that is too large.
        memory: bytes.
        options: as for `Rows`.
    """

    @cache
    def size(budget: int) -> int:
        return Rows(model, policy, budget, **options).row_bytes

    low, high = policy.least, below
    try:
        while low < high - 1 and size(low) <= memory:  # bytes grow linearly with the budget, but for rounding
            share = (memory - size(low)) / (size(high) - size(low))
            guess = min(high - 1, max(low + 1, low + int(share * (high - low))))
            low, high = (guess, high) if size(guess) <= memory else (low, guess)
        return low if low < below and size(low) <= memory else None
    except BudgetError:  # the policy protects more than `Policy.least`
        return None

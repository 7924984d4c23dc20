"""The parts of a prompt's step: its chunks, its second reading, and the queries that a policy may ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Statistic
from kvkeep.backends import Backend
from kvkeep.errors import BudgetError
from kvkeep.policies.base import Policy
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Output, Queries, Report, Slots, View


def chunk_size(chunk: object) -> int | None:
    """Check the number of a prompt's tokens that are taken at once; ``None``: all of them.

    Raises:
        BudgetError: it is no whole number, or below 1.
    """
    if chunk is None:
        return None
    if not isinstance(chunk, SupportsIndex) or isinstance(chunk, bool) or int(chunk) < 1:
        raise BudgetError(f"The prefill chunk {chunk} is no whole number of 1 or more tokens.")
    return int(chunk)


def in_chunks(
    step: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk T D"],
    values: Float[Tensor, "B Hk T E"],
    *,
    real: Bool[Tensor, "B T"] | None,
    size: int,
) -> Float[Tensor, "B Hq T E"]:
    """Run ``step`` on ``size`` real tokens of each row at a time, and put the outputs back in their columns.

    Chunks are cut in tokens, not in columns, so padding never moves a cut.

    Args:
        step: takes queries, keys, values and which of their columns are real (``None``: all); returns the output.
        query: queries.
        keys: keys.
        values: values.
        real: which columns are real; ``None``: all.
        size: tokens of a chunk.
    """
    T = query.shape[2]
    if size >= T:
        return step(query, keys, values, real)
    if real is None:
        parts = zip(*(x.split(size, dim=2) for x in (query, keys, values)), strict=True)
        return torch.cat([step(q, k, v, None) for q, k, v in parts], dim=2)
    order = real.int().argsort(dim=1, descending=True, stable=True)  # real tokens first, in their order
    front = [x.gather(2, order[:, None, :, None].expand_as(x)).split(size, dim=2) for x in (query, keys, values)]
    pieces = zip(*front, real.gather(1, order).split(size, dim=1), strict=True)
    out = torch.cat([step(q, k, v, r) for q, k, v, r in pieces], dim=2)
    return torch.empty_like(out).scatter_(2, order[:, None, :, None].expand_as(out), out)


def for_prompt(
    policy: Policy, view: View, query: Float[Tensor, "B Hq T D"], positions: Int[Tensor, "B T"], output: Output | None
) -> View:
    """The view of a prompt, with what only a prompt shows to a policy that asks for it.

    Args:
        policy: `Abilities.asks` and `Abilities.projects` say what it looks at.
        view: the slots and the chunk.
        query: the chunk's queries, rotated like the keys.
        positions: their true positions, -1 for padding.
        output: projection of the heads' outputs.
    """
    if policy.projects:
        view = replace(view, output=output)
    if not policy.asks:
        return view
    plain = query if view.rotation is None or not view.turned else view.rotation.undo(query, positions[:, None])
    return replace(view, queries=Queries(plain, positions))


def read(  # noqa: PLR0913  the arguments of attention
    policy: Policy,
    backend: Backend,
    query: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
    length: Int[Tensor, "B 1"],
    rotation: Rotation | None,
) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Attention of a prompt's chunk and the report; for a policy that `rereads`, of a second reading as well.

    The arguments are those of `kvkeep.backends.Backend.attend_twice`.
    """
    if not policy.rereads:
        return backend.attend(query, slots, now, statistic=statistic, options=options)
    out, report, again = backend.attend_twice(
        query, slots, now, statistic=statistic, options=options, length=length, rotation=rotation
    )
    return out, Report({**report.sums, "again": again})

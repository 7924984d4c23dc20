"""What a policy keeps of a prompt, from the rows of the full cache: its own statistic, state and score, no copy.

A prompt attends to everything before anything is dropped, so the walk sees the very rows from which a policy chooses,
and the kept set is that of a `BoundedCache` that is given the whole prompt at once. In layers with a sliding window the
cache drops, beside that, what has left the window.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.eviction import limit
from kvkeep.policies.base import Policy
from kvkeep.research.analysis.measure import Context, Rows
from kvkeep.statistic import Rows as Block
from kvkeep.statistic import Statistic
from kvkeep.types import Phase, Report, View


class Prompt:
    """One policy on one layer at the end of a prompt.

    Args:
        policy: it must not look at keys, which the walk does not show.
        context: the text, which is the prompt.
        budget: tokens kept per head.
        layer: number of the layer.
    """

    def __init__(self, policy: Policy, context: Context, budget: int, layer: int):
        n = context.n_tokens
        policy.check(budget)
        self.policy, self.budget = policy, budget
        self._view = _view(context, budget, layer)
        self.statistic: Statistic = policy.wants(self._view)
        self._selected = self.statistic.selects(torch.arange(n)[None])
        self._sums = {name: torch.zeros(1, context.n_kv_heads, n) for name in self.statistic.fields}

    def add(self, rows: Rows) -> None:
        """Reduce the policy's statistic over a block of rows; at the last block, take the values."""
        R, S = rows.weights.shape[1:]
        last = rows.first + R
        if last == self._view.positions.shape[-1]:
            self._view = replace(self._view, values=rows.values[None])
        at = self._selected[0, rows.first : last].nonzero().flatten()
        if not len(at):
            return
        p = rows.weights[:, at] if len(at) < R else rows.weights
        queries = (rows.first + at)[None]
        grouped = p.unflatten(0, (self._view.positions.shape[1], -1))[None]
        block = Block(grouped, torch.ones_like(queries, dtype=torch.bool), queries, torch.arange(S)[None, None])
        for name, part in self.statistic.reduce(block).items():
            self.statistic.join(self._sums[name][:, :, :S], part)

    def score(self) -> Float[Tensor, "Hk n"]:
        """The policy's score of every token after the last row; higher = keep."""
        return self.policy.score(self._view, self._state())[0]

    def kept(self) -> Bool[Tensor, "Hk n"]:
        """What stays of the prompt."""
        view, state = self._view, self._state()
        sinks, recent = self.policy.protected(self.budget)
        score = scores.protect(self.policy.score(view, state), view.positions, view.seen, sinks=sinks, recent=recent)
        return scores.keep(score, view.positions, limit(self.policy, view, state))[0]

    @property
    def recent(self) -> int:
        """Newest tokens that stay in any case."""
        return int(self.policy.protected(self.budget)[1])

    def _state(self) -> dict[str, Tensor]:
        positions = self._view.positions
        start = {name: torch.full(positions.shape, value) for name, value in self.policy.slots.items()}
        return self.policy.observe(start, self._view, Report(self._sums))


def _view(context: Context, budget: int, layer: int) -> View:
    n, heads = context.n_tokens, context.n_kv_heads
    positions: Int[Tensor, "1 Hk n"] = torch.arange(n, dtype=torch.int32).expand(1, heads, n)
    nothing = torch.zeros(1, heads, n, 0)
    return View(
        positions=positions,
        keys=nothing,
        values=nothing,
        seen=torch.tensor([n]),
        budget=budget,
        new=torch.tensor([n]),
        prompt=torch.tensor([n]),
        phase=Phase.PREFILL,
        layer=layer,
        sequences=torch.zeros(1, dtype=torch.int64),
        past=torch.zeros(1, 0),
        alive=torch.zeros(1, 0, dtype=torch.bool),
    )

"""KVzip (Kim et al., arXiv:2505.23416): a text is read twice, and the tokens stay that the second reading attends to.

    cache = kvzip.read(model, ids, budget=256)
    model.generate(ids_and_question, past_key_values=cache)

No bound holds while a text is read: the full cache of the text has to stay until the second reading has ended. So
this is research equipment and no policy of the registry. `reread` works out nearly the same from the first reading,
and bounds memory with chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import Nothing, Peak, Statistic
from kvkeep.budget import between, check_one
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.eviction import cut
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer import Layer
from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.kv.block import Block, view_of
from kvkeep.kv.store import inference
from kvkeep.policies._prefill import slide
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, Phase, Report, State, View
from kvkeep_lab.hindsight import Attached


@final
@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """The largest attention probability that a token receives from any row of the second reading."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")

    slots: ClassVar[Mapping[str, float]] = {"peak": 0.0}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return the sinks and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the largest probabilities, of tokens that are read again."""
        return Peak() if view.phase is Phase.PROBE else Nothing()

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the largest probability so far."""
        if view.phase is not Phase.PROBE:
            return state
        return {"peak": torch.maximum(state["peak"], report.sums["peak"])}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the largest probability; afterwards an order that keeps the chosen tokens."""
        return slide(view, self.protected(view.budget)[1]) if view.is_decode else state["peak"]


@torch.inference_mode()
def read(
    model: Attached, ids: Int[Tensor, "B n"], *, budget: int, chunk: int = 2048, policy: KVzip | None = None
) -> BoundedCache:
    """Read texts of the same length twice, and return the cache of what stays.

    Args:
        model: a model to which `kvkeep.attach` was applied.
        ids: the texts, one per row, without padding.
        budget: slots per layer and head of the cache that is returned.
        chunk: tokens that are read again at once. Each chunk follows directly on the whole first copy.
        policy: what is protected.

    Raises:
        BudgetError: the budget, or the chunk, is out of range, or less than what is protected.
        InputError: there is no text.
        UnsupportedModelError: the model has layers with a state, which a second reading would change, or with a
            sliding window.
    """
    policy, budget = policy or KVzip(), check_one(budget)
    policy.check(budget)
    if not ids.numel():
        raise InputError("There is no text to read: ids has no token.")
    cache = BoundedCache(model.config, policy, max(budget, ids.shape[1]))
    layers = cache.bounded_layers()
    if len(layers) < len(cache.layers) or any(layer.window for layer in layers.values()):
        raise UnsupportedModelError(
            "A text cannot be read twice by a model that has a state or a sliding window beside its full attention."
        )
    pieces = [(Phase.PREFILL, ids), *((Phase.PROBE, part) for part in ids.split(check_one(chunk, "chunk"), dim=1))]
    for cache.phase, piece in pieces:
        model(input_ids=piece, **handed(model, cache))
    cache.phase, cache.budget, rows = None, budget, cache.row_snapshots
    rows.settings = replace(rows.settings, budgets=(budget,))
    for layer in layers.values():
        _shrink(layer, budget)
    return cache


@inference
def _shrink(layer: Layer, budget: int) -> None:
    """Move a layer's best tokens into a block of ``budget`` slots."""
    old, slots = layer.block, layer.store.slots()
    new = Block(slots.keys, slots.values, numbers=[budget], starts=layer.policy.slots)
    for name in ("seen", "prompt", "sequences"):
        getattr(new, name).copy_(getattr(old, name))
    view = view_of(new, slots, new=old.seen, phase=Phase.PREFILL, layer=0)
    cut(layer.policy, new, view, old.state, window=None, used=0)
    layer.budgets = (budget,)
    layer.hold(new, columns=layer.columns)

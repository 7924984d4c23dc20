"""One budget for the heads of all layers: Ada-KV's plain loop, whose heads are those of all layers.

`rules_prompt.AdaKV` is the definition. It ranks the older tokens of all heads together by their scores as they are, and
knows nothing of layers. Here its heads lie in several layers, which attend one after the other.
"""

from types import SimpleNamespace

import pytest
import torch

from kvkeep import AttentionOptions, Layer, parse
from kvkeep.cache import shared_budget
from kvkeep.policies._head_budgets import under
from kvkeep.types import EMPTY, Phase

from . import lockstep
from .cases import CHAT, DECODE, Case

CASES = [
    (2, Case("adakv:window=4", 12, (40, *DECODE), heads=4, group=1)),
    (3, Case("adakv:window=2,alpha=0.35,kernel=1", (6, 12), (40, *DECODE), pads=(3, 0), heads=6)),
    (2, Case("adakv:window=2,alpha=0", 12, CHAT, pads=(0, 4), heads=4, group=1)),
    (2, Case("adakv:window=3,kernel=3,pool=avg,decode=score", (4, 12), CHAT, pads=(0, 4), heads=4)),
    (4, Case("adakv:window=2,alpha=1", 9, CHAT, heads=4, group=1)),
    (1, Case("adakv:window=2", 9, CHAT, heads=3)),
    (2, Case("adakv:window=3", 7, (24, *DECODE), heads=4, inputs="constant")),
    (2, Case("adakv:window=3", 8, (24, *DECODE), heads=4, inputs="hard")),
    (2, Case("adakv:window=2,decode=grow,room=20", (40, 33), (60, *(1,) * 20), pads=(0, 5), heads=4)),
]


class Layers:
    """Layers that share their budgets, as one layer with the heads of all."""

    def __init__(self, case, count):
        policy, shared = parse(case.policy), shared_budget.SharedBudget(range(count))
        policy = under(policy, f"global:{policy.alpha}")
        budget = case.budget if isinstance(case.budget, int) else list(case.budget)
        self.layers = [Layer(policy, budget, index=i, together=shared) for i in range(count)]

    def step(self, *new, **given):
        parts = zip(*(x.chunk(len(self.layers), dim=1) for x in new), strict=True)
        return torch.cat([layer.step(*mine, **given) for layer, mine in zip(self.layers, parts, strict=True)], dim=1)

    @property
    def store(self):
        held = [layer.store.positions for layer in self.layers]
        most = max(x.shape[-1] for x in held)
        padded = [torch.nn.functional.pad(x, (0, most - x.shape[-1]), value=EMPTY) for x in held]
        return SimpleNamespace(positions=torch.cat(padded, dim=1))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("count", "case"), CASES, ids=str)
def test_the_heads_of_all_layers_share_one_budget(count, case, early, monkeypatch):
    """Tokens that cannot stay may go before the last layer has attended: that changes nothing."""
    monkeypatch.setattr(shared_budget, "AT_ONCE", 0 if early else 1e9)
    monkeypatch.setattr(shared_budget, "WORTH", 1.0)
    monkeypatch.setattr(lockstep, "make_layer", lambda case: Layers(case, count))
    lockstep.compare(case)


def test_layers_differ_in_what_they_hold():
    """Attention of the first layer lies on few tokens, that of the second on many."""
    layers = Layers(Case("adakv:window=2,kernel=1,alpha=0", 12, (60,), heads=4, group=1), 2)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 4, 60, 8, generator=generator) for _ in range(3))
    query[:, :2] *= 6.0
    layers.step(query, keys, values, options=AttentionOptions(scaling=0.5), phase=Phase.PREFILL)
    first, second = (int(layer.block.held().sum()) for layer in layers.layers)
    assert first + second == 4 * 12
    assert first < second

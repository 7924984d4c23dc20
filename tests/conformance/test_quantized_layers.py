"""Whole layers over slots of codes hold the same tokens on every backend, under every policy."""

import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep import backends
from kvkeep.backends.triton import prefill_ops
from kvkeep.kv_bits import KV_BITS
from kvkeep.policies._head_budgets import under
from kvkeep.types import AttentionOptions, Phase

from .cases import BACKENDS, SLOW, backend_of, device_of

STEPS, FEW = 20, 4
SHARED = ["h2o+ada:0.1", "snapkv+ada:0.1", "leverage+ada:0.1", "knorm+ada:0.1", "random+ada:0.1"]
"""Policies under rules that give heads budgets of their own."""
POLICIES = [*kvkeep.available_policies(), *SHARED]
OPTIONS = {
    **dict.fromkeys(("snapkv", "restkv"), "window=4,decode=score"),
    **dict.fromkeys(("adakv", "defensivekv"), "window=4,decode=score"),
    "ahakv": "recent=3",
    "pyramidkv": "window=4,decode=score",
    "nacl": "sinks=1,recent=2,decode=score",
    "h2o": "sinks=2,recent=3",
}
JUDGED = [name for name in BACKENDS if name != "reference"]
CASES = [(name, policy, bits) for name in JUDGED for policy in POLICIES for bits in KV_BITS]


def policy_of(text):
    name, _, rule = text.partition("+")
    return under(kvkeep.parse(f"{name}:{OPTIONS[name]}" if name in OPTIONS else name), rule or None)


def run(name, policy, kv_bits, steps):
    """A ragged prompt, a second chunk of it, and single tokens."""
    g, device = torch.Generator().manual_seed(3), device_of(name)
    found = policy_of(policy)
    layer = kvkeep.Layer(found, 20 if found.evicts else 70, kv_bits=kv_bits)
    for step in range(steps):
        T = (26, 5)[step] if step < 2 else 1
        q, k, v = (torch.randn(2, heads, T, 16, generator=g).to(device) for heads in (6, 2, 2))
        real = torch.ones(2, T, dtype=torch.bool, device=device)
        real[1, : 9 if step == 0 else 0] = False
        phase = Phase.DECODE if step > 1 else Phase.PREFILL
        out = layer.step(q, k, v, options=AttentionOptions(scaling=0.5), phase=phase, real=None if step else real)
        positions, order = layer.store.positions.sort(dim=-1)  # slots have no order
        codes = [layer.block.opened().store.per_row()[part] for part in ("keys", "values")]
        held = [one.gather(2, order[..., None].expand(*order.shape, one.shape[-1])) for one in codes]
        yield out[0].cpu(), positions.cpu(), [one.masked_fill(positions[..., None] < 0, 0).cpu() for one in held]


def chosen(case):
    """Every policy and all bits on torch and the native kernel in turn."""
    name, policy, bits = case
    return name not in SLOW and (POLICIES.index(policy) + JUDGED.index(name) + [*KV_BITS].index(bits)) % 6 == 0


@pytest.mark.parametrize(("name", "policy", "kv_bits"), sweep(CASES, chosen))
def test_a_layer_of_codes_holds_the_tokens_of_the_definition(name, policy, kv_bits, monkeypatch):
    backend_of(name)
    monkeypatch.setattr(prefill_ops, "attend", lambda *arguments, **others: None)  # `test_backends` asks it
    monkeypatch.setitem(backends.KINDS, name, BACKENDS[name])
    steps = FEW if name in SLOW else STEPS
    monkeypatch.setenv(backends.SWITCH, "reference")
    wanted = list(run("reference", policy, kv_bits, steps))
    monkeypatch.setenv(backends.SWITCH, name)
    for (out, positions, codes), (want, want_positions, want_codes) in zip(
        run(name, policy, kv_bits, steps), wanted, strict=True
    ):
        assert torch.equal(positions, want_positions)
        torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4)
        assert all(torch.equal(*pair) for pair in zip(codes, want_codes, strict=True))

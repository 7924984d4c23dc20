"""Heads with budgets of their own over slots of 8 and 4 bits: bytes, codes that never change, bad keys, outliers."""

import itertools
import math

import pytest
import torch
from test_kv_bits import BUDGET, OPTIONS, config, losses_beside_outliers, steps
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep import BoundedCache, Layer, UnsupportedModelError
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.kv_bits import KV_BITS, TRANSFORMS
from kvkeep.planning.cost import LayerShape, block_bytes
from kvkeep.policies._head_budgets import under
from kvkeep.types import Phase

UNEVEN = [(6, 10)]
"""Budgets of two heads, for every row."""

SHARED = ["adakv:window=2,alpha=0.1", "adakv:window=2,alpha=0.1,decode=score", "defensivekv:window=2", "knorm+ada:0.1"]


def layers(policy, kv_bits, **options):
    """`steps` under a policy that shares a budget among heads, or a rule that makes it."""
    name, _, rule = policy.partition("+")
    return steps(under(kvkeep.parse(name), rule or None), kv_bits, **options)


@pytest.mark.parametrize("dim", [6, 32, 80, 128])
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("kv_bits", [None, *KV_BITS])
def test_planned_bytes_are_those_of_the_tensors(policy, kv_bits, dim):
    *_, (layer, _) = steps(policy, kv_bits, dim=dim, budget=UNEVEN)
    states = len(layer.policy.slots)
    planned = block_bytes(LayerShape(2, dim, dim), UNEVEN[0], 4, states=states, kv_bits=kv_bits, own_budgets=2)
    memory = layer.memory()
    assert memory.allocated_bytes == 2 * planned
    assert memory.full_bytes == 2 * 22 * 2 * 2 * dim * 4
    slot = LayerShape(1, dim, dim).slot_bytes(4, kv_bits) + 4 + 4 * states
    assert memory.occupied_bytes == pytest.approx(2 * sum(UNEVEN[0]) * slot, rel=0.1)  # and a share of the ranges


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("policy", SHARED)
def test_the_codes_of_a_token_never_change(policy, chunk):
    """Neither another division of the slots nor a generated token rounds a kept token again."""
    seen, splits = {}, set()
    for layer, _ in layers(policy, "4", lengths=(12, 1, 7, 1, 1, 9, 1), prefill_chunk=chunk, dtype=torch.bfloat16):
        held = layer.block.opened().store.per_row()
        positions = held.pop("positions")
        splits.add(str(layer.block.budget.tolist()))
        for row, head, slot in itertools.product(*map(range, positions.shape)):
            if (position := int(positions[row, head, slot])) >= 0:
                codes = [tensor[row, head, slot].clone() for name, tensor in held.items() if name not in TRANSFORMS]
                before = seen.setdefault((row, head, position), codes)
                assert all(torch.equal(*pair) for pair in zip(before, codes, strict=True))
    assert len(seen) > 2 * 2 * BUDGET
    assert len(splits) > 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize(
    "policy", ["h2o:recent=2", "snapkv:window=2", "keydiff", "streaming_llm", "random", "leverage"]
)
@pytest.mark.parametrize(("step", "of_values"), [(0, False), (0, True), (2, False), (4, True)])
def test_a_key_that_is_no_number_takes_no_slot_and_harms_no_other_head(policy, wrong, step, of_values):
    def spoil(number, keys, values):
        if number == step:
            (values if of_values else keys)[0, 1, 0, 5] = wrong

    first = (0, 12, 13, 14, 15, 20)[step]  # the token's position
    spoiled, clean = (steps(policy, "4", spoil=one, budget=UNEVEN) for one in (spoil, None))
    for (layer, out), (other, want) in zip(spoiled, clean, strict=True):
        positions, wanted = layer.store.positions, other.store.positions
        for found, expected in ((out[1], want[1]), (out[0, :2], want[0, :2])):  # sums end elsewhere beside another slot
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert torch.equal(positions[1], wanted[1])
        assert torch.equal(positions[0, 0], wanted[0, 0])
        assert first not in positions[0, 1]
        assert layer.store.slots().keys.isfinite().all()
    assert out.isfinite().all()
    assert (layer.store.positions[0, 1] >= 0).any()


@pytest.mark.parametrize("policy", SHARED)
@pytest.mark.parametrize("step", [0, 2, 4])
def test_heads_that_share_a_budget_outlive_a_key_that_is_no_number(policy, step):
    def spoil(number, keys, values):
        if number == step:
            keys[0, 1, 0, 5] = math.nan

    first = (0, 12, 13, 14, 15)[step]
    for (layer, out), (clean, want) in zip(layers(policy, "4", spoil=spoil), layers(policy, "4"), strict=True):
        torch.testing.assert_close(out[1], want[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(layer.block.budget[1], clean.block.budget[1])
        assert first not in layer.store.positions[0, 1]
        assert layer.store.slots().keys.isfinite().all()
    assert out.isfinite().all()
    assert (layer.store.positions[0] >= 0).any(dim=-1).all()


def test_a_bad_key_takes_no_slot_where_tokens_go_before_all_layers_have_attended():
    g, together = torch.Generator().manual_seed(4), SharedBudget(range(6))
    policy = under(kvkeep.parse("snapkv:window=2"), "global:0.1")
    layers = [Layer(policy, 4, index=i, together=together, kv_bits="4") for i in range(6)]
    for number, layer in enumerate(layers):
        new = [torch.randn(1, heads, 40, 32, generator=g) for heads in (4, 2, 2)]
        if number == 0:
            new[1][0, 1, -1, 5] = math.nan  # one of the newest tokens, which stay whatever their score is
        layer.step(*new, options=OPTIONS, phase=Phase.PREFILL)
        if number == 4:
            assert together._waiting[0].score.shape[-1] < 40
    first, bad = layers[0].store.positions[0].tolist()
    assert 39 in first
    assert 38 in bad
    assert 39 not in bad


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize("policy", SHARED)
def test_a_budget_that_holds_everything_is_the_full_cache_of_these_bits(policy, kv_bits):
    for (_, out), (_, want) in zip(layers(policy, kv_bits, budget=64), steps("full", kv_bits, budget=64), strict=True):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", SHARED)
def test_a_row_of_a_batch_is_the_row_alone(policy):
    """Bit for bit but where a chunk is read behind slots, which are as many as the row with the longest range has."""
    g = torch.Generator().manual_seed(5)
    name, _, rule = policy.partition("+")
    made = [Layer(under(kvkeep.parse(name), rule or None), BUDGET, kv_bits="4", prefill_chunk=5) for _ in range(4)]
    for T in (14, 1, 1, 6, 1, 1):
        new = [torch.randn(3, heads, T, 32, generator=g) for heads in (4, 2, 2)]
        phase, near = (Phase.DECODE, 0.0) if T == 1 else (Phase.PREFILL, 1e-5)
        out = made[3].step(*new, options=OPTIONS, phase=phase)
        for row in range(3):
            alone = made[row].step(*(x[row : row + 1] for x in new), options=OPTIONS, phase=phase)
            torch.testing.assert_close(out[row], alone[0], rtol=near, atol=near)
            assert torch.equal(made[row].block.budget[0], made[3].block.budget[row])
            held, n = made[row].store.positions[0], made[row].store.capacity
            assert torch.equal(held, made[3].store.positions[row, :, :n])
    assert len({str(split) for split in made[3].block.budget.tolist()}) > 1


@pytest.mark.parametrize("policy", ["h2o:recent=2", "snapkv:window=2", "leverage:sinks=1,recent=2"])
def test_a_sliding_window_expires_tokens_of_a_pool(policy):
    *_, (layer, out) = steps(policy, "4", lengths=(12, *[1] * 20), budget=UNEVEN, window=7)
    assert layer.store.positions.max() == 31
    assert int(layer.store.positions[layer.store.positions >= 0].min()) >= 31 - 7
    assert out.isfinite().all()


def test_a_head_dim_that_cannot_be_packed_is_refused_in_a_pool():
    with pytest.raises(UnsupportedModelError, match=r"head dim is 7, .* Give `kv_bits=8`"):
        next(steps("h2o", "4", dim=7, budget=UNEVEN))
    *_, (_, out) = steps("h2o", "8", dim=7, budget=UNEVEN)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"policy": "adakv:window=4"}, {"head_budget": "ada:0.2"}, {"head_budget": "global"}]
)
@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_a_cache_holds_fewer_bytes_whatever_rule_divides_it(options, kv_bits):
    net = kvkeep.attach(AutoModelForCausalLM.from_config(config(head_dim=64)).eval())
    sizes = {}
    for bits in (None, kv_bits):
        cache = BoundedCache(net.config, **{"policy": "h2o", "budget": 16, **options}, kv_bits=bits)
        net.generate(torch.arange(3, 43)[None], past_key_values=cache, max_new_tokens=3, do_sample=False)
        tensors = {x.data_ptr(): x for one in cache.bounded_layers().values() for x in one.block.per_row().values()}
        sizes[bits] = cache.memory().allocated_bytes
        assert sizes[bits] <= sum(x.untyped_storage().nbytes() for x in tensors.values())
        assert cache.snapshot().fingerprint.kv_bits == bits
    assert sizes[kv_bits] < {"8": 0.35, "k8v4": 0.29, "4": 0.24}[kv_bits] * sizes[None]


@pytest.mark.slow
def test_outlier_channels_cost_nothing_in_a_pool_because_keys_are_turned(monkeypatch):
    """Heads own ranges of a pool, and all tokens stay."""
    exact, turned, plain = losses_beside_outliers(monkeypatch, policy="snapkv", head_budget="ada")
    assert turned < exact + 0.1
    assert plain > exact + 0.35

"""One budget for the layers with full attention, and budgets of their own for those with sliding windows between them.

``tests/papers/test_global_windows.py`` has what is kept; here rows move, pause, fail, are copied and go on.
"""

import copy
from dataclasses import replace

import pytest
import torch

import kvkeep
from kvkeep import BoundedCache, BrokenCacheError, UnsupportedOperationError, backends
from kvkeep.cache import layer_layout
from kvkeep.engine import Engine, Request, swapping
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.joint_block import PartBlock
from kvkeep.kv.store import DenseStore
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import MemoryUsage, Phase

from .models import CONFIGS, DEVICE, model
from .test_equal import prompt_of

RULE, POLICY, BUDGET, NEW = "global:0.1", "snapkv:window=3", 10, 6
NAMES = ["gemma2", "gemma3"]
"""One layer with full attention after one with a window; two among three of them."""

KINDS = [POLICY, "h2o:recent=2", "adakv:window=4", "leverage:sinks=1,recent=2,rotated=true"]


def cache_of(name="gemma3", policy=POLICY, budget=BUDGET, **options):
    return BoundedCache(model(name).config, policy, budget, **{"head_budget": RULE, **options})


def engine_of(name="gemma3", policy=POLICY, **options):
    given = {"budget": BUDGET, "head_budget": RULE, "rows": 2, **options}
    return Engine(model(name), policy=policy, **given)


def batch(rows=2, length=40):
    return torch.tensor([prompt_of(i, length) for i in range(rows)], device=DEVICE)


@torch.inference_mode()
def feed(cache, *pieces, name="gemma3"):
    for number, piece in enumerate(pieces):
        cache.phase = Phase.PREFILL if number == 0 or len(piece[0]) > 1 else Phase.DECODE
        logits = model(name)(input_ids=torch.as_tensor(piece, device=DEVICE), past_key_values=cache).logits
    return logits[:, -1]


def alone(one, *, name="gemma3", policy=POLICY, chunk=None, **options):
    """The greedy tokens of a request with a cache of its own, the prompt fed in the same chunks."""
    cache = cache_of(name, one.policy or policy, one.budget or BUDGET, pins=[one.pins], **options)
    pieces, found = torch.tensor([one.prompt]).split(chunk or len(one.prompt), dim=1), []
    logits = [feed(cache, piece, name=name) for piece in pieces][-1]
    while len(found) < NEW:
        found.append(int(logits.argmax()))
        cache.phase = Phase.DECODE
        with torch.inference_mode():
            logits = model(name)(input_ids=torch.tensor([found[-1:]], device=DEVICE), past_key_values=cache).logits[
                :, -1
            ]
    return tuple(found)


def asked(count=6, policies=(None,), **options):
    given = {"sampling": SamplingParams(max_new_tokens=NEW), "ignore_end": True, **options}
    policies = policies * count
    return [Request(prompt=prompt_of(i, 12 + 9 * i % 31), policy=policies[i], **given) for i in range(count)]


def tokens(engine, requests):
    return [result.token_ids for result in engine.generate(requests)]


def held(cache):
    """The positions in the slots of each head, by layer and row."""
    layers = [cache.positions(number).tolist() for number in cache.bounded_layers()]
    return [[[sorted(at for at in head if at >= 0) for head in row] for row in layer] for layer in layers]


def kinds(name):
    """Whether each layer has full attention."""
    return [one == "full_attention" for one in CONFIGS[name].layer_types]


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_full_attention_share_a_pool_and_the_others_have_equal_heads(name):
    cache = cache_of(name, "adakv:window=3")  # whose own rule would divide the budget in layers with windows, too
    feed(cache, batch(), [[1], [2]], name=name)
    layers, shares = list(cache.bounded_layers().values()), kinds(name)
    assert [isinstance(layer.block, PartBlock) for layer in layers] == shares
    assert [layer.policy.spreads is not None for layer in layers] == shares
    assert all(type(layer.store) is DenseStore for layer, full in zip(layers, shares, strict=True) if not full)
    pooled = [layer for layer, full in zip(layers, shares, strict=True) if full]
    assert len({layer.store.entries.data_ptr() for layer in pooled}) == 1
    assert pooled[0].store.entries.shape[1] == len(pooled) * 2 * (BUDGET + 1) + 1
    assert sum(int(layer.block.budget.sum()) for layer in pooled) == 2 * len(pooled) * 2 * BUDGET


@pytest.mark.long
@pytest.mark.parametrize("backend", sorted(backends.KINDS.keys() - {"triton"}))
def test_rows_of_other_policies_and_budgets_get_what_they_get_alone(backend, monkeypatch):
    monkeypatch.setenv(backends.SWITCH, backend)
    for name, chunk in zip(NAMES, (None, 5), strict=True):
        requests = [replace(one, budget=BUDGET - i % 3) for i, one in enumerate(asked(4, tuple(KINDS)))]
        engine = engine_of(name, rows=3, prefill_chunk=chunk)
        assert tokens(engine, requests) == [alone(one, name=name, chunk=chunk) for one in requests]


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_slots_of_few_bits(kv_bits):
    requests, engine = asked(2, (POLICY, "h2o:recent=2")), engine_of(kv_bits=kv_bits, prefill_chunk=7)
    assert tokens(engine, requests) == [alone(one, chunk=7, kv_bits=kv_bits) for one in requests]
    assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["true", "slot"])
def test_pins_and_slot_positions(positions):
    requests = asked(4, pins=((2, 3), (5, 7)))
    engine = engine_of("gemma2", positions=positions, prefill_chunk=5)
    want = [alone(one, name="gemma2", chunk=5, positions=positions) for one in requests]
    assert tokens(engine, requests) == want


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_tensors_and_do_not_depend_on_the_split(name):
    found, splits = set(), set()
    for seed in range(3):
        cache = cache_of(name)
        feed(cache, torch.tensor([prompt_of(seed, 40)]), [[1]], name=name)
        layers = list(cache.bounded_layers().values())
        pool = next(layer.block.whole for layer in layers if isinstance(layer.block, PartBlock))
        blocks = [pool, *(layer.block for layer in layers if not isinstance(layer.block, PartBlock))]
        real = sum(x.numel() * x.element_size() for block in blocks for x in block.per_row().values())
        assert cache.memory().allocated_bytes == real
        assert cache.memory().full_bytes == 41 * len(layers) * 2 * 2 * 8 * 4
        found.add(real)
        splits.add(tuple(pool.budget[0].tolist()))
    assert len(found) == 1
    assert len(splits) == 3
    rows = KVManager(model(name), kvkeep.parse(POLICY), BUDGET, head_budget=RULE)
    assert found == {rows.row_bytes}
    rows.allocate(3)
    assert rows.memory().allocated_bytes == 3 * rows.row_bytes
    assert sum((rows.memory_of(row) for row in range(3)), MemoryUsage()) == rows.memory()
    assert sum((block.memory() for block in rows.blocks_of(0)), MemoryUsage()) == rows.memory_of(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_holds_everything_is_the_full_cache(name):
    one = asked(3)[2]
    assert alone(one, name=name, head_budget="global:1") == alone(one, name=name, head_budget="uniform")
    full, all_of_it = cache_of(name, "full", 64, head_budget=None), cache_of(name, budget=64)
    for cache in (full, all_of_it):
        feed(cache, batch(), [[1], [2]], name=name)
    assert held(full) == held(all_of_it)


def test_a_memory_goes_into_a_row_beside_others_and_through_a_file(tmp_path):
    cache = cache_of(pins=[[(3, 6)], [], [(1, 2), (9, 11)]])
    feed(cache, batch(3))
    cache.snapshot(2).save(tmp_path / "memory")
    snapshot, other = kvkeep.Snapshot.load(tmp_path / "memory"), cache_of()
    feed(other, batch(3).flip(0), [[1], [2], [3]])
    before = [[layer[row] for layer in held(other)] for row in (0, 2)]
    other.restore(1, snapshot)
    assert [[layer[row] for layer in held(other)] for row in (0, 2)] == before
    assert [layer[1] for layer in held(other)] == [layer[2] for layer in held(cache)]
    again = BoundedCache.from_snapshots(model("gemma3").config, [snapshot, snapshot])
    torch.testing.assert_close(feed(again, [[4, 5]] * 2)[0], feed(cache, [[4, 5]] * 3)[2])
    assert [layer[0] for layer in held(again)] == [layer[2] for layer in held(cache)]
    other.reorder_cache(torch.tensor([1, 1, 0]))
    assert other.snapshot(0).contents.layers[1].pins == ((1, 2), (9, 11))
    with pytest.raises(kvkeep.SnapshotError, match="head_budget"):
        cache_of(head_budget="ada:0.1").restore(0, snapshot)


def test_rows_are_selected_in_all_layers():
    cache, ids = cache_of(budget=[10, 8, 9]), batch(3)
    feed(cache, ids)
    want = [[layer[row] for layer in held(cache)] for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert [[layer[row] for layer in held(cache)] for row in range(2)] == [want[2], want[1]]
    cache.batch_repeat_interleave(2)
    logits = feed(cache, [[5]] * 4)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[2], logits[3])


@pytest.mark.parametrize("layer", range(5))
def test_a_run_that_fails_in_any_layer_is_mended_by_a_reset_or_a_memory(layer, monkeypatch):
    cache, snapshots = cache_of(), []
    feed(cache, batch(1))
    snapshots.append(cache.snapshot())
    step = type(cache.bounded_layers()[0]).step

    def failing(self, *new, **given):
        if self._index == layer:
            raise RuntimeError("no memory")
        return step(self, *new, **given)

    def fail(ids):
        with monkeypatch.context() as patch:
            patch.setattr("kvkeep.cache.layer.Layer.step", failing)
            with pytest.raises(RuntimeError, match="no memory"):
                feed(cache, ids)
        if layer:
            with pytest.raises(BrokenCacheError):
                feed(cache, ids)

    fail(batch(1))
    cache.restore(0, snapshots[0])
    fresh = BoundedCache.from_snapshots(model("gemma3").config, snapshots)
    assert torch.equal(feed(cache, batch(1, 9)), feed(fresh, batch(1, 9)))
    assert held(cache) == held(fresh)
    fail(batch(1))
    cache.reset()
    fresh = cache_of()
    assert torch.equal(feed(cache, batch(1)), feed(fresh, batch(1)))
    assert held(cache) == held(fresh)


@pytest.mark.slow
def test_rows_that_take_turns_and_move_get_what_they_get_alone(monkeypatch):
    monkeypatch.setattr(swapping, "SHARE", 1e9)
    monkeypatch.setattr(swapping, "LEAST", 1)
    requests, engine = asked(4, tuple(KINDS)), engine_of(host_rows=3, prefill_chunk=7)
    assert tokens(engine, requests) == [alone(one, chunk=7) for one in requests]
    assert engine._swapper.swaps > 4


@pytest.mark.slow
def test_sessions_rewind_and_go_on_in_rows_of_another_policy():
    session, sampling = engine_of().session(), SamplingParams(max_new_tokens=4)
    session.ask(prompt_of(1, 30), sampling)
    snapshot, fork = session.snapshot(), session.fork()[0]
    once = [session.ask(prompt_of(i, 9), sampling).token_ids for i in (2, 3)]
    session.rewind(snapshot)
    assert [session.ask(prompt_of(i, 9), sampling).token_ids for i in (2, 3)] == once
    assert fork.ask(prompt_of(2, 9), sampling).token_ids == once[0]
    with engine_of(policy="leverage:sinks=1,recent=2,rotated=true").session(
        policy=POLICY, snapshot=snapshot
    ) as elsewhere:
        assert elsewhere.ask(prompt_of(2, 9), sampling).token_ids == once[0]


def test_a_model_of_windows_alone_has_nothing_to_share():
    config = copy.deepcopy(CONFIGS["gemma3"])
    config.layer_types = ["sliding_attention"] * 5
    with pytest.raises(
        UnsupportedOperationError, match=r"all of whose layers have sliding windows: .* nothing to share"
    ):
        BoundedCache(config, POLICY, BUDGET, head_budget="global")
    assert BoundedCache(config, POLICY, BUDGET, head_budget="ada").policy.spreads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", [None, RULE])
def test_layers_with_windows_leave_their_slots_to_the_others(name, rule):
    found, equal = (cache_of(name, head_budget=rule, layer_budget=how) for how in ("sliding:0.5", "uniform"))
    for cache in (found, equal):
        feed(cache, batch(), name=name)
    slots, before = ([sum(map(len, row)) for layer in held(cache) for row in layer] for cache in (found, equal))
    for full, now, then in zip([one for one in kinds(name) for _ in range(2)], slots, before, strict=True):
        assert now > then if full else now < then, (now, then)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, RULE])
def test_an_engine_gives_the_tokens_of_a_cache_where_windows_leave_slots(rule):
    how = {"head_budget": rule, "layer_budget": "sliding:0.5"}
    requests = asked()
    assert tokens(engine_of(**how), requests) == [alone(request, **how) for request in requests]


def test_a_memory_in_which_heads_share_is_refused_where_they_cannot(monkeypatch):
    """As in a model that is split over processes, where the policy's own rule gives way."""
    shared = Engine(model("gemma3"), policy="reread:later", budget=24, rows=1).session()
    shared.ask(prompt_of(1, 60), SamplingParams(max_new_tokens=2))
    monkeypatch.setattr(layer_layout, "joint_refusal", lambda **_: "a model that is split over processes")
    elsewhere = Engine(model("gemma3"), policy="reread:later", budget=24, rows=1)
    (found,) = elsewhere.generate(Request(prompt=prompt_of(2, 9), snapshot=shared.snapshot()))
    assert "not split over processes" in found.error


@pytest.mark.parametrize("name", NAMES)
def test_equal_layers_leave_a_policy_its_own_rule_for_heads(name):
    cache = cache_of(name, policy="reread:later", layer_budget="uniform")
    feed(cache, batch(), name=name)
    shares = [layer.policy.shares_layers for layer in cache.bounded_layers().values()]
    assert shares == kinds(name)


@pytest.mark.slow
def test_a_policy_s_own_rule_for_heads_gives_way_where_a_cache_cannot_have_it():
    """`reread:later` shares the slots of all layers; in chunks of a cache its heads are equal, and an engine's
    tokens are a cache's."""
    ours, chunked = (BoundedCache(model("gemma3").config, "reread:later", 24, prefill_chunk=n) for n in (None, 8))
    for cache in (ours, chunked):
        feed(cache, batch())
    assert any(layer.policy.shares_layers for layer in ours.bounded_layers().values())
    assert not any(layer.policy.shares_layers for layer in chunked.bounded_layers().values())
    with pytest.raises(UnsupportedOperationError, match="prefill_chunk"):
        BoundedCache(model("gemma3").config, "reread", 24, prefill_chunk=8, head_budget="global")
    requests = asked()
    made = Engine(model("gemma3"), policy="reread:later", budget=24, rows=2)
    want = [alone(replace(request, budget=24), policy="reread:later", head_budget=None) for request in requests]
    assert tokens(made, requests) == want

"""Heads with budgets of their own over slots of 8 and 4 bits in an engine: rows, files and turns change no token."""

import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep import BoundedCache
from kvkeep.engine import Engine, Request, swapping
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv_bits import KV_BITS

from .models import model
from .test_equal import prompt_of
from .test_head_budgets import BUDGET, KINDS, NEW, alone, asked, from_a_file, profile, run
from .test_leftovers import poison

__all__ = ["profile"]

RULES = ["ada:0.1", "global:0.1", "profile"]


def rule_of(kind, file):
    return file if kind == "profile" else kind


def engine_of(rule, kv_bits, policy=KINDS[0], **options):
    given = {"budget": BUDGET, "rows": 2, "head_budget": rule, **options}
    return Engine(model("llama"), policy=policy, kv_bits=kv_bits, **given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kv_bits", "chunk"),
    sweep([(k, b, c) for k in RULES for b in KV_BITS for c in (None, 5)], lambda case: case[1:] == ("4", 5)),
)
def test_a_row_gets_what_it_gets_alone_beside_other_policies_and_splits(kind, kv_bits, chunk, profile):
    rule, requests = rule_of(kind, profile), asked(KINDS, budgets=(BUDGET, BUDGET - 2))
    engine = engine_of(rule, kv_bits, rows=3, prefill_chunk=chunk)
    for one, got in zip(requests, run(engine, requests), strict=True):
        assert got == alone(one.prompt, one.policy, rule, budget=one.budget, chunk=chunk, kv_bits=kv_bits)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_a_row_has_the_bytes_that_it_is_said_to_have(kind, profile):
    rule, sizes = rule_of(kind, profile), {}
    for kv_bits in (None, "8", "4"):
        engine = engine_of(rule, kv_bits)
        engine.generate(asked(KINDS[:1]))
        sizes[kv_bits] = engine.row_bytes
        assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes
        cache = alone(prompt_of(1, 20), KINDS[0], rule, kv_bits=kv_bits)[1]
        assert cache.memory().allocated_bytes == engine_of(rule, kv_bits, rows=1).row_bytes
    assert sizes["4"] < sizes["8"] < sizes[None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_sequences_take_turns_in_the_rows(kind, profile, monkeypatch):
    monkeypatch.setattr(swapping, "SHARE", 1e9)
    monkeypatch.setattr(swapping, "LEAST", 1)
    rule, requests = rule_of(kind, profile), asked(KINDS[:3])
    engine = engine_of(rule, "4", rows=1, host_rows=2)
    want = [alone(one.prompt, one.policy, rule, kv_bits="4")[0] for one in requests]
    assert [one.token_ids for one in engine.generate(requests)] == want
    assert engine._swapper.swaps > 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv:window=4", "leverage:sinks=1,recent=2"])
@pytest.mark.parametrize("kind", RULES)
def test_memory_goes_on_bit_for_bit_from_a_file(kind, policy, profile, tmp_path):
    rule = rule_of(kind, profile)
    snapshot, again = from_a_file(tmp_path / "file", *(engine_of(rule, "4", policy) for _ in range(2)))
    cache = BoundedCache.from_snapshots(model("llama").config, [again, snapshot])
    for layer, kept in zip(cache.bounded_layers().values(), snapshot.contents.layers, strict=True):
        opened = layer.block.opened().store.per_row()
        for name in ("keys", "key_scales", "values", "value_scales", "positions"):
            there = kept.positions >= 0
            for row in opened[name][:, :, : kept.used]:
                assert torch.equal(row[there], kept.tensors[f"store.{name}"][there])
    with pytest.raises(kvkeep.SnapshotError, match=r"kv_bits \(4 in the snapshot, 8 here\)"):
        BoundedCache(model("llama").config, policy, BUDGET, head_budget=rule, kv_bits=8).restore(0, again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_what_an_emptied_slot_was_left_with_does_not_matter(kind, profile):
    rule, requests, found = rule_of(kind, profile), asked(KINDS[:4]), {}
    engine = engine_of(rule, "k8v4", prefill_chunk=5)
    numbers = [engine.add(one) for one in requests]
    while engine.busy:
        poison(engine._kv._blocks)
        found |= {event.id: event.result.token_ids for event in engine.step() if event.result}
    for number, one in zip(numbers, requests, strict=True):
        assert found[number] == alone(one.prompt, one.policy, rule, chunk=5, kv_bits="k8v4")[0]


@pytest.mark.slow
def test_policies_with_and_without_pools_change_places():
    requests = asked(["h2o:recent=2", "adakv:window=4", "defensivekv:window=4", "h2o:recent=2"])
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, rows=2, kv_bits=8)
    for one, got in zip(requests, run(engine, requests), strict=True):
        assert got == alone(one.prompt, one.policy, None, kv_bits=8)[0]


@pytest.mark.slow
@pytest.mark.parametrize("pins", [(), ((2, 3), (9, 12))])
def test_pins_and_a_fork_of_a_memory(pins):
    """Two questions about one prefix, whose pinned tokens stay in every head."""
    engine = engine_of("ada:0.1", "4", "snapkv:window=2")
    memory = engine.prefix(prompt_of(4, 30), pins=pins)
    new = SamplingParams(max_new_tokens=NEW)
    both = [Request(prompt=prompt_of(n, 4), snapshot=memory, sampling=new, ignore_end=True) for n in (1, 2)]
    apart = [run(engine_of("ada:0.1", "4", "snapkv:window=2"), [one])[0] for one in both]
    assert run(engine, both) == apart
    assert apart[0] != apart[1]
    for layer in memory.contents.layers:
        for head in layer.positions.tolist():
            assert {at for span in pins for at in range(*span)} <= set(head)


@pytest.mark.slow
def test_memory_that_was_made_in_a_pool_goes_on_in_slots_side_by_side():
    policy, prompt = "h2o:recent=2", prompt_of(6, 30)
    new, given = SamplingParams(max_new_tokens=NEW), {"budget": BUDGET, "rows": 1, "kv_bits": "4"}
    in_pool, apart = (Engine(model("llama"), policy=one, **given) for one in ("adakv:window=4", policy))
    memory = in_pool.prefix(prompt, policy=policy)
    asked_of = [Request(prompt=(5, 6), snapshot=memory, policy=policy, sampling=new, ignore_end=True)]
    assert run(in_pool, asked_of) == run(apart, asked_of)
    assert memory.contents.layers[0].tensors["store.keys"].dtype == torch.uint8


@pytest.mark.slow
def test_beams_and_reset_move_codes_with_their_rows():
    net, ids = model("llama"), torch.tensor([prompt_of(7, 30), prompt_of(8, 30)])
    for rule in ("ada:0.1", "global:0.1"):
        cache = BoundedCache(net.config, "h2o:recent=2", BUDGET, head_budget=rule, kv_bits=4)
        given = {"past_key_values": cache, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
        first = net.generate(ids, **given, eos_token_id=None)
        cache.reset()
        assert torch.equal(first, net.generate(ids, **given, eos_token_id=None))

"""``generate``, unmodified, with a bounded cache against transformers' own cache, in many model families."""

import functools

import pytest
import torch
from models import CONFIGS, build, padded_batch
from sweeps import sweep

import kvkeep

NEW = 12


def greedy(model, ids, mask, cache=None):
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("family", CONFIGS)
def test_budget_of_the_whole_length_is_the_full_cache(family):
    model = build(family)
    ids, mask = padded_batch()
    want = greedy(model, ids, mask)
    kvkeep.attach(model)
    for policy in ("full", "h2o"):
        for chunk in (None, 7):
            cache = kvkeep.BoundedCache(model.config, policy=policy, budget=ids.shape[1] + NEW, prefill_chunk=chunk)
            got = greedy(model, ids, mask, cache)
            assert torch.equal(got.sequences, want.sequences), (policy, chunk)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)


SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
EVICTING = [name for name, policy in kvkeep.available_policies().items() if policy.evicts]
EVERYWHERE = ["local", "streaming_llm", "h2o", "tova", "scissorhands"]
OF_THEIR_OWN = ("llama", "gemma2", "gpt-oss")
"""Families that attend differently: plainly, with soft caps in sliding windows, with sinks."""
PAIRS = [
    *((family, policy) for family in CONFIGS for policy in EVERYWHERE),
    *(("llama", policy) for policy in EVICTING if policy not in EVERYWHERE),
]


def chosen(pair):
    """Every policy with each kind of attention, every family with and without sums that attention has to report."""
    family, policy = pair
    place = [*CONFIGS].index(family)
    return family in OF_THEIR_OWN or policy in (EVERYWHERE[place % 2], EVERYWHERE[2 + place % 3])


@functools.cache
def attached(family, dtype=torch.float32):
    return kvkeep.attach(build(family, dtype))


def held(positions):
    return [sorted(position for position in head if position >= 0) for head in positions.tolist()]


@pytest.mark.long
@pytest.mark.parametrize(("family", "policy"), sweep(PAIRS, chosen))
def test_each_row_of_a_batch_gets_what_it_gets_alone(family, policy):
    # the keys of a repeated token have the same norm up to rounding, which in float32 may depend on the batch
    model = attached(family, torch.float64 if policy == "knorm" else torch.float32)
    policy = f"{policy}:{SMALL.get(policy, '')}"
    ids, mask = padded_batch()
    cache = kvkeep.BoundedCache(model.config, policy=policy, budget=9)
    together = greedy(model, ids, mask, cache).sequences[:, -NEW:]
    for row in range(len(ids)):
        prompt = ids[row : row + 1, mask[row] == 1]
        alone = kvkeep.BoundedCache(model.config, policy=policy, budget=9)
        assert torch.equal(greedy(model, prompt, None, alone).sequences[0, -NEW:], together[row])
        for layer in range(len(cache.layers)):
            assert held(alone.positions(layer)[0]) == held(cache.positions(layer)[row])


@pytest.mark.parametrize("family", CONFIGS)
def test_an_attached_model_without_a_bounded_cache_computes_what_it_did(family):
    model = build(family)
    ids, mask = padded_batch()
    want = greedy(model, ids, mask)
    want_logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    kvkeep.attach(model)
    got = greedy(model, ids, mask)
    assert torch.equal(got.sequences, want.sequences)
    got_logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got_logits[mask == 1], want_logits[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_half_precision_logits_are_those_of_transformers_within_the_dtype(family, dtype, tolerance):
    ids, mask = padded_batch()
    model = attached(family, dtype)
    cache = kvkeep.BoundedCache(model.config, policy="h2o", budget=64)
    got = model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits[:, -1].float()
    want = build(family, dtype)(input_ids=ids, attention_mask=mask).logits[:, -1].float()
    assert cache.layers[0].layer.store.slots().keys.dtype == dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("policy", ["h2o:recent=2,sinks=1,graduate=replace", "streaming_llm", "random:mode=reservoir"])
def test_rows_in_chunks_and_half_precision_equal_rows_alone(family, dtype, policy):
    model = attached(family, dtype)
    ids, mask = padded_batch()
    cache = kvkeep.BoundedCache(model.config, policy=policy, budget=[7, 9, 11], prefill_chunk=5)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    for row, budget in enumerate((7, 9, 11)):
        alone = kvkeep.BoundedCache(model.config, policy=policy, budget=budget, prefill_chunk=5)
        model(input_ids=ids[row : row + 1, mask[row] == 1], past_key_values=alone)
        for layer in range(2):
            held = cache.positions(layer)[row].sort(dim=-1).values[:, -budget:]
            assert torch.equal(alone.positions(layer)[0].sort(dim=-1).values[:, -budget:], held)

"""Policies for questions that come later, in whole models: turns, beams, windows, odd rotations, tiny budgets."""

import pytest
import torch
from models import GATED, build
from sweeps import sweep
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep

POLICIES = ["leverage", "blend", "reread", "expected_attention", "restkv:window=3", "keydiff:document", "snapkv:late"]
POLICIES += ["defensivekv:window=3", "rkv:window=3,buffer=4", "triattention:buffer=4"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = ["llama", "mistral-window", "gemma2", "gpt-neox", "yarn"]
CASES = [(name, policy) for name in MODELS for policy in POLICIES]


def made(name):
    if name != "yarn":
        return build(name)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**GATED, "rope_parameters": YARN})).eval()


def ragged():
    """Rows of 40, 20 and one token, padded on the left."""
    ids, mask = torch.randint(3, 61, (3, 40), generator=torch.Generator().manual_seed(0)), torch.ones(3, 40).long()
    mask[1, :20] = 0
    mask[2, :39] = 0
    return ids, mask


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy"), sweep(CASES, lambda case: case[0] in ("llama", "yarn")))
@pytest.mark.parametrize("positions", ["true", "slot"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_ragged_rows_in_two_turns_hold_their_budget_and_numbers(name, policy, positions, chunk):
    model = kvkeep.attach(made(name))
    cache = kvkeep.BoundedCache(model.config, policy, [20, 24, 30], prefill_chunk=chunk, positions=positions)
    ids, mask = ragged()
    options = {"past_key_values": cache, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=9, **options)
    ids, mask = torch.cat([out, ids[:, :7]], dim=1), torch.cat([mask, torch.ones(3, 16).long()], dim=1)
    assert model.generate(ids, attention_mask=mask, max_new_tokens=5, **options).shape == (3, 61)
    for layer in cache.bounded_layers().values():
        held = layer.store.positions >= 0
        heads = held.shape[1] * torch.tensor([20, 24, 30])
        assert (held.sum(dim=(1, 2)) <= heads).all()
        if not cache.policy.spreads:
            assert (held.sum(dim=-1) <= torch.tensor([[20], [24], [30]])).all()
        for state, tensor in layer.state.items():
            assert (tensor if state in layer.block.heads else tensor[held]).isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_beams_and_resets(policy):
    model = kvkeep.attach(build("llama"))
    ids, mask = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    cache = kvkeep.BoundedCache(model.config, policy, 20)
    first = model.generate(ids, past_key_values=cache, **options)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), first)


def test_frequencies_that_change_with_the_text_are_refused_with_a_remedy():
    config = LlamaConfig(**{**GATED, "rope_parameters": DYNAMIC})
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"'llama' model: it has 'dynamic' embeddings.*rotated=true"):
        kvkeep.BoundedCache(config, "leverage", 16)
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"has 'dynamic' embeddings, whose .*leverage"):
        kvkeep.BoundedCache(config, "reread", 16)
    kvkeep.BoundedCache(config, "leverage:rotated=true", 16)


@pytest.mark.parametrize("policy", ["leverage", "blend", "reread", "expected_attention", "rkv", "triattention", "vase"])
@pytest.mark.parametrize("budget", [4, 5, 6])
def test_the_smallest_budgets(policy, budget):
    """Sinks fill nearly all of the budget; a prompt of one token, and a long one, and generated tokens pass."""
    model = kvkeep.attach(build("llama"))
    for n in (1, 2, 50):
        cache = kvkeep.BoundedCache(model.config, policy, budget)
        ids = torch.arange(3, 3 + n)[None]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, past_key_values=cache, **options)
        assert all(int((cache.positions(layer) >= 0).sum(-1).max()) <= budget for layer in cache.bounded_layers())

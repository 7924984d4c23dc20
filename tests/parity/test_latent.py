"""Latent attention (DeepSeek): newer versions of transformers cache latents, which the model expands to keys."""

import pytest
import torch
from models import COMMON, padded_batch
from transformers import AutoModelForCausalLM, DeepseekV3Config

import kvkeep

NEW = 10


def build(**more):
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **COMMON,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        **more,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("chunk", [None, 7])
def test_latents_are_expanded_before_they_are_stored(chunk):
    model, (ids, mask) = build(), padded_batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    want = model.generate(ids, **how)
    kvkeep.attach(model)
    cache = kvkeep.BoundedCache(model.config, budget=64, prefill_chunk=chunk)
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), want)
    assert cache.bounded_layers()[0].store.slots().keys.shape[1::2] == (4, 12)
    small = kvkeep.BoundedCache(model.config, budget=8, prefill_chunk=chunk)
    model.generate(ids, past_key_values=small, **how)
    assert ((small.positions(1) >= 0).sum(-1) == 8).all()


def test_the_engine_gives_what_generate_gives():
    model, (ids, _) = kvkeep.attach(build()), padded_batch(rows=1)
    cache = kvkeep.BoundedCache(model.config, budget=9)
    want = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    requests = [kvkeep.Request(prompt=tuple(ids[0].tolist()), sampling=kvkeep.SamplingParams(max_new_tokens=NEW))] * 2
    results = kvkeep.Engine(model, budget=9, rows=2, prefill_chunk=None).generate(requests)
    assert [list(one.token_ids) for one in results] == [want.tolist()] * 2


def test_a_model_that_attends_to_latents_by_itself_is_refused():
    model, (ids, _) = build(), padded_batch(rows=1)  # not attached
    with pytest.raises(kvkeep.UnsupportedModelError, match="computes attention itself"):
        model(input_ids=ids, past_key_values=kvkeep.BoundedCache(model.config, budget=64))

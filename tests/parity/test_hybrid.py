"""Models that mix attention with linear or convolution layers: the latter keep their own, already constant, state."""

import pytest
import torch
from models import GATED, padded_batch
from transformers import AutoModelForCausalLM, Lfm2Config, Qwen3NextConfig

import kvkeep

NEW = 10

CONFIGS = {
    "lfm2": lambda: Lfm2Config(
        **{**GATED, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], block_ff_dim=48
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **GATED,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_only_the_attention_layers_are_bounded(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager").eval()
    ids, _ = padded_batch()
    ids = ids.masked_fill(ids == 0, 5)
    how = {"max_new_tokens": NEW, "do_sample": False}
    want = model.generate(ids, **how)
    kvkeep.attach(model)
    assert torch.equal(model.generate(ids, past_key_values=kvkeep.BoundedCache(model.config, budget=64), **how), want)
    cache = kvkeep.BoundedCache(model.config, budget=8)
    model.generate(ids, past_key_values=cache, **how)
    attention = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert list(cache.bounded_layers()) == attention
    assert ((cache.positions(attention[0]) >= 0).sum(-1) == 8).all()

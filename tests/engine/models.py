"""Tiny random models, and what a request gets alone."""

import functools

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config

import kvkeep
from kvkeep.policies.base import Policy

VOCABULARY = 61

CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    ),
    "qwen3": Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    ),
    "gemma2": Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=10,
        max_position_embeddings=256,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


@functools.cache
def model(name):
    """A random model whose logits are far apart, so that rounding decides nothing; in float64 as ``NAME-double``."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(CONFIGS[name.removesuffix("-double")]).eval()
    if name.endswith("-double"):
        made = made.double()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    made.generation_config.eos_token_id = None
    return kvkeep.attach(made)


@functools.cache
def alone(name: str, prompt: tuple[int, ...], new: int, policy: str | Policy, budget: int, chunk: int | None):
    """Greedy tokens of one prompt through transformers' ``generate``, the prompt fed in the same chunks."""
    found = kvkeep.parse(policy) if isinstance(policy, str) else policy
    inner = None if found.cascades else chunk  # a cascade prunes layer by layer: the model itself is fed in chunks
    cache = kvkeep.BoundedCache(model(name).config, found, budget, prefill_chunk=inner)
    ids = torch.tensor([prompt])
    out = model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new,
        prefill_chunk_size=chunk,
        do_sample=False,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())

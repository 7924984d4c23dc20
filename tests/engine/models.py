"""Tiny random models, and what a request gets alone."""

import functools

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

import kvkeep
from kvkeep.policies.base import Policy
from kvkeep.types import Phase

VOCABULARY = 61

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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
    "gemma3": Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
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
    return kvkeep.attach(made.to(DEVICE))


@functools.cache
def alone(name: str, prompt: tuple[int, ...], new: int, policy: str | Policy, budget: int, chunk: int | None, pins=()):
    """Greedy tokens of one prompt with a cache of its own, the prompt fed in the same chunks."""
    found = kvkeep.parse(policy) if isinstance(policy, str) else policy
    cache = kvkeep.BoundedCache(model(name).config, found, budget, pins=pins)
    out: list[int] = []
    with torch.inference_mode():
        cache.phase = Phase.PREFILL
        for piece in torch.tensor([prompt], device=DEVICE).split(chunk or len(prompt), dim=1):
            logits = model(name)(input_ids=piece, past_key_values=cache).logits
        cache.phase = Phase.DECODE
        while True:
            out.append(int(logits[0, -1].argmax()))
            if len(out) == new:
                return tuple(out)
            logits = model(name)(input_ids=torch.tensor([out[-1:]], device=DEVICE), past_key_values=cache).logits

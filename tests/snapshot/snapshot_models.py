"""Tiny random models, and steps of a model with a cache."""

import functools

import torch
from transformers import AutoModelForCausalLM, FalconH1Config, Gemma2Config, Lfm2Config, LlamaConfig

import kvkeep
from kvkeep.types import Phase

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=10),
    "falcon-h1": lambda: FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    ),
    "lfm2": lambda: Lfm2Config(
        **{**SHAPE, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], block_ff_dim=48
    ),
}

SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
POLICIES = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in kvkeep.available_policies()]


@functools.cache
def model(name="llama", dtype=torch.float32, seed=0):
    """A random model whose attention is not uniform."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return kvkeep.attach(made.to(dtype))


def bounded(model, policy="h2o:recent=2", budget=8, **options):
    """A cache; with room for everything under a policy that does not evict."""
    evicts = kvkeep.parse(policy).evicts
    return kvkeep.BoundedCache(model.config, policy, budget if evicts else 64, **options)


def ids(seed, rows=1, columns=40):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, columns), generator=generator)


@torch.inference_mode()
def feed(model, cache, tokens, start, stop, *, prompt=20):
    """Logits of columns ``start`` to ``stop``: the prompt's at once, then one step for each token."""
    found, at = [], start
    while at < stop:
        end = min(stop, prompt) if at < prompt else at + 1
        cache.phase = Phase.PREFILL if at < prompt else Phase.DECODE
        places = torch.arange(at, end).expand(len(tokens), -1)
        found.append(model(input_ids=tokens[:, at:end], past_key_values=cache, position_ids=places).logits)
        at = end
    return torch.cat(found, dim=1)

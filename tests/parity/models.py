"""Tiny random models of many families: the shapes that matter, the weights that do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

VOCAB = 61
WINDOW = 12

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GATED = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 512}
MIXED_LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GATED),
    "llama-mqa": lambda: LlamaConfig(**{**GATED, "num_key_value_heads": 1}),
    "llama-mha": lambda: LlamaConfig(**{**GATED, "num_key_value_heads": 4}),
    "mistral": lambda: MistralConfig(**GATED, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**GATED, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**GATED),
    "qwen2-window": lambda: Qwen2Config(
        **GATED, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED_LAYERS
    ),
    "qwen3": lambda: Qwen3Config(**GATED, head_dim=16),
    "gemma": lambda: GemmaConfig(**GATED, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **GATED, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GATED, head_dim=16, sliding_window=WINDOW, layer_types=MIXED_LAYERS),
    "phi3": lambda: Phi3Config(**GATED),
    "olmo2": lambda: Olmo2Config(**GATED),
    "stablelm": lambda: StableLmConfig(**GATED),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**COMMON, intermediate_size=48, max_position_embeddings=512),
    "opt": lambda: OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=512),
    "gpt-oss": lambda: GptOssConfig(
        **GATED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=MIXED_LAYERS,
    ),
    "mixtral": lambda: MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the family with random weights, large enough in scale that attention is not uniform."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return model.to(dtype)


def padded_batch(rows: int = 3, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, columns), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * 5] = 0
    return ids.masked_fill(mask == 0, 0), mask

"""Bytes by formula: what caches hold, and what a decode step has to move however it is written."""

from __future__ import annotations

import os

import torch
from transformers import LlamaForCausalLM, PreTrainedConfig

from kvkeep import parse
from kvkeep.kv_bits import KV_BITS, scale_halves
from kvkeep.planning.cost import LayerShape, block_bytes

GIB = 2**30
MIB = 2**20


def head_dim(config: PreTrainedConfig) -> int:
    """The width of a head, which a configuration may name."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, kv_bits: str | None = None) -> int:
    """Keys and values of one token in all layers; with bits, codes and their scales."""
    dim, heads = head_dim(config), config.num_hidden_layers * config.num_key_value_heads
    if kv_bits is None:
        return heads * 2 * dim * dtype.itemsize
    return heads * sum(dim * bits // 8 + 2 * scale_halves(dim, bits) for bits in KV_BITS[kv_bits])


def bounded_row_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, policy: str, budget: int, kv_bits: str | None = None
) -> int:
    """What kvkeep holds for a row: the formula of ``docs/layouts.md``, summed over layers."""
    dim = head_dim(config)
    shape = LayerShape(config.num_key_value_heads, dim, dim)
    states = len(parse(policy).slots)
    return config.num_hidden_layers * block_bytes(shape, budget, dtype.itemsize, states=states, kv_bits=kv_bits)


def weight_bytes(model: LlamaForCausalLM) -> int:
    """Weights that a step reads: all but the table of input embeddings, of which it reads a line per row."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    return every - (0 if tied else table.numel() * table.element_size())


def half_of_memory() -> int:
    """Half of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

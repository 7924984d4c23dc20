"""Attention from logits, with values and groups of heads, shown as a walk shows it; and small random models."""

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tiny import path
from kvkeep.models.tokenization import Writer
from kvkeep_lab.analysis.measure import AttentionRows, Context, Subject


def context(n, *, layers=1, heads=1, kv_heads=None, windows=None):
    words = tuple(f"w{number}" for number in range(n))
    return Context(n, layers, heads, kv_heads or heads, torch.arange(n), words, 0, windows or (None,) * layers)


def hide_future(logits):
    n = logits.shape[-1]
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)


def show(measurement, logits, values=None, *, block=37):
    """Hand over the rows of logits ``(L, Hq, n, n)`` and values ``(L, Hk, n, E)``."""
    layers, _, n, _ = logits.shape
    logits = hide_future(logits.float())
    weights = logits.softmax(dim=-1)
    for first in range(0, n, block):
        last = min(first + block, n)
        for layer in range(layers):
            seen = torch.zeros(measurement.context.n_kv_heads, last, 2) if values is None else values[layer, :, :last]
            at = (slice(None), slice(first, last), slice(last))
            measurement.rows(AttentionRows(layer, first, weights[layer][at], seen, logits[layer][at]))
    return measurement


def logits_of(weights):
    """Logits whose softmax over what is visible are the weights; rows must add up to 1."""
    return weights.clamp(min=1e-30).log()


def random_logits(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def llama(seed=0):
    """Two layers with groups of two heads, large enough in scale that attention is not uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return kvkeep.attach(model)


def subject(model, n, seed=0):
    """A random text for a model, with the embedded model's tokenizer, which it has no use for."""
    checkpoint = Checkpoint("random", model.config, AutoTokenizer.from_pretrained(path()), None, False)
    tokens = torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(seed))
    writer = Writer(checkpoint, model)
    return Subject(writer, tokens, seed, lambda: writer)

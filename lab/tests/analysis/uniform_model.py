"""A decoder whose attention is uniform over what a row sees, so that everything about it can be computed in loops."""

import functools
from dataclasses import replace

import model_folders
import torch

from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer
from kvkeep_lab.analysis.measure import Subject


@functools.cache
def writer(family="llama"):
    with quiet():
        checkpoint = loading.find(model_folders.folder(family))
        return Writer(checkpoint, loading.read_weights(checkpoint, "float32", "cpu"))


@functools.cache
def uniform():
    """The tiny Llama with queries of 0 and no MLP; its logits follow from the mean value of the visible tokens."""
    with quiet():
        checkpoint = loading.find(model_folders.folder("llama"))
        model = loading.read_weights(checkpoint, "float32", "cpu")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Writer(checkpoint, model)


def tokens(length, seed=0):
    """A text without a begin token (0)."""
    return torch.randint(1, 250, (length,), generator=torch.Generator().manual_seed(seed))


def subject(of, text, seed=0):
    return Subject(of, text, seed, lambda: of)


def unlimited(of):
    """The same with room for any number of positions."""
    return replace(of, checkpoint=replace(of.checkpoint, position_limit=None))


def _norm(x, weight, eps):
    return x / (x.square().mean() + eps).sqrt() * weight


@torch.no_grad()
def loss_when(visible, ids, of):
    """Mean loss of one text when row ``t`` sees the positions ``visible(t, layer)``, in plain loops and float64."""
    model = of.model
    eps = model.config.rms_norm_eps
    stream = [model.model.embed_tokens.weight[int(token)].double() for token in ids]
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        normed = [_norm(x, layer.input_layernorm.weight.double(), eps) for x in stream]
        values = [attention.v_proj.weight.double() @ x for x in normed]
        groups = model.config.num_attention_heads // model.config.num_key_value_heads
        added = []
        for t in range(len(ids)):
            mean = sum(values[j] for j in visible(t, number)) / len(visible(t, number))
            heads = mean.view(model.config.num_key_value_heads, -1).repeat_interleave(groups, dim=0)
            added.append(attention.o_proj.weight.double() @ heads.reshape(-1))
        stream = [x + a for x, a in zip(stream, added, strict=True)]
    total = 0.0
    for t in range(len(ids) - 1):
        logits = model.lm_head.weight.double() @ _norm(stream[t], model.model.norm.weight.double(), eps)
        total -= float(logits.log_softmax(dim=0)[int(ids[t + 1])])
    return total / (len(ids) - 1)

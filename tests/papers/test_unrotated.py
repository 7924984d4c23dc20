"""Policies that look at keys before their rotation keep the same tokens whatever the rotation and the position mode."""

import pytest
import torch
from transformers import GPT2Config, HunYuanDenseV1Config, LlamaConfig

import kvkeep
from kvkeep import Layer, parse
from kvkeep.rotary import Rotation

from .cases import CHAT, DECODE, Case
from .lockstep import choose, retained, step_layer

ROTATION = Rotation(torch.tensor([1.0, 0.3, 0.1, 0.01]))
POLICIES = ["keydiff:rotated=false", "keydiff:recent=8,sinks=4,rotated=false", "leverage:rotated=false"]
CASES = [
    ((24, *DECODE[:20]), None, (0, 0)),
    ((25, *DECODE[:20]), 7, (0, 9)),
    (CHAT[:40], None, (4, 0)),
]


def feed(policy, case, streams, *, rotate, rotation=None, rotary=None):
    """What each row and head holds after every turn."""
    _, turns = choose(case)
    layer = Layer(parse(policy), case.budget, prefill_chunk=case.chunk, rotation=rotation)
    layer.rotary = rotary
    if rotate:
        streams = [type(one)(turned(one.queries), turned(one.keys), one.values) for one in streams]
    found = []
    for turn in turns:
        step_layer(layer, streams, case, turn.tokens, turn.real)
        found.append(retained(layer))
    return found


def turned(x):
    return ROTATION.apply(x[None], torch.arange(x.shape[1])[None, None])[0]


@pytest.mark.parametrize(("turns", "chunk", "pads"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rotation_changes_nothing(policy, turns, chunk, pads):
    case = Case(policy, 16, turns, chunk=chunk, pads=pads)
    streams, played = choose(case)
    plain = [turn.kept for turn in played]
    assert feed(policy, case, streams, rotate=False) == plain
    assert feed(policy, case, streams, rotate=True, rotary=ROTATION) == plain
    assert feed(policy, case, streams, rotate=True, rotation=ROTATION) == plain
    assert feed(policy, case, streams, rotate=True, rotation=ROTATION, rotary=ROTATION) == plain
    assert feed(policy, case, streams, rotate=True) != plain


LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 32}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rotation_is_the_models(policy):
    layers = kvkeep.BoundedCache(LlamaConfig(**LLAMA), policy, 16).bounded_layers()
    assert all(layer.rotary is not None for layer in layers.values())
    layers = kvkeep.BoundedCache(GPT2Config(n_layer=2), policy, 16).bounded_layers()
    assert all(layer.rotary is None for layer in layers.values())  # keys have no rotation


HUNYUAN = HunYuanDenseV1Config(**LLAMA, head_dim=8)
"""Its keys go through a norm behind their rotation."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rotation_that_cannot_be_undone_is_refused(policy):
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"cannot undo for this 'hunyuan_v1_dense' .*rotated=true"):
        kvkeep.BoundedCache(HUNYUAN, policy, 16)
    kvkeep.BoundedCache(HUNYUAN, policy.replace("rotated=false", "rotated=true"), 16)

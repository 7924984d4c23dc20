"""The hash of a model's weights: what it notices, what it does not depend on, and when it is computed again."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep.models import weight_hash
from kvkeep.models.weight_hash import WeightsOf, fingerprint


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.long
def test_other_numbers_are_noticed_wherever_they_are(model):
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == before
    for name, parameter in copy.deepcopy(model).named_parameters():
        for at in (0, -1):
            other = copy.deepcopy(model)
            other.get_parameter(name).data.view(-1)[at] += 1
            assert fingerprint(other) != before, name
        tuned = copy.deepcopy(model)
        tuned.get_parameter(name).data += 1e-3 * torch.rand(parameter.shape)
        assert fingerprint(tuned) != before, name


def test_names_and_shapes_are_noticed(model):
    before = fingerprint(model)
    layer = model.model.layers[0].self_attn
    layer.q_proj, layer.o_proj = layer.o_proj, layer.q_proj
    assert fingerprint(model) != before
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 47, bias=False)
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert fingerprint(model) != before


def test_copies_in_wider_numbers_and_packed_layers_have_the_same_hash(model):
    half = model.bfloat16()
    before = fingerprint(half)
    assert fingerprint(copy.deepcopy(half).float()) == before
    kvkeep.pack_weights(half)
    assert fingerprint(half) == before


def test_the_hash_is_computed_once_and_again_after_a_change(model, monkeypatch):
    calls, honest = [], weight_hash._hash
    monkeypatch.setattr(weight_hash, "_hash", lambda found: (calls.append(1), honest(found))[1])
    assert fingerprint(model) == fingerprint(model)
    assert len(calls) == 1
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    fingerprint(model)
    assert len(calls) == 2


@pytest.mark.usefixtures("only_new_garbage")
def test_weights_know_their_model_and_do_not_keep_it(model):
    known = WeightsOf(model)
    assert known.of(model)
    assert known() == fingerprint(model)
    assert copy.deepcopy(known) is known
    gone = WeightsOf(copy.deepcopy(model))
    gc.collect()
    assert gone() is None


def test_modules_that_are_replaced_removed_or_renamed_are_noticed(model):
    seen, layer = [fingerprint(model)], model.model.layers[1].self_attn
    layer.q_proj = nn.Linear(32, 32, bias=False)
    seen.append(fingerprint(model))
    layer.add_module("more", nn.Linear(32, 32, bias=False))
    seen.append(fingerprint(model))
    inner = layer._modules
    inner["other"] = inner.pop("more")
    seen.append(fingerprint(model))
    inner["q_proj"], inner["other"] = inner["other"], inner["q_proj"]
    seen.append(fingerprint(model))
    layer.o_proj.weight = nn.Parameter(torch.ones(32, 32))
    seen.append(fingerprint(model))
    layer.k_proj.weight = None
    seen.append(fingerprint(model))
    assert len(set(seen)) == len(seen)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model)) == seen[-1]


@pytest.mark.usefixtures("only_new_garbage")
def test_modules_that_were_replaced_are_not_kept_alive(model):
    fingerprint(model)
    old = weakref.ref(model.lm_head)
    model.lm_head = nn.Linear(32, 61)
    gc.collect()
    assert old() is None


def test_buffers_are_noticed_unless_the_configuration_explains_them(model):
    before = fingerprint(model)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()
    assert fingerprint(model) == before
    rotary.inv_freq.mul_(1.01)
    changed = fingerprint(model)
    assert changed != before
    model.model.layers[0].register_buffer("shift", torch.zeros(3))
    assert len({before, changed, fingerprint(model)}) == 3
    model.model.layers[0].shift[1] = 1
    assert len({before, changed, fingerprint(model)}) == 3


def test_frequencies_that_follow_the_text_are_no_part_of_the_hash():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=8,
        rope_parameters=rope,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    before = fingerprint(model)
    model(torch.ones((1, 20), dtype=torch.int64))
    assert fingerprint(model) == before


class _Angles(nn.Module):
    """Holds a table that it computes from its configuration."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.register_buffer("table", 1 + torch.arange(config.size).float(), persistent=False)


def test_a_computed_table_is_noticed_where_it_is_another_one_than_its_class_computes(model):
    model.angles = _Angles(SimpleNamespace(size=4))
    before = fingerprint(model)
    for table in (1 + torch.arange(5.0), 2 * (1 + torch.arange(4.0))):
        model.angles.table = table
        assert fingerprint(model) != before
    model.angles.table = (1 + torch.arange(4.0)) * (1 + 2**-12)  # rounded, as in a model in half precision
    assert fingerprint(model) == before

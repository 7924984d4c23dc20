import time
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models import packed_weights
from kvkeep.models.packed_weights import PackedLinear, pack_weights

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 40), (7, 1, 40), (2, 9, 40), (300, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_what_the_plain_one_gives(dtype, shape, bias):
    if not packed_weights._works(dtype):
        pytest.skip("oneDNN does not know this dtype on this processor")
    torch.manual_seed(1)
    plain = nn.Linear(40, 24, bias=bias, dtype=dtype)
    layer = PackedLinear(plain, 32)
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.weight, plain.weight.detach(), rtol=0, atol=0)


@needs_onednn
def test_the_plain_weights_are_given_up():
    model = llama()
    plain = weakref.ref(model.model.layers[1].mlp.up_proj.weight)
    assert pack_weights(model) == 2 * 7 + 1
    assert plain() is None
    assert not [name for name, _ in model.named_parameters() if "proj" in name]


@needs_onednn
def test_weights_are_never_held_twice_as_a_whole(monkeypatch):
    model = llama()
    plain = [weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear]
    alive = []

    class Watched(PackedLinear):
        def __init__(self, linear, rows):
            super().__init__(linear, rows)
            alive.append(sum(weight() is not None for weight in plain))

    monkeypatch.setattr(packed_weights, "_works", lambda dtype: True)
    monkeypatch.setattr(packed_weights, "PackedLinear", Watched)
    assert pack_weights(model) == len(plain)
    assert alive == list(range(len(plain), 0, -1))


@needs_onednn
def test_a_number_format_that_the_processor_lacks_stays_plain(monkeypatch):
    monkeypatch.setattr(packed_weights, "_works", lambda dtype: dtype is torch.float32)
    assert pack_weights(llama().to(torch.bfloat16)) == 0
    assert pack_weights(llama()) == 2 * 7 + 1


@needs_onednn
def test_tied_hooked_and_other_layers_stay():
    model = llama(tied=True)
    hooked, other = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj
    hooked.register_forward_hook(lambda *_: None)
    other.to(torch.float16)
    assert pack_weights(model) == 2 * 7 - 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.up_proj is hooked
    assert model.model.layers[0].mlp.down_proj is other


@needs_onednn
def test_quantised_layers_stay():
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    assert pack_weights(model) == 2 * 7
    assert model.model.layers[0].mlp.up_proj is layer


def test_without_the_operations_nothing_changes(monkeypatch):
    def missing(*_):
        raise AttributeError("no such operation")

    monkeypatch.setattr(packed_weights, "PackedLinear", missing)
    model = llama()
    assert pack_weights(model) == 0
    assert isinstance(model.lm_head, nn.Linear)


@needs_onednn
def test_a_packed_model_generates_the_same_tokens():
    requests = [
        Request(prompt=tuple(range(3 + i, 20 + 5 * i)), sampling=SamplingParams(max_new_tokens=12), ignore_end=True)
        for i in range(5)
    ]
    plain = Engine(llama(), budget=10, rows=3).generate(requests)
    model = llama()
    assert pack_weights(model) == 2 * 7 + 1
    found = Engine(model, budget=10, rows=3).generate(requests)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert len({tuple(r.token_ids) for r in plain}) > 1


@pytest.mark.long
@needs_onednn
@pytest.mark.parametrize("faster", [False, True])
def test_packs_only_where_that_is_faster_if_asked(monkeypatch, faster):
    waits = {nn.Linear: 0.002, PackedLinear: 0.001} if faster else {nn.Linear: 0.0, PackedLinear: 0.002}

    def slow(kind, honest):
        monkeypatch.setattr(kind, "forward", lambda self, x: (time.sleep(waits[kind]), honest(self, x))[1])

    slow(nn.Linear, nn.Linear.forward)
    slow(PackedLinear, PackedLinear.forward)
    model = llama()
    assert pack_weights(model, 3, if_faster=True) == (2 * 7 + 1 if faster else 0)
    assert all(type(m) is not nn.Linear for m in model.modules()) == faster


@needs_onednn
def test_a_sample_of_the_weights_is_timed(monkeypatch):
    made = []

    class Watched(PackedLinear):
        def __init__(self, linear, rows):
            made.append((linear.weight.nbytes, rows))
            super().__init__(linear, rows)

    monkeypatch.setattr(packed_weights, "PackedLinear", Watched)
    monkeypatch.setattr(packed_weights, "TIMED_BYTES", 40_000)
    monkeypatch.setattr(packed_weights, "_works", lambda dtype: True)
    packed_weights.faster([m for m in llama().modules() if type(m) is nn.Linear], 5)
    assert 20_000 < sum(size for size, _ in made) <= 40_000
    assert {rows for _, rows in made} == {5}

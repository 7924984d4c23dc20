"""What is changed in a fused model, or asked of it, after it was fused: it computes what the plain model computes."""

import copy
import functools
import gc
import multiprocessing
import weakref
from collections import OrderedDict

import pytest
import torch
from test_prepare import fused_copy, made
from test_whole_layers import calls  # noqa: F401  a fixture
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

import kvkeep
from kvkeep.backends.native import native
from kvkeep.cache.hf_layers import handed
from kvkeep.models.fused_modules import FusedNorm
from kvkeep.models.load import watched
from kvkeep.models.prepare import fuse_modules

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")


def pair(**options):
    """A plain model and a fused copy, both attached."""
    plain = made(**options)
    for weight in plain.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0, 0.1)
    return [kvkeep.attach(model) for model in (plain, fused_copy(plain)[0])]


def steps(model, change=None, *, count=8, of=lambda out: out.logits, **asked):
    """What decode steps put out; the model is changed between two of them."""
    cache, found = kvkeep.BoundedCache(model.config, "h2o", 8), []
    with torch.no_grad():
        for step in range(count):
            if step == 4 and change:
                change(model)
            ids = (torch.arange(2)[:, None] * 7 + step * 5) % 90 + 3
            found.append(of(model(ids, **handed(model, cache), use_cache=True, **asked)))
    return torch.cat(found)


def layers_of(model):
    return model.model.layers


def activation(model):
    for layer in layers_of(model):
        layer.mlp.act_fn = nn.ReLU()


def epsilon(model):
    for layer in layers_of(model):
        layer.input_layernorm.variance_epsilon = 0.5


def last_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def scaling(model):
    for layer in layers_of(model):
        layer.self_attn.scaling = 1.0


def groups_of_hooks(model):
    for layer in layers_of(model):
        layer.mlp._forward_hooks = OrderedDict()
        layer.mlp.register_forward_hook(lambda module, args, out: out * 2)


def groups_of_weights(model):
    for layer in layers_of(model):
        down = layer.mlp.down_proj
        down._parameters = dict(down._parameters)
        down.weight = nn.Parameter(down.weight * 2)


def groups_of_modules(model):
    for layer in layers_of(model):
        layer._modules = dict(layer._modules)
        layer.mlp = nn.Identity()


CHANGES = (
    activation,
    epsilon,
    last_epsilon,
    scaling,
    groups_of_hooks,
    groups_of_weights,
    groups_of_modules,
)


def test_a_layer_norm_that_is_changed():
    x = torch.randn(3, 8)
    norm = nn.LayerNorm(8).eval()
    fuse_modules(norm)
    assert isinstance(norm, FusedNorm)
    changes = (
        {"eps": 0.5},
        {"eps": 1},
        {"bias": None},
        {"bias": nn.Parameter(torch.arange(8.0))},
        {"weight": None},
        {"weight": nn.Parameter(torch.arange(8.0))},
        {"weight": nn.Parameter(torch.ones(3, 8)), "bias": None, "normalized_shape": (3, 8)},
    )
    for change in changes:
        for name, value in change.items():
            setattr(norm, name, value)
        with torch.no_grad():
            expected = nn.functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-5, msg=str(change))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps(change):
    plain, model = pair()
    before = steps(plain)
    expected = steps(plain, change)
    assert not torch.allclose(before, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(steps(model, change), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES[:4], ids=lambda change: change.__name__)
def test_a_change_before_several_tokens(change):
    plain, model = pair()
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        for each in (plain, model):
            change(each)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [LlamaAttention, LlamaMLP, LlamaDecoderLayer, LlamaModel, LlamaRMSNorm, nn.Linear])
def test_a_forward_that_is_put_into_a_class(kind, monkeypatch):
    plain, model = pair()
    own = kind.forward
    called = []

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        called.append(self)
        return own(self, *args, **kwargs)

    def change(_):
        called.clear()
        monkeypatch.setattr(kind, "forward", forward)

    counts = []
    for each in (plain, model):
        steps(each, change)
        counts.append(len(called))
        monkeypatch.undo()
    assert counts[0] == counts[1] > 0


def test_fewer_layers():
    models = pair(num_hidden_layers=3)
    for model in models:
        steps(model)
        model.config.num_hidden_layers = 2
    torch.testing.assert_close(*map(steps, models), rtol=0, atol=1e-5)
    for model in models:
        model.model.layers = model.model.layers[:2]
    torch.testing.assert_close(*map(steps, models), rtol=0, atol=1e-5)


def test_layers_in_another_order():
    for model in pair(num_hidden_layers=3):
        steps(model)
        model.model.layers = nn.ModuleList(reversed(model.model.layers))
        with pytest.raises(kvkeep.KVKeepError):  # the cache of one layer is not that of another
            steps(model)


def test_hidden_states_that_the_configuration_asks_for():
    def change(model):
        model.config.output_hidden_states = True

    def last(out):
        return out.logits.flatten() if out.hidden_states is None else out.hidden_states[1].flatten()

    plain, model = pair()
    expected, found = (steps(each, change, of=last) for each in (plain, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_tuple_is_returned_where_one_is_asked_for():
    for model in pair():
        cache = kvkeep.BoundedCache(model.config, "h2o", 8)
        with torch.no_grad():
            for step in range(5):
                given = {"input_ids": torch.tensor([[5 + step]]), "use_cache": True, **handed(model, cache)}
                assert isinstance(model.model(**given, return_dict=False), tuple)


def test_hooks_are_told_the_tokens_of_steps_alone():
    """A trial's tokens are none of theirs, and what they keep is not written into."""
    found = []
    for model in pair():
        kept, parts = [], (model.model.embed_tokens, model.model.norm, layers_of(model)[1].mlp.act_fn)
        for part in parts:
            part.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out))
        steps(model)
        found.append(kept)
    assert len(found[0]) == len(found[1]) == 3 * 8
    for expected, kept in zip(*found, strict=True):
        torch.testing.assert_close(kept, expected, rtol=0, atol=1e-5)


def test_an_embedding_that_hands_out_its_weight(calls):  # noqa: F811
    _, model = pair()
    steps(model)
    weight = nn.Parameter(torch.randn(2, 1, 64))
    model.model.embed_tokens.register_forward_hook(lambda *_: weight)
    before = weight.clone()
    calls.clear()
    steps(model)
    assert calls
    assert torch.equal(weight, before)


def test_progress_does_not_count_a_trial():
    _, model = pair()
    read = []
    with watched(model, read.append):
        steps(model)
    assert not read
    assert model.model.is_checked


@pytest.mark.usefixtures("only_new_garbage")
def test_a_cache_keeps_no_model_alive():
    model, cache = pair()[1], None
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.no_grad():
        for step in range(5):
            model(torch.tensor([[5 + step]]), **handed(model, cache), use_cache=True)
    weight = weakref.ref(layers_of(model)[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert weight() is None
    assert cache.get_seq_length() == 5


@pytest.mark.filterwarnings("ignore")
def test_a_trace_sees_every_operator():
    layer, x = layers_of(pair()[1])[0], torch.randn(1, 3, 64)
    for part in (layer.mlp, layer.input_layernorm, layer.self_attn.q_proj):
        with torch.no_grad():
            traced = torch.jit.trace(part, x, check_trace=False)
            torch.testing.assert_close(traced(x + 1), part(x + 1), rtol=0, atol=1e-5)


def test_a_mode_that_counts_operators_sees_every_one():
    counts = []
    for model in pair():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(6)[None] + 5)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_rows_that_torch_maps_over():
    plain, model = pair()
    x = torch.randn(3, 2, 64)
    with torch.no_grad():
        found = torch.func.vmap(layers_of(model)[0].mlp)(x)
    torch.testing.assert_close(found, layers_of(plain)[0].mlp(x), rtol=0, atol=1e-5)


def test_a_copy_is_as_fast(calls):  # noqa: F811
    _, model = pair()
    steps(model)
    other = copy.deepcopy(model)
    calls.clear()
    torch.testing.assert_close(steps(other), steps(model), rtol=0, atol=0)
    assert len(calls) == 2 * 2 * 6


def _forked(model, cache, results):
    with torch.no_grad():
        results.put(model(torch.tensor([[9]]), **handed(model, cache), use_cache=True).logits.sum().item())


@pytest.mark.filterwarnings("ignore")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    model = pair(hidden_size=256, intermediate_size=1024)[1]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cache = kvkeep.BoundedCache(model.config, "h2o", 8)
        with torch.no_grad():
            for step in range(5):
                model(torch.tensor([[5 + step]]), **handed(model, cache), use_cache=True)
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_forked, args=(model, cache, results))
        child.start()
        try:
            found = results.get(timeout=30)
        finally:
            child.kill()
            child.join()
        with torch.no_grad():
            expected = model(torch.tensor([[9]]), **handed(model, cache), use_cache=True).logits.sum().item()
        assert found == pytest.approx(expected, abs=1e-3)
    finally:
        torch.set_num_threads(threads)

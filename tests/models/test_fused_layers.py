"""Whole decoder layers in the native kernel: the same text, every hook called, and only what the kernel computes."""

import copy
import gc
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_prepare import SIZES, fused_copy, generated, made
from torch import nn
from torch.nn.utils import parametrize
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DynamicCache,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import kvkeep
from kvkeep.backends import QuantizedTensor, layer_ops
from kvkeep.backends.native import native
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed
from kvkeep.models import fused_decoder, fused_layers
from kvkeep.models.attention import PaddingMask
from kvkeep.models.fused_decoder import fuse_decoder
from kvkeep.models.fused_layers import FusedLayer, parts_of, repeatable
from kvkeep.types import AttentionOptions

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

WHOLE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "starcoder2", "nemotron", "opt"]
OTHERS = {
    "scaled residuals": (GraniteForCausalLM, GraniteConfig, {"residual_multiplier": 0.5}),
    "pairs of neighbours are rotated": (GlmForCausalLM, GlmConfig, {"head_dim": 16, "partial_rotary_factor": 1.0}),
    "half of a head is rotated": (GlmForCausalLM, GlmConfig, {"head_dim": 16}),
    "norms behind": (Olmo2ForCausalLM, Olmo2Config, {}),
    "parallel": (Cohere2ForCausalLM, Cohere2Config, {}),
}


COUNTS = {"before": 0, "behind": 0, "whole": 0}


@pytest.fixture
def counted(monkeypatch):
    """How often either half of a layer was computed by the kernel since `both` was called, and both in one call of all
    layers.
    """

    def counting(name, honest):
        def call(self, *args):
            found = honest(self, *args)
            COUNTS[name] += found is not None
            return found

        return call

    def counting_all(honest):
        def call(self, *args):
            found = honest(self, *args)
            for name in COUNTS:
                COUNTS[name] += self._count * found
            return found

        return call

    for kind, name in ((layer_ops.Before, "before"), (layer_ops.Behind, "behind")):
        monkeypatch.setattr(kind, "__call__", counting(name, kind.__call__))
    monkeypatch.setattr(layer_ops.ModelStep, "__call__", counting_all(layer_ops.ModelStep.__call__))
    return COUNTS


def steps(model, policy="h2o", *, rows=3, tokens=4, mask=None, **options):
    """Logits of some decode steps after a prompt of 12 tokens."""
    cache = kvkeep.BoundedCache(model.config, policy, 8, **options)
    ids, found = torch.arange(rows * 12).view(rows, 12) % 90 + 3, []
    with torch.inference_mode():
        for _ in range(1 + tokens):
            more = {} if mask is None else {"attention_mask": mask}
            logits = model(ids, **handed(model, cache), use_cache=True, **more).logits[:, -1:]
            found.append(logits)
            ids = logits.float().argmax(-1)
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.cat(found, dim=1)


def both(name="llama", dtype=torch.float32, **options):
    """A plain model and a fused copy, both attached."""
    plain = made(name, **options).to(dtype)
    model, _ = fused_copy(plain)
    assert sum(isinstance(layer, FusedLayer) for layer in model.modules()) == model.config.num_hidden_layers
    kvkeep.attach(plain), kvkeep.attach(model)
    steps(model)  # its first step in one call is compared with its class
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    return plain, model


@pytest.mark.parametrize("name", WHOLE)
def test_layers_say_what_the_modules_say(name, counted):
    plain, model = both(name)
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=2e-5)
    assert counted == {"before": 8, "behind": 8, "whole": 6}
    assert generated(model) == generated(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_same_digits_as_in_its_fused_modules(name, dtype, monkeypatch, counted):
    """A run of many tokens goes through the modules, and a text must not depend on what runs beside it."""
    _, model = both(name, dtype)
    found = steps(model, tokens=8)
    assert counted["before"] == 16
    monkeypatch.setattr(layer_ops.Before, "__call__", lambda *_: None)
    monkeypatch.setattr(layer_ops.ModelStep, "__call__", lambda *_: False)
    assert torch.equal(steps(model, tokens=8), found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype, counted):
    plain, model = both("qwen3", dtype)
    found, expected = steps(model, tokens=1).float(), steps(plain, tokens=1).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.04 * expected.abs().max().item())
    assert counted["behind"] == 2


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("policy", ["full", "snapkv", "tova", "ahakv", "scissorhands", "adakv", "leverage", "blend"])
def test_under_every_kind_of_policy(policy, name, counted):
    plain, model = both(name)
    budget = 70 if policy == "full" else 40
    asked = [
        kvkeep.Request(prompt=tuple(range(3, n)), sampling=kvkeep.SamplingParams(max_new_tokens=10), ignore_end=True)
        for n in (55, 58)
    ]
    plain_text, text = (
        kvkeep.Engine(one, policy=policy, budget=budget, rows=2).generate(asked) for one in (plain, model)
    )
    assert [one.token_ids for one in text] == [one.token_ids for one in plain_text]
    assert counted["behind"] >= 2 * 9


@pytest.mark.parametrize("options", [{"positions": "slot"}, {"kv_bits": 8}, {"head_budget": "ada"}])
def test_with_every_kind_of_slots(options, counted):
    plain, model = both()
    torch.testing.assert_close(steps(model, **options), steps(plain, **options), rtol=0, atol=2e-5)
    assert counted["before"] == 8


def test_sliding_windows(counted):
    plain, model = both("mistral", sliding_window=6)
    torch.testing.assert_close(steps(model, tokens=12), steps(plain, tokens=12), rtol=0, atol=2e-5)
    assert counted["before"] == 24


def test_rows_that_are_padded(counted):
    plain, model = both()
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = mask[2, :1] = 0
    torch.testing.assert_close(steps(model, mask=mask), steps(plain, mask=mask), rtol=0, atol=2e-5)
    assert counted["before"] == 8


@pytest.mark.parametrize("name", ["qwen3", "opt"])
def test_a_row_gets_what_it_gets_alone(name):
    _, model = both(name)
    together = steps(model, rows=5)
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    ids = torch.arange(12)[None] + 3
    with torch.inference_mode():
        model(ids, **handed(model, cache), use_cache=True)
        ids = together[:1, :1].argmax(-1)
        alone = model(ids, **handed(model, cache), use_cache=True).logits
    torch.testing.assert_close(alone, together[:1, 1:2], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS)
def test_layers_with_another_rule_stay(what):
    kind, config, more = OTHERS[what]
    torch.manual_seed(0)
    plain = kind(config(**{**SIZES, **more})).eval()
    model, _ = fused_copy(plain)
    assert not any(isinstance(layer, FusedLayer) for layer in model.modules())
    assert generated(model, tokens=8) == generated(plain, tokens=8)


@pytest.mark.slow
def test_a_layer_without_rotation_among_others(counted):
    torch.manual_seed(0)
    config = SmolLM3Config(**{**SIZES, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]})
    plain = SmolLM3ForCausalLM(config).eval()
    for weight in plain.parameters():
        nn.init.normal_(weight, 0.5 if weight.ndim == 1 else 0, 0.1)
    model, _ = fused_copy(plain)
    assert [layer.rule.is_rotated for layer in model.model.layers] == [True, True, False, True]
    kvkeep.attach(plain), kvkeep.attach(model)
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=2e-5)
    assert counted["whole"] >= 4 * 2
    assert generated(model, tokens=8) == generated(plain, tokens=8)


def test_an_activation_of_another_kind_stays():
    model, _ = fused_copy(made(hidden_act="gelu"))
    assert not any(isinstance(layer, FusedLayer) for layer in model.modules())


PARTS = [
    "",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "mlp",
    "mlp.down_proj",
    "mlp.act_fn",
    "input_layernorm",
    "post_attention_layernorm",
]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", ["hook", "before", "forward"])
def test_whoever_listens_to_a_part_hears_it(part, way):
    _, model = both("qwen3")
    expected, heard = steps(model), []
    module = model.model.layers[1].get_submodule(part)
    if way == "hook":
        handle = module.register_forward_hook(lambda *_: heard.append(1))
    elif way == "before":
        handle = module.register_forward_pre_hook(lambda *_: heard.append(1))
    else:
        honest = module.forward
        module.forward = lambda *args, **kwargs: (heard.append(1), honest(*args, **kwargs))[1]
    torch.testing.assert_close(steps(model), expected, rtol=0, atol=2e-5)
    assert len(heard) == 5
    if way != "forward":
        handle.remove()
        assert torch.equal(steps(model), expected)
        assert len(heard) == 5


@pytest.mark.parametrize(
    "part", ["self_attn.k_proj", "mlp.up_proj", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn"]
)
def test_a_part_that_is_replaced_is_called(part):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            found = self.inner(*args, **kwargs)
            return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    plain, model = both("qwen3")
    for one in (plain, model):
        layer = one.model.layers[0]
        layer.set_submodule(part, Around(layer.get_submodule(part)))
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=2e-5)


def _scaled_in_place(layer):
    layer.self_attn.k_proj.weight.mul_(2)


def _another_parameter(layer):
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 3)


def _other_data(layer):
    layer.input_layernorm.weight.data = torch.ones(64)


def _other_strides(layer):
    """The same address and shape."""
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.t()


def _another_dtype_and_back(layer):
    layer.double().float()


def _a_bias(layer):
    layer.mlp.down_proj.bias = nn.Parameter(torch.ones(64))


def _no_weights_of_its_own(layer):
    layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (_scaled_in_place, 8),
        (_another_parameter, 8),
        (_other_data, 8),
        (_other_strides, 4),
        (_another_dtype_and_back, 8),
        (_a_bias, 8),
        (_no_weights_of_its_own, 8),
    ],
)
def test_weights_that_change_are_read_again(change, calls, counted):
    """In a model that has run; ``calls``: of two layers for four tokens, one of which the kernel may not take."""
    plain, model = both()
    steps(model)
    assert counted["before"] == 8
    for one in (plain, model):
        with torch.no_grad():
            change(one.model.layers[0])
    counted["before"] = 0
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=5e-5)
    assert counted["before"] == calls


def _joined_in_place(layer):
    layer.self_attn.qkv_proj.weight[64:].mul_(2)
    layer.mlp.gate_up_proj.weight[80:].mul_(3)


def _joined_anew(layer):
    layer.self_attn.qkv_proj.weight = nn.Parameter(layer.self_attn.qkv_proj.weight * 2)
    layer.mlp.gate_up_proj.bias = nn.Parameter(torch.arange(160.0) / 80)


def _dropout(layer):
    layer.resid_mlp_dropout.p = 1.0
    layer.resid_mlp_dropout.train()


@pytest.mark.parametrize(("change", "calls"), [(_joined_in_place, 8), (_joined_anew, 8), (_dropout, 4)])
def test_joined_projections_that_change_are_read_again(change, calls, counted):
    plain, model = both("phi3")
    steps(model)
    assert counted["before"] == 8
    for one in (plain, model):
        with torch.no_grad():
            change(one.model.layers[0])
    counted["before"] = 0
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=2e-5)
    assert counted["before"] == calls


def test_projections_that_are_joined_in_another_order_stay():
    class Turned(Phi3MLP):
        def forward(self, x):
            up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(up * self.activation_fn(gate))

    plain = made("phi3")
    for layer in plain.model.layers:
        layer.mlp.__class__ = Turned
    kvkeep.attach(model := fused_copy(plain)[0])
    assert not any(isinstance(module, FusedLayer) for module in model.modules())
    torch.testing.assert_close(steps(model), steps(kvkeep.attach(plain)), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_forty_tokens_of_joined_projections(bits, counted):
    """As a checkpoint's, and packed: the numbers of the packed weights are those of the plain model."""
    plain = made("phi3", intermediate_size=96)  # whole groups of packed numbers
    packed = copy.deepcopy(plain)
    for name, weight in list(packed.named_parameters()) if bits else ():
        if "_proj" in name:
            module, own = packed.get_submodule(name.rpartition(".")[0]), QuantizedTensor.quantize(weight, bits)
            module.weight = nn.Parameter(own, False)
            plain.get_parameter(name).data = own.dequantize()
    model = kvkeep.attach(fused_copy(packed)[0])
    counted.update(dict.fromkeys(COUNTS, 0))
    found, expected = (steps(one, tokens=40).log_softmax(-1) for one in (model, kvkeep.attach(plain)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if not bits else 1e-3)
    assert counted["whole"] > 0


def _without_memory(model):
    model.to("meta")


def _assigned(model):
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize("change", [_without_memory, _assigned])
def test_weights_that_are_replaced_are_freed(change):
    """The packed addresses keep nothing alive, not even until the next step."""
    _, model = both()
    steps(model)
    held = [weakref.ref(weight) for weight in model.model.layers.parameters()]
    change(model)
    gc.collect()
    assert not any(one() is not None for one in held)


class _Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def _parametrised(module):
    parametrize.register_parametrization(module, "weight", _Doubled())


def _in_a_buffer(module):
    weight = module.weight.detach() * 2
    del module.weight
    module.register_buffer("weight", weight)


@pytest.mark.parametrize("change", [_parametrised, _in_a_buffer])
@pytest.mark.parametrize("part", ["input_layernorm", "self_attn.q_proj", "self_attn.k_norm"])
def test_weights_that_are_no_parameters_any_more(part, change):
    plain, model = both("qwen3")
    steps(model)
    for one in (plain, model):
        change(one.model.layers[0].get_submodule(part))
    torch.testing.assert_close(steps(model), steps(plain), rtol=0, atol=2e-5)


def test_a_copy_reads_its_own_weights():
    _, model = both()
    steps(model)
    other = copy.deepcopy(model)
    before = steps(other)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    assert torch.equal(steps(other), before)
    assert not torch.equal(steps(model), before)


def test_hidden_states_are_those_of_the_layers():
    plain, model = both()
    for one in (plain, model):
        one.prefix = kvkeep.BoundedCache(one.config, "h2o", 8)
        with torch.inference_mode():
            one(torch.arange(3, 15)[None], **handed(one, one.prefix), use_cache=True)
            asked = {**handed(one, one.prefix), "use_cache": True, "output_hidden_states": True}
            one.states = one(torch.tensor([[5]]), **asked).hidden_states
    assert len(model.states) == 3
    for found, expected in zip(model.states, plain.states, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_other_caches_and_other_attention_run_as_before(counted):
    _, model = both()
    plain = made()

    @torch.inference_mode()
    def logits(one):
        cache = DynamicCache(config=one.config)
        one(torch.arange(3, 15)[None], **handed(one, cache), use_cache=True)
        return one(torch.tensor([[5]]), **handed(one, cache), use_cache=True).logits

    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=2e-5)
    with torch.inference_mode():
        torch.testing.assert_close(
            model(torch.tensor([[5]])).logits, plain(torch.tensor([[5]])).logits, rtol=0, atol=2e-5
        )
    model.set_attn_implementation("sdpa")
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.inference_mode(), pytest.raises(kvkeep.UnsupportedModelError):
        model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
    assert not counted["before"]


def test_a_model_in_training_mode_is_refused_as_before():
    _, model = both(attention_dropout=0.5)
    model.train()
    with pytest.raises(kvkeep.UnsupportedModelError, match="dropout"):
        steps(model)


@pytest.mark.parametrize("half", [layer_ops.Before, layer_ops.Behind])
def test_without_memory_torch_does_the_work(half, monkeypatch):
    _, model = both()
    expected = steps(model)
    monkeypatch.setattr(half, "__call__", lambda *_: None)
    monkeypatch.setattr(layer_ops.ModelStep, "__call__", lambda *_: False)
    torch.testing.assert_close(steps(model), expected, rtol=0, atol=2e-5)


def test_more_rows_than_the_kernel_takes(counted):
    plain, model = both()
    rows = layer_ops.most_rows(torch.float32) + 1
    torch.testing.assert_close(steps(model, rows=rows), steps(plain, rows=rows), rtol=0, atol=2e-5)
    assert not counted["before"]


@pytest.mark.slow
def test_a_fused_layer_can_be_copied_and_used_by_several_threads():
    _, model = both()
    twin, expected = copy.deepcopy(model), steps(model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(steps, [model, twin] * 4):
            assert torch.equal(found, expected)


# Single layers, outside of a model's steps.


def layer_of(name="llama", **options):
    """The fused layer of a model of one layer, and the plain one."""
    plain = made(name, num_hidden_layers=1, **options)
    found = [
        [part for part in model.modules() if hasattr(part, "self_attn")] for model in (fused_copy(plain)[0], plain)
    ]
    (layer,), (own,) = found
    assert isinstance(layer, FusedLayer)
    return layer, own


def test_a_layer_whose_parts_are_no_longer_fused_has_none():
    layer, _ = layer_of("qwen3")
    layer.self_attn.register_module("nothing", None)
    assert parts_of(layer).heads == (layer.self_attn.q_norm, layer.self_attn.k_norm)
    layer.self_attn.q_norm = nn.Identity()
    assert parts_of(layer) is None
    joined, _ = layer_of("phi3")
    assert [part.out_features for part in parts_of(joined).qkv] == [64, 32, 32]
    joined.self_attn.qkv_proj.out_features = 64  # all of it is the query's
    assert parts_of(joined) is None


def test_calls_belong_to_their_layer_and_its_groups_of_hooks():
    layer, _ = layer_of()
    calls = FusedLayer.calls(layer, 16)
    assert calls.are_of(layer)
    assert not calls.are_of(copy.copy(layer))
    assert FusedLayer.calls(layer, 16) is calls
    layer.mlp._forward_hooks = OrderedDict()
    assert not calls.are_of(layer)
    assert FusedLayer.calls(layer, 16).are_of(layer)


def test_products_of_the_layers_own_are_its_feed_forward_layer():
    layer, plain = layer_of("opt")
    x = torch.randn(2, 1, 64)
    with torch.inference_mode():
        expected = plain.fc2(plain.activation_fn(plain.fc1(x)))
        torch.testing.assert_close(parts_of(layer).feed_forward(x), expected)


def test_only_plain_attention_with_a_scaling_is_repeated():
    attention = layer_of()[0].self_attn
    options = repeatable(attention, scaling=0.5, sliding_window=7, softcap=2.0)
    assert options == AttentionOptions(0.5, window=7, softcap=2.0)
    assert repeatable(attention, scaling=0.5, s_aux=torch.ones(4)) is None
    assert repeatable(attention, scaling=0.5, output_attentions=True) is None
    assert repeatable(attention) is None


def test_a_step_without_angles_or_with_other_attention_is_the_classes_own():
    layer, _ = layer_of()
    cache = kvkeep.BoundedCache(layer.self_attn.config, "h2o", 8)
    told, angles = {next(iter(CACHE_ARGUMENTS)): cache}, (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
    x = torch.randn(1, 1, 64)
    with torch.inference_mode():
        assert FusedLayer._decode_step(layer, x, **told) is None
        assert layer.self_attn.config._attn_implementation != "kvkeep"
        assert FusedLayer._decode_step(layer, x, position_embeddings=angles, **told) is None
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_layer_is_tried_since_its_forward_may_compute_with_its_number(name, monkeypatch):
    tried, honest = [], fused_layers._tried
    monkeypatch.setattr(fused_layers, "_tried", lambda *args: (tried.append(args[0]), honest(*args))[1])
    model, _ = fused_copy(made(name, num_hidden_layers=3))
    assert sum(isinstance(part, FusedLayer) for part in model.modules()) == 3
    assert len(tried) == 3


def test_a_layer_that_attends_twice_stays():
    class Twice(LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, **kwargs):
            super().forward(hidden_states, position_embeddings, **kwargs)
            return super().forward(hidden_states, position_embeddings, **kwargs)

    plain = made(num_hidden_layers=1)
    plain.model.layers[0].self_attn.__class__ = Twice
    assert not any(isinstance(part, FusedLayer) for part in fused_copy(plain)[0].modules())


def test_a_decoder_without_layers_or_with_other_parts_is_none():
    decoder = nn.Module()
    decoder.embed_tokens, decoder.layers, decoder.norm, decoder.rotary_emb = (
        nn.Embedding(3, 4),
        nn.ModuleList(),
        nn.LayerNorm(4),
        nn.Identity(),
    )
    assert not fuse_decoder(decoder)
    assert type(decoder) is nn.Module


def test_a_decoder_with_other_parts_than_when_it_was_fused_runs_its_layers_one_by_one(counted):
    plain, model = both()
    plain.model.more, model.model.more = nn.Identity(), nn.Identity()
    torch.testing.assert_close(steps(model, tokens=2), steps(plain, tokens=2), rtol=0, atol=2e-5)
    assert counted == {"before": 4, "behind": 4, "whole": 0}


def test_masks_of_several_kinds_of_layers_are_plain_if_each_is():
    plain, padded = PaddingMask(None, 0, 0, None), PaddingMask(torch.tensor([[False, True]]), 0, 0, None)
    cache = kvkeep.BoundedCache(made().config, "h2o", 8)
    for masks, wanted in (({"a": plain, "b": plain}, True), ({"a": plain, "b": padded}, False), ({"a": None}, False)):
        assert fused_decoder._is_plain(masks, cache) is wanted

import copy
from concurrent.futures import ThreadPoolExecutor

import model_folders
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

import kvkeep
from kvkeep.backends import layer_ops
from kvkeep.backends.native import native
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models.fused_modules import FusedHead, FusedLinear, is_close
from kvkeep.models.packed_weights import PackedLinear, faster, pack_weights
from kvkeep.models.prepare import FUSED, describe, fuse_modules, prepare, prepare_for_rows, weight_layout

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, 2 * (7 + 2 + 1 + 1) + 3),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, 2 * (7 + 2 + 1 + 1) + 3),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}, 2 * (7 + 4 + 1 + 1) + 3),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16}, 2 * (7 + 4 + 1 + 1) + 3),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 16}, 2 * (7 + 6 + 1 + 1) + 3),
    "mistral": (MistralForCausalLM, MistralConfig, {}, 2 * (7 + 2 + 1 + 1) + 3),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}, 2 * (4 + 2 + 1 + 1) + 3),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config, {}, 2 * (6 + 2 + 1 + 1) + 3),
    "nemotron": (NemotronForCausalLM, NemotronConfig, {}, 2 * (6 + 2 + 1 + 1) + 3),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 80, "word_embed_proj_dim": 64}, 2 * (6 + 2 + 1) + 3),
}


def made(name: str = "llama", **options):
    """A small model of random numbers, which engines leave as it is."""
    kind, config, more, _ = MODELS[name]
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 4} if config is OPTConfig else SIZES  # which has no groups of heads
    model = kind(config(**{**sizes, **more, **options})).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, 0, 0.1)
    for norm in model.modules():
        if "Norm" in type(norm).__name__:
            nn.init.normal_(norm.weight, 0.5, 0.2)
    prepare(model, fused=False)
    return model


def fused_copy(model):
    """A copy, fused, and the number of fused modules."""
    other = copy.deepcopy(model)
    return other, fuse_modules(other)


def test_a_model_on_another_device_is_said_to_run_there():
    assert describe(made().to("meta")) == "as transformers has them, with the backend for meta"


def test_a_dtype_that_the_kernel_does_not_read_is_named():
    model = MODELS["llama"][0](LlamaConfig(**SIZES)).double()
    assert describe(model) == (
        "as transformers has them, in torch: the native kernel reads float32, bfloat16, float16, and no float64"
    )


@pytest.mark.parametrize("name", MODELS)
def test_how_steps_run_is_said(name):
    model, _ = fused_copy(made(name))
    assert describe(model) == "all 2 layers as one call of the native kernel, from the second new token on"


def generated(model, rows: int = 3, tokens: int = 64):
    requests = [
        Request(prompt=tuple(range(3 + i, 20 + 5 * i)), sampling=SamplingParams(max_new_tokens=tokens), ignore_end=True)
        for i in range(rows)
    ]
    return [result.token_ids for result in Engine(model, budget=24, rows=rows).generate(requests)]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_says_what_the_plain_one_says(name):
    plain = made(name)
    model, count = fused_copy(plain)
    assert count == MODELS[name][-1]
    ids = torch.arange(2, 40).view(2, 19)
    with torch.inference_mode():
        for x in (ids, ids[:, :1]):
            torch.testing.assert_close(model(x).logits, plain(x).logits, rtol=0, atol=1e-5)
    assert generated(model) == generated(plain)


def test_in_bfloat16_too():
    plain = made().bfloat16()
    model, count = fused_copy(plain)
    assert count == MODELS["llama"][-1]
    x = torch.arange(2, 7).view(5, 1)
    with torch.inference_mode():
        found, expected = model(x).logits.float(), plain(x).logits.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_that_is_loaded_is_fused(dtype):
    model, _ = kvkeep.load(model_folders.folder(), dtype=dtype)
    kinds = {kind for kind in FUSED if any(isinstance(module, kind) for module in model.modules())}
    assert {*FUSED} - kinds == ({FusedHead} if dtype == "float32" else set())
    plain, _ = kvkeep.load(model_folders.folder(), dtype=dtype, fused=False)
    Engine(plain, rows=1)
    assert not any(isinstance(module, FUSED) for module in plain.modules())


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("KVKEEP_FUSED", "0")
    model, _ = kvkeep.load(model_folders.folder())
    assert not any(isinstance(module, FUSED) for module in model.modules())


def test_an_engine_fuses_a_model_from_elsewhere():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    Engine(model, rows=1)
    assert weight_layout(model) == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompts_in_a_slow_dtype_are_computed_with_widened_weights(dtype, monkeypatch):
    monkeypatch.setattr(layer_ops, "slow", lambda kind: kind == dtype)
    plain = made().to(dtype)
    model, _ = fused_copy(plain)
    for length in (1, 40, 200):
        ids = torch.arange(length)[None] % 30
        with torch.inference_mode():
            found, expected = model(ids).logits.float(), plain(ids).logits.float()
        torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * expected.abs().max().item())


def test_a_model_is_plain_again_where_another_process_was():
    model = made()
    kinds = [type(module) for module in model.modules()]
    fuse_modules(model)
    prepare_for_rows(model, 1, (True, False))
    assert weight_layout(model) == (True, False)
    prepare_for_rows(model, 1, (False, False))
    assert weight_layout(model) == (False, False)
    assert [type(module) for module in model.modules()] == kinds
    assert not any("_qkv" in vars(module) for module in model.modules())


def test_a_fused_model_can_be_pickled(tmp_path):
    model, _ = fused_copy(made())
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    assert generated(again) == generated(model)


def test_classes_keep_their_names():
    plain = made()
    model, _ = fused_copy(plain)
    names = [type(module).__qualname__ for module in plain.modules() if type(module) is not nn.Linear]
    assert [type(m).__qualname__ for m in model.modules() if not isinstance(m, nn.Linear)] == names


def test_hooks_on_an_activation_are_called():
    model, _ = fused_copy(made())
    heard = []
    block = model.model.layers[0].mlp
    with torch.inference_mode():
        before = block(torch.ones(1, 1, 64))
        handle = block.act_fn.register_forward_hook(lambda module, args, found: heard.append(1) or found * 0)
        assert not block(torch.ones(1, 1, 64)).any()
        handle.remove()
        torch.testing.assert_close(block(torch.ones(1, 1, 64)), before)
    assert heard == [1]


def test_one_call_for_query_key_and_value(monkeypatch):
    model, _ = fused_copy(made())
    calls = []
    honest = layer_ops.products
    monkeypatch.setattr(layer_ops, "products", lambda x, layers: (calls.append(len(layers)), honest(x, layers))[1])
    with torch.inference_mode():
        model(torch.tensor([[3]]))
    assert calls == [3, 1, 3, 1, 1]


def test_outputs_are_kept_for_the_same_tensor_and_one_call():
    model, _ = fused_copy(made())
    attention = model.model.layers[0].self_attn
    plain = nn.functional.linear
    with torch.inference_mode():
        x, other = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
        attention.q_proj(x)
        torch.testing.assert_close(attention.k_proj(other), plain(other, attention.k_proj.weight))
        attention.k_proj(x)
        x += 1
        torch.testing.assert_close(attention.k_proj(x), plain(x, attention.k_proj.weight))
        attention.q_proj(torch.randn(99, 1, 64))  # too many rows for the kernel
        torch.testing.assert_close(attention.v_proj(x), plain(x, attention.v_proj.weight))


def test_a_fused_model_can_be_saved_copied_and_trained(tmp_path):
    plain = made()
    model, _ = fused_copy(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    x = torch.arange(5)[None]
    torch.testing.assert_close(again(x).logits, plain(x).logits)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.v_proj.weight.mul_(2)
        assert not torch.equal(twin(x[:, 3:4]).logits, model(x[:, 3:4]).logits)
    model(x, labels=x).loss.backward()
    plain(x, labels=x).loss.backward()
    found, expected = (m.model.layers[0].mlp.up_proj.weight.grad for m in (model, plain))
    torch.testing.assert_close(found, expected)


def test_tied_weights_stay_tied():
    model, count = fused_copy(made(tie_word_embeddings=True))
    assert count == MODELS["llama"][-1]
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Centred(nn.Module):
    """Looks like a norm by the root mean square, and is none."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        x = x - x.mean(dim=-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class TwoInputs(Centred):
    def forward(self, x, more):
        return x + more


def test_modules_with_another_rule_stay():
    model = made()
    first, second = model.model.layers
    first.input_layernorm, second.input_layernorm = Centred(64), TwoInputs(64)
    plain = type(first.mlp)
    first.mlp.__class__ = type("Other", (plain,), {"forward": lambda self, x: 1.01 * plain.forward(self, x)})
    second.mlp.act_fn = nn.GELU()
    assert fuse_modules(model) == MODELS["llama"][-1] - 4 - 2 - 1
    assert not any(isinstance(m, FUSED) for m in (first.input_layernorm, second.input_layernorm, first.mlp, second.mlp))


def test_modules_with_hooks_or_in_training_stay():
    model = made()
    first, second = model.model.layers
    first.mlp.register_forward_hook(lambda *_: None)
    first.input_layernorm.register_forward_pre_hook(lambda *_: None)
    second.self_attn.o_proj.forward = second.self_attn.o_proj.forward
    second.self_attn.q_proj.train()
    assert fuse_modules(model) == MODELS["llama"][-1] - 4 - 2 - 1
    assert not isinstance(first.mlp, FUSED)
    assert isinstance(first.mlp.up_proj, FusedLinear)
    assert second.self_attn.k_proj._qkv is None


def test_parts_that_are_replaced_or_watched_later_are_called():
    model, _ = fused_copy(made())
    mlp = model.model.layers[0].mlp
    seen = []
    with torch.inference_mode():
        x = torch.randn(1, 1, 64)
        before = mlp(x)
        handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
        torch.testing.assert_close(mlp(x), before)
        handle.remove()
        mlp.down_proj.forward = lambda x: (seen.append("down"), FusedLinear.forward(mlp.down_proj, x))[1]
        torch.testing.assert_close(mlp(x), before)
        del mlp.down_proj.forward
        mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Tanh())
        assert not torch.equal(mlp(x), before)
    assert seen == ["up", "down"]


def test_fused_layers_are_not_compiled():
    model, _ = fused_copy(made())
    assert kvkeep.compile_layers(kvkeep.attach(model), backend="eager") == 0


@pytest.mark.long
def test_several_threads_may_run_the_same_model():
    model, _ = fused_copy(made())
    tokens = [torch.tensor([[token]]) for token in range(3, 7)]

    @torch.inference_mode()
    def logits(token):
        return [model(token).logits for _ in range(30)]

    expected = [logits(token)[0] for token in tokens]
    with ThreadPoolExecutor(len(tokens)) as pool:
        for found, alone in zip(pool.map(logits, tokens), expected, strict=True):
            assert all(torch.equal(one, alone) for one in found)


def test_other_kinds_of_weights_and_compiled_modules_stay():
    class Quantised(nn.Parameter):
        pass

    model = made()
    first, second = model.model.layers
    first.self_attn.q_proj.weight = Quantised(first.self_attn.q_proj.weight.data)
    first.self_attn.o_proj.to(torch.float64)
    second.mlp.compile(backend="eager")
    assert fuse_modules(model) == MODELS["llama"][-1] - 2 - 4 - 2 - 1
    assert fuse_modules(made().to("meta")) == 0
    assert fuse_modules(made().double()) == 0


def test_another_backend_is_an_off_switch(monkeypatch):
    monkeypatch.setenv("KVKEEP_BACKEND", "torch")
    assert fuse_modules(made()) == 0


def test_a_second_call_changes_nothing():
    model, _ = fused_copy(made())
    kinds = [type(module) for module in model.modules()]
    assert fuse_modules(model) == 0
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_packed_layers_stay_and_fused_ones_are_packed():
    model = made()
    assert pack_weights(model) == 2 * 7 + 1
    assert fuse_modules(model) == 2 * 2 + 1
    assert generated(model) == generated(made())
    other, _ = fused_copy(made())
    assert pack_weights(other) == 2 * 7 + 1
    assert generated(other) == generated(made())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_the_layer_of_the_logits_is_packed_in_float32_alone():
    for dtype, kind in ((torch.float32, PackedLinear), (torch.bfloat16, FusedHead)):
        model, _ = fused_copy(made(tie_word_embeddings=False).to(dtype))
        assert pack_weights(model)
        assert type(model.lm_head) is kind
        with torch.inference_mode():
            assert model(torch.arange(2, 9)[None]).logits.dtype is torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_float32_in_a_model_whose_dtype_changes_after_it_was_prepared(tied):
    model, _ = fused_copy(made(tie_word_embeddings=tied))
    for dtype, kind in ((torch.bfloat16, FusedHead), (torch.float32, FusedLinear), (torch.float16, FusedHead)):
        fuse_modules(model.to(dtype))
        assert type(model.lm_head) is kind
        with torch.inference_mode():
            assert model(torch.arange(2, 9)[None]).logits.dtype is torch.float32


@pytest.mark.parametrize(("rows", "kind"), [(1, FusedLinear), (2, FusedLinear), (3, PackedLinear), (40, PackedLinear)])
def test_weights_of_many_rows_are_packed(monkeypatch, rows, kind):
    monkeypatch.setattr("kvkeep.models.packed_weights.faster", lambda *_: True)
    model, _ = fused_copy(made("phi3"))
    prepare_for_rows(model, rows)
    assert {type(model.lm_head), type(model.model.layers[0].mlp.down_proj)} == {kind}
    assert isinstance(model.model.norm, FUSED)
    kvkeep.attach(model)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_timing_leaves_the_layers_as_they_are():
    model, _ = fused_copy(made())
    kinds = [type(module) for module in model.modules()]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert faster(layers, 1) in (False, True)
    assert [type(module) for module in model.modules()] == kinds


class Feed(nn.Module):
    """A feed-forward layer as models have them."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 80), nn.Linear(64, 80), nn.Linear(80, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def part():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), Feed()).eval()


def test_a_norm_and_a_feed_forward_layer_are_calls_of_the_kernel_while_they_are_asked_as_usual(part, monkeypatch):
    fused, called = copy.deepcopy(part), []
    assert fuse_modules(fused) == 1 + 3 + 1
    for name in ("norm", "gated"):
        honest = getattr(layer_ops, name)
        monkeypatch.setattr(
            layer_ops, name, lambda *args, name=name, honest=honest: (called.append(name), honest(*args))[1]
        )
    with torch.inference_mode():
        x = torch.randn(2, 1, 64)
        torch.testing.assert_close(fused(x), part(x))
        assert called == ["norm", "gated"]
        # by keyword, or with an activation that was not tried, their own classes compute
        assert torch.equal(fused[0](input=x), part[0](input=x))
        torch.testing.assert_close(fused[1](x=x), part[1](x=x))
        for model in (part, fused):
            model[1].act_fn = nn.Tanh()
        torch.testing.assert_close(fused[1](x), part[1](x))
    assert called == ["norm", "gated"]


def test_a_product_that_somebody_has_replaced_in_torch_is_his(part, monkeypatch):
    fuse_modules(part)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: input + 7)  # noqa: A006  # torch's name
    with torch.inference_mode():
        assert part[1].down_proj(torch.zeros(1, 1, 64)).unique().tolist() == [7.0]


def test_how_steps_of_other_modules_run_is_said(part):
    others = "its weights are quantised, or of a dtype that the kernel cannot read"
    assert describe(part) == f"as transformers has them, in torch: {others}"
    fuse_modules(part)
    assert describe(part) == (
        "3 products in the native kernel, the rest in torch: its layers are of no kind that is fused"
    )
    layers = fused_copy(made(num_hidden_layers=1))[0].model.layers
    assert describe(layers) == (
        "1 layers as calls of the native kernel, one by one: the decoder has parts beside its layers"
    )


def test_tensors_are_close_by_shape_dtype_and_the_largest_number_of_their_row():
    found = torch.tensor([[1.0, 1000.0]])
    assert is_close(found, found + torch.tensor([[1e-4, 0.0]]))
    assert not is_close(found, found + 1.0)
    for other in (None, found[0], found.double(), found.T):
        assert not is_close(found, other)

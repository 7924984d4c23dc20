"""Decoders that add embeddings of positions, and whose layers have a feed-forward layer of their own (OPT)."""

import pytest
import torch
from test_changed_after_fusing import pair, steps
from test_whole_layers import OPT_IS_ASKED_PLAINLY, attached, calls  # noqa: F401  a fixture
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import kvkeep
from kvkeep.backends.native import native
from kvkeep.cache.hf_layers import handed
from kvkeep.models.fused_decoder import FusedDecoder
from kvkeep.models.fused_layers import FusedLayer
from kvkeep.models.prepare import fuse_modules

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def fused(**options):
    """A fused model."""
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**{**SIZES, **options})).eval()
    fuse_modules(model)
    return model


def kinds(model):
    """How many layers and decoders are fused."""
    return tuple(sum(isinstance(part, kind) for part in model.modules()) for kind in (FusedLayer, FusedDecoder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities(dtype, calls):  # noqa: F811
    plain, model = pair(name="opt")
    plain, model = plain.to(dtype), model.to(dtype)
    steps(model)  # its first step in one call is compared with its class
    found, expected = (steps(each, count=20).float().log_softmax(-1) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.2)
    assert not OPT_IS_ASKED_PLAINLY or len(calls) >= 2 * 18


@pytest.mark.parametrize(
    "options",
    [
        {"do_layer_norm_before": False},
        {"layer_norm_elementwise_affine": False},
        {"activation_function": "gelu"},
        {"word_embed_proj_dim": 32},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_computed_otherwise_stays(options):
    layers, decoders = kinds(fused(**options))
    assert layers == (2 if "word_embed_proj_dim" in options else 0)
    assert decoders == 0


@pytest.mark.parametrize("options", [{"enable_bias": False}, {"activation_function": "gelu_new"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_differs_in_a_part(options, dtype):
    model = fused(**options)
    assert kinds(model) == (2, 1)
    model = OPTForCausalLM(model.config).to(dtype).eval()
    fuse_modules(model)
    assert kinds(model) == (2, 1)


class Limited(nn.Module):
    """As long as all numbers are small it is a ReLU."""

    def forward(self, x):
        return x.clamp(min=0, max=1)


@pytest.mark.parametrize("act", [Limited(), nn.SiLU(), nn.LeakyReLU(), nn.Identity()], ids=lambda act: str(act))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_tells_activations_apart(act, dtype):
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SIZES)).eval().to(dtype)
    for layer in model.model.decoder.layers:
        layer.activation_fn = act
    fuse_modules(model)
    rules = [layer.rule.activation for layer in model.modules() if isinstance(layer, FusedLayer)]
    assert rules == ([0, 0] if isinstance(act, nn.SiLU) else [])


def an_activation(model):
    for layer in model.model.decoder.layers:
        layer.activation_fn = nn.Identity()


def a_hook(model):
    for layer in model.model.decoder.layers:
        layer.activation_fn.register_forward_hook(lambda module, args, out: out * 2)


def positions(model):
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(2)


def another_offset(model):
    model.model.decoder.embed_positions.offset = 5


def a_bias_of_a_norm(model):
    for layer in model.model.decoder.layers:
        layer.final_layer_norm.bias = nn.Parameter(torch.ones(64))


def no_weight_of_a_norm(model):
    for layer in model.model.decoder.layers:
        layer.final_layer_norm.weight = None


def query_scale(model):
    for layer in model.model.decoder.layers:
        layer.self_attn.scaling = 0.7


def the_last_norm(model):
    model.model.decoder.final_layer_norm = nn.Identity()


def a_projection(model):
    model.model.decoder.project_out = nn.Linear(64, 64)
    nn.init.eye_(model.model.decoder.project_out.weight)
    nn.init.ones_(model.model.decoder.project_out.bias)


CHANGES = (
    an_activation,
    a_hook,
    positions,
    another_offset,
    a_bias_of_a_norm,
    no_weight_of_a_norm,
    query_scale,
    the_last_norm,
    a_projection,
)


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps(change):
    plain, model = pair(name="opt")
    before, expected = steps(plain), steps(plain, change)
    assert not torch.allclose(before, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(steps(model, change), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("given", [("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")], ids=str)
def test_positions_that_are_given_or_follow_from_the_mask(given, calls):  # noqa: F811
    plain, model = pair(name="opt")
    steps(model)
    calls.clear()
    found, real = [], torch.ones(2, 20, dtype=torch.long)
    real[1, :5] = 0
    for each in (plain, model):
        cache, seen, logits = kvkeep.BoundedCache(each.config, "h2o", 8), 0, []
        for step, T in enumerate((12, 1, 1, 1, 1, 1)):
            mask = real[:, : seen + T]
            asked = {"attention_mask": mask, "position_ids": (mask.cumsum(1) * mask - 1)[:, -T:] + 30 * (step > 3)}
            # the step that is recorded hears of no mask, and those behind it what they are given
            names = {0: {"attention_mask"}, 1: {"position_ids"}, 2: {"position_ids"}}.get(step, given)
            ids = (torch.arange(2)[:, None] * 7 + torch.arange(T) + step * 5) % 90 + 3
            with torch.no_grad():
                more = {name: asked[name] for name in names}
                logits.append(each(ids, **handed(each, cache), use_cache=True, **more).logits[:, -1:])
            seen += T
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)
    assert not OPT_IS_ASKED_PLAINLY or len(calls) == 2 * 4


def test_a_text_beyond_the_last_position_fails_as_in_its_class():
    """The embeddings have two rows more than positions."""
    model = kvkeep.attach(fused(max_position_embeddings=12))
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.no_grad():
        model(torch.arange(3, 10)[None], **handed(model, cache), use_cache=True)
        for step in range(6):
            ids = torch.tensor([[5]])
            if step < 5:
                model(ids, **handed(model, cache), use_cache=True)
                continue
            with pytest.raises(IndexError):
                model(ids, **handed(model, cache), use_cache=True)


def test_a_decoder_of_two_positions_is_tried_as_well():
    model = kvkeep.attach(fused(max_position_embeddings=2))
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.no_grad():
        model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
        model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)


def test_hooks_on_embeddings_keep_what_they_heard():
    model, heard = attached("opt"), []
    for part in (model.model.decoder.embed_tokens, model.model.decoder.embed_positions):
        part.register_forward_hook(lambda module, args, out: heard.append((out, out.clone())))
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.no_grad():
        for _ in range(5):
            model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
    assert len(heard) == 10
    assert all(torch.equal(now, then) for now, then in heard)

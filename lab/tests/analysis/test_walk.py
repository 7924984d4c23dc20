"""The walk shows what the model's own attention and MLP blocks do: against eager attention and hooks by name."""

import pytest
import torch
from parity import models
from phases import phase_of
from transformers import AutoModelForCausalLM, MixtralConfig

from kvkeep.errors import ShapeError, UnsupportedModelError
from kvkeep.models.attention import attach
from kvkeep_lab.analysis import mlp_blocks
from kvkeep_lab.analysis.measure import AttentionRows, Mlp
from kvkeep_lab.analysis.walk import look, walk

LENGTH = 45
BLOCK = 16
PLAIN = ["llama", "llama-mqa", "mistral-window", "qwen2-window", "gemma2", "gemma3", "phi3", "olmo2", "stablelm"]
FAMILIES = [*PLAIN, "gpt2", "gpt-neox", "opt", "gpt-oss"]


class Kept:
    """Everything that was shown, joined."""

    def __init__(self):
        self.shown: dict[int, list[AttentionRows]] = {}
        self.blocks: dict[int, list[Mlp]] = {}

    def rows(self, rows):
        self.shown.setdefault(rows.layer, []).append(rows)

    def mlp(self, mlp):
        self.blocks.setdefault(mlp.layer, []).append(mlp)

    def weights(self, layer):
        parts = self.shown[layer]
        pad = [torch.nn.functional.pad(p.weights, (0, LENGTH - p.weights.shape[-1])) for p in parts]
        assert [p.first for p in parts] == list(range(0, LENGTH, BLOCK))
        return torch.cat(pad, dim=1)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, models.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))


def make(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)  # attention that is far from even
    return model


def walked(model, ids, **options):
    kept = Kept()
    walk(attach(model), ids, kept, block=BLOCK, **options)
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_eager_attention(family, ids):
    model = make(models.CONFIGS[family]())
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(ids[None], output_attentions=True).attentions
    kept = walked(model, ids)
    assert sorted(kept.shown) == list(range(len(expected)))
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(kept.weights(layer), weights[0], rtol=1e-4, atol=2e-6)
    assert max(w[0].amax(dim=-1)[:, 20:].max() for w in expected) > 0.1  # far from even


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
def test_logits_and_values_give_weights_and_output(family, ids):
    kept = walked(make(models.CONFIGS[family]()), ids)
    for rows in (part for parts in kept.shown.values() for part in parts):
        torch.testing.assert_close(rows.logits.softmax(dim=-1), rows.weights)
        above = torch.arange(rows.weights.shape[2]) > rows.first + torch.arange(rows.weights.shape[1])[:, None]
        assert rows.logits[:, above].eq(-torch.inf).all()
        assert rows.weights[:, above].eq(0).all()
        assert rows.values.shape[1] == rows.weights.shape[2] == rows.logits.shape[2]
    first, second = kept.shown[0][:2]
    assert torch.equal(second.values[:, : first.values.shape[1]], first.values)


def test_the_logits_of_the_model_do_not_depend_on_the_walk(ids):
    """The blocks compute what the whole text at once does: the last layer's rows depend on all before."""
    model = make(models.CONFIGS["llama"]())
    whole, cut = Kept(), Kept()
    walk(attach(model), ids, whole, block=LENGTH)
    walk(model, ids, cut, block=7)
    last = max(whole.shown)
    joined = torch.cat(
        [torch.nn.functional.pad(p.weights, (0, LENGTH - p.weights.shape[-1])) for p in cut.shown[last]], dim=1
    )
    torch.testing.assert_close(joined, whole.shown[last][0].weights, rtol=1e-4, atol=2e-6)


BLOCKS = {  # family → (module whose input is the residual, module whose output is added, module of the units)
    "llama": ("post_attention_layernorm", "mlp", "mlp.act_fn"),
    "phi3": ("post_attention_layernorm", "mlp", "mlp.activation_fn"),
    "gemma2": ("pre_feedforward_layernorm", "post_feedforward_layernorm", "mlp.act_fn"),
    "olmo2": ("mlp", "post_feedforward_layernorm", "mlp.act_fn"),
    "gpt2": ("ln_2", "mlp", "mlp.act"),
    "gpt-neox": ("post_attention_layernorm", "mlp", "mlp.act"),
    "opt": ("final_layer_norm", "fc2", "activation_fn"),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_mlp_blocks_are_found_without_their_names(family, ids):
    model = make(models.CONFIGS[family]())
    before, after, unit = BLOCKS[family]
    layers = mlp_blocks.decoder_layers(model)
    seen = {}

    def keep(name, of):
        return lambda module, args, made: seen.setdefault(name, []).append((args[0] if of == "in" else made).clone())

    last = layers[1]
    last.get_submodule(before).register_forward_hook(keep("residual", "in"))
    last.get_submodule(after).register_forward_hook(keep("output", "out"))
    last.get_submodule(unit).register_forward_hook(keep("units", "out"))
    kept = walked(model, ids)
    assert [block.first for block in kept.blocks[1]] == list(range(0, LENGTH, BLOCK))
    for name, parts in seen.items():
        found = torch.cat([getattr(block, name) for block in kept.blocks[1]])
        assert torch.equal(found, torch.cat([part.flatten(0, -2) for part in parts])), name
        assert len(found) == LENGTH


def test_hooks_are_gone_afterwards(ids):
    model = make(models.CONFIGS["llama"]())
    walked(model, ids)
    assert not any(module._forward_hooks for module in model.modules())


def test_only_what_is_read_is_shown(ids):
    kept = walked(make(models.CONFIGS["llama"]()), ids, reads=frozenset({"mlp"}))
    assert not kept.shown
    assert len(kept.blocks) == 2


def test_a_look_says_what_there_is(ids):
    assert look(attach(make(models.CONFIGS["llama"]())), 3) == look(attach(make(models.CONFIGS["qwen3"]())), 3)
    found = look(attach(make(models.CONFIGS["llama"]())), 3)
    assert (found.n_layers, found.n_heads, found.n_kv_heads) == (2, 4, 2)
    assert found.no_mlp is None
    assert found.no_units is None


def test_a_mixture_of_experts_has_a_block_but_no_units():
    sizes = {**models.GATED, "num_local_experts": 4, "num_experts_per_tok": 2}
    found = look(attach(make(MixtralConfig(**sizes))), 3)
    assert found.no_mlp is None
    assert "units" in found.no_units


def test_a_block_that_does_not_add_up_is_not_shown(ids):
    """A layer that scales what its block makes: neither the block's output nor any other is what is added."""
    model = make(models.CONFIGS["llama"]())
    layer = mlp_blocks.decoder_layers(model)[0]
    layer.register_forward_hook(lambda module, args, made: made * 1.5)
    reasons = []
    kept = Kept()
    walk(attach(model), ids, kept, block=BLOCK, refuse=reasons.append)
    assert 0 not in kept.blocks
    assert "not the sum" in reasons[0]
    assert look(model, 3).no_mlp == reasons[0]


def test_a_model_whose_layers_are_nowhere_is_not_shown():
    model = make(models.CONFIGS["llama"]())
    model.config.num_hidden_layers = 5
    reasons = []
    with mlp_blocks.Watched(model, {0: 0}, lambda mlp: None, reasons.append):
        assert not any(module._forward_hooks for module in model.modules())
    assert reasons == ["the model's list of decoder layers was not found"]


def test_units_of_a_function_that_is_called_twice_are_not_shown(monkeypatch, ids):
    model = make(models.CONFIGS["llama"]())
    kind = type(model.model.layers[0].mlp)
    twice = lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.act_fn(mlp.gate_proj(x))) * mlp.up_proj(x))  # noqa: E731
    monkeypatch.setattr(kind, "forward", twice)
    kept = walked(model, ids)
    assert [block.units for block in kept.blocks[0]] == [None] * 3
    assert look(model, 3).no_mlp is None
    assert "units" in look(model, 3).no_units


def test_a_block_whose_projections_are_no_modules_is_not_understood():
    x = torch.randn(3, 4)
    trace = mlp_blocks.CallTrace([mlp_blocks.Call(torch.nn.ReLU(), x @ torch.ones(4, 4), x.relu())])
    with pytest.raises(mlp_blocks.NotUnderstood, match="projections around a layer's activation function"):
        mlp_blocks.find_block(trace, x)


def test_progress_ends_at_one(ids):
    shares = []
    walked(make(models.CONFIGS["llama"]()), ids, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_layers_of_different_heads_are_refused(monkeypatch, ids):
    model = attach(make(models.CONFIGS["llama"]()))
    real = Kept.rows
    from kvkeep_lab.analysis.walk import _FirstLook

    def odd(self, rows):
        self.heads.append((rows.weights.shape[0] + rows.layer, 2))

    monkeypatch.setattr(_FirstLook, "rows", odd)
    with pytest.raises(UnsupportedModelError, match=r"\(4, 2\), \(5, 2\)"):
        look(model, 3)
    assert real


def test_more_tokens_than_announced_are_an_error():
    from kvkeep.types import AttentionOptions
    from kvkeep_lab.analysis.walk import RowReader

    layer = RowReader(0, length=3, take_rows=None)
    q, kv = torch.zeros(1, 2, 4, 8), torch.zeros(1, 1, 4, 8)
    with pytest.raises(ShapeError, match="room for 3 tokens and was given 4"):
        layer.step(q, kv, kv, options=AttentionOptions(1.0), phase=phase_of(q))

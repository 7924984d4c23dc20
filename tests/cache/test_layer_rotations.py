"""The rotation of each layer, found by a trial: undone, it gives the keys that the model has rotated."""

import copy

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    Qwen3Config,
)

import kvkeep
from kvkeep import parse
from kvkeep.cache import rotary_probe
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer_layout import Layout
from kvkeep.rotary import TextRotation

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**SMALL, "head_dim": 16}
MIXED = ["sliding_attention", "full_attention"] * 2
TWO = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
BORDER = 6000
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 4.0, 9.0, 10.0, 11.0, 12.0, 13.0],
}
LONGER = {"max_position_embeddings": 4 * BORDER}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama3": LlamaConfig(**SMALL, **LONGER, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SMALL, max_position_embeddings=16384, rope_parameters=YARN),
    "qwen3": Qwen3Config(**WIDE),
    "neox": GPTNeoXConfig(**SMALL),
    "gemma2": Gemma2Config(**WIDE),
    "gemma3": Gemma3TextConfig(**WIDE, layer_types=MIXED, sliding_window=16, rope_parameters=TWO),
    "glm": GlmConfig(**WIDE),
    "glm4": Glm4Config(**WIDE),
    "cohere2": Cohere2Config(**SMALL, layer_types=MIXED, sliding_window=16),
    "olmo2": Olmo2Config(**SMALL),
    "phi3": Phi3Config(**SMALL, partial_rotary_factor=0.5),
    "longrope": LlamaConfig(**SMALL, **LONGER, rope_parameters={**LONG, "factor": 4.0}),
    "phi3 longrope": Phi3Config(**SMALL, **LONGER, original_max_position_embeddings=BORDER, rope_parameters=LONG),
    "phimoe longrope": PhimoeConfig(
        **SMALL,
        **LONGER,
        num_local_experts=2,
        original_max_position_embeddings=BORDER,
        rope_parameters={**LONG, "short_mscale": 1.1, "long_mscale": 1.3},
    ),
}
PER_LAYER = {
    "layer_types": MIXED,
    "sliding_window": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
ELSEWHERE = {
    "gemma3n": ("Gemma3nTextConfig", {**WIDE, **PER_LAYER, "num_kv_shared_layers": 0}),
    "gemma4": ("Gemma4TextConfig", {**WIDE, **PER_LAYER, "global_head_dim": 32}),
    "smollm3": ("SmolLM3Config", SMALL),
    "modernbert": ("ModernBertDecoderConfig", SMALL),
    "gpt_oss": ("GptOssConfig", {**WIDE, "num_local_experts": 4, "rope_parameters": YARN}),
    "nanochat": ("NanoChatConfig", SMALL),
    "ministral3": ("Ministral3Config", WIDE),
    "deepseek": ("DeepseekV3Config", {**SMALL, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 8, **GROUPS}),
}
"""Families that some versions of transformers lack."""
CONFIGS |= {
    name: getattr(transformers, kind)(**sizes)
    for name, (kind, sizes) in ELSEWHERE.items()
    if hasattr(transformers, kind)
}
SEEN = {}


def noted(module, query, key, value, mask, **options):
    SEEN.setdefault(module.layer_idx, key)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register("noted", noted)
AttentionMaskInterface.register("noted", lambda *_, **__: None)


def keys_of(model, positions):
    SEEN.clear()
    ids = torch.arange(3, 3 + len(positions))[:, None]
    with torch.inference_mode():
        model(input_ids=ids, position_ids=torch.tensor(positions)[:, None], use_cache=False)
    return dict(SEEN)


class Still(torch.nn.Module):
    """A rotary embedding that rotates nothing: cosines of 1 and sines of 0."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        if isinstance(out, tuple):
            return torch.ones_like(out[0]), torch.zeros_like(out[1])
        return torch.ones_like(out)


def stilled(model):
    """The model without its rotation."""
    still = copy.deepcopy(model)
    parts = [
        (parent, name, child)
        for parent in list(still.modules())
        for name, child in list(parent.named_children())
        if type(child).__name__.endswith("RotaryEmbedding")
    ]
    assert parts
    for parent, name, child in parts:
        setattr(parent, name, Still(child))
    return still


@pytest.mark.parametrize("name", CONFIGS)
def test_unrotated_keys_are_those_before_the_models_rotation(name):
    torch.manual_seed(1)
    model = AutoModel.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="noted").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    rotations = Layout.of(CONFIGS[name], parse("leverage:rotated=false")).rotations
    beyond = [7, BORDER + 5] if "longrope" in name else []
    for positions in ([0, 7, 5000], beyond):
        if not positions:
            continue
        rotated, raw = keys_of(model, positions), keys_of(stilled(model), positions)
        assert rotated.keys() == raw.keys() == rotations.keys()
        for number, keys in rotated.items():
            rotation, at = rotations[number], torch.tensor(positions)[:, None, None]
            if rotation is not None and rotation.longest is not None:
                assert rotation.longest == BORDER
                ends = torch.full((len(positions),), max(positions) + 1)
                rotation = TextRotation(rotation, rotation.beyond, BORDER, ends)
            found = keys if rotation is None else rotation.undo(keys, at)
            torch.testing.assert_close(found, raw[number], rtol=1e-5, atol=1e-5)


def test_layers_of_one_kind_share_their_rotation():
    rotations = Layout.of(CONFIGS["gemma3"], parse("reread")).rotations
    assert rotations[0] is rotations[2]
    assert rotations[1] is rotations[3]
    assert rotations[0] is not rotations[1]
    assert rotations[1].frequencies[0] == 1 / 8


def test_layers_that_do_not_rotate_have_none():
    rotations = Layout.of(CONFIGS["cohere2"], parse("reread")).rotations
    assert [rotation is None for rotation in rotations.values()] == [False, True] * 2
    layers = kvkeep.BoundedCache(CONFIGS["cohere2"], "leverage", 16).bounded_layers()
    assert [layer.rotary is None for layer in layers.values()] == [False, True] * 2


def test_the_trial_leaves_random_numbers_and_the_configuration_alone():
    config = LlamaConfig(**SMALL, rope_theta=12_345.0)
    before, state = config.to_dict(), torch.random.get_rng_state()
    Layout.of(config, parse("leverage"))
    assert config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("way", [torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("meta")])
def test_the_trial_does_not_depend_on_what_the_caller_has_chosen(way):
    config = Qwen3Config(**WIDE, rope_theta=7000.0)
    rotary_probe._known.clear()
    want = Layout.of(config, parse("leverage")).rotations[0].frequencies
    rotary_probe._known.clear()
    with way():
        found = Layout.of(config, parse("leverage")).rotations[0].frequencies
    assert torch.equal(found, want)
    assert not found.is_inference()


def test_weights_in_another_form_change_nothing():
    config = LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq", "bits": 4}, dtype="bfloat16")
    assert Layout.of(config, parse("leverage")).rotations[0] is not None


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"head_budget": "ada"}, {"prefill_chunk": 5}], ids=str)
@pytest.mark.parametrize("name", ["glm", "cohere2", "gemma3", "gemma4", "smollm3", "nanochat"])
def test_slot_positions_with_room_for_all_are_true_positions(name, options):
    if name not in CONFIGS:
        return
    torch.manual_seed(2)
    model = kvkeep.attach(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval())
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ids, found = torch.randint(3, 97, (2, 30)), {}
    for mode in ("true", "slot"):
        cache = kvkeep.BoundedCache(CONFIGS[name], "h2o:recent=4", 40, positions=mode, **options)
        parts = [ids[:, :22], *ids[:, 22:].split(1, dim=1)]
        found[mode] = torch.cat([model(part, **handed(model, cache)).logits for part in parts], dim=1).log_softmax(-1)
    atol = 0.5 if "kv_bits" in options else 1e-3  # codes of unrotated keys are others
    torch.testing.assert_close(found["slot"], found["true"], rtol=0, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o:recent=2", "adakv:window=4"])
@pytest.mark.parametrize("name", ["glm", "gemma3", "gemma4", "nanochat"])
def test_slot_positions_are_the_same_on_every_backend(name, policy, monkeypatch):
    """The kernel rotates halves while it reads; other pairs are rotated before."""
    if name not in CONFIGS:
        return
    torch.manual_seed(2)
    model = kvkeep.attach(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval())
    ids, found = torch.randint(3, 97, (2, 40)), []
    for backend in (None, "torch"):
        if backend is not None:
            monkeypatch.setenv("KVKEEP_BACKEND", backend)
        cache = kvkeep.BoundedCache(CONFIGS[name], policy, 14, positions="slot")
        parts = [ids[:, :30], *ids[:, 30:].split(1, dim=1)]
        found.append(torch.cat([model(part, **handed(model, cache)).logits for part in parts], dim=1).log_softmax(-1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)

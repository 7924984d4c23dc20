"""Models of well-known families are counted without transformers, exactly as they are when they are built."""

import json
import zlib

import pytest
from model_folders import folder
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from kvkeep.errors import KVKeepError
from kvkeep.models.load import quiet
from kvkeep.planning.families import counted
from kvkeep.planning.model_shapes import built

SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GATED = SIZES | {"intermediate_size": 72, "num_key_value_heads": 2}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}

CONFIGS = {
    "llama": LlamaConfig(**GATED),
    "llama tied, biases, head dim, scaled rope": LlamaConfig(
        **GATED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=20, rope_parameters=ROPE
    ),
    "llama, as many heads, bfloat16": LlamaConfig(**GATED | {"num_key_value_heads": 4}, dtype="bfloat16"),
    "granite": GraniteConfig(**GATED, embedding_multiplier=12.0),
    "mistral": MistralConfig(**GATED),
    "mistral without a window": MistralConfig(**GATED, sliding_window=None, tie_word_embeddings=True),
    "mistral, a short window": MistralConfig(**GATED, sliding_window=16, head_dim=16),
    "qwen2": Qwen2Config(**GATED),
    "qwen2 tied": Qwen2Config(**GATED, tie_word_embeddings=True, dtype="float16"),
    "qwen3": Qwen3Config(**GATED),
    "qwen3, biases, head dim": Qwen3Config(**GATED, attention_bias=True, head_dim=16, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**GATED),
    "gemma": GemmaConfig(**GATED, head_dim=16),
    "gemma2": Gemma2Config(**GATED, head_dim=16, sliding_window=16),
    "gemma2, other layers": Gemma2Config(**GATED, layer_types=TYPES, attention_bias=True),
    "gemma3": Gemma3TextConfig(**GATED | {"num_hidden_layers": 7}, head_dim=16, sliding_window=16),
    "gemma3, other layers": Gemma3TextConfig(**GATED, layer_types=TYPES, tie_word_embeddings=False),
    "phi3": Phi3Config(**GATED),
    "phi3 with a window": Phi3Config(**GATED, sliding_window=16, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**GATED, attention_bias=True),
    "opt": OPTConfig(**SIZES, ffn_dim=100, word_embed_proj_dim=48),
    "opt, not tied": OPTConfig(**SIZES, ffn_dim=20, word_embed_proj_dim=48, tie_word_embeddings=False),
}
OTHERS = (None, True, False, 0, -1, 1, 5, 24, 1.5, 10**12, "x", [], ["x"], {}, {"rope_type": "x"})
"""Values that a field might have in a damaged or a strange file."""


def written(path, fields):
    """The path of a file with these fields."""
    (path / "config.json").write_text(json.dumps(fields))
    return str(path / "config.json")


def fields_of(config):
    """What the file of a published model has."""
    return {**json.loads(config.to_json_string()), "architectures": [ARCHITECTURES[config.model_type]]}


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "granite": "GraniteForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
}


def parts(outline):
    """Everything but where the configuration is read."""
    return {name: value for name, value in vars(outline).items() if name not in ("source", "config")}


def by_both(path):
    """The model, counted and built; ``None`` where it is not counted, or cannot be built."""
    if (found := counted(path)) is None:
        return None, None
    try:
        with quiet():
            return parts(found), parts(built(path))
    except KVKeepError as error:
        return parts(found), error


NO_WINDOWS = [None] * 3
COUNTED = {
    "llama": (60816, 4320, NO_WINDOWS),
    "llama tied, biases, head dim, scaled rope": (71520, 0, NO_WINDOWS),
    "llama, as many heads, bfloat16": (67728, 4320, NO_WINDOWS),
    "granite": (60816, 4320, NO_WINDOWS),
    "mistral": (60816, 4320, [4096, 4096, 4096]),
    "mistral without a window": (56496, 0, NO_WINDOWS),
    "mistral, a short window": (67728, 4320, [16, 16, 16]),
    "qwen2": (61104, 4320, NO_WINDOWS),
    "qwen2 tied": (56784, 0, NO_WINDOWS),
    "qwen3": (262032, 4320, NO_WINDOWS),
    "qwen3, biases, head dim": (64032, 0, NO_WINDOWS),
    "smollm3": (56496, 0, NO_WINDOWS),
    "gemma": (63408, 0, NO_WINDOWS),
    "gemma2": (63696, 0, [16, None, 16]),
    "gemma2, other layers": (484704, 0, [None, 4096, None]),
    "gemma3": (143024, 0, [16, 16, 16, 16, 16, None, 16]),
    "gemma3, other layers": (484272, 4320, [None, 4096, None]),
    "phi3": (60816, 4320, NO_WINDOWS),
    "phi3 with a window": (56496, 0, [16, 16, 16]),
    "olmo2": (61464, 4320, NO_WINDOWS),
    "opt": (65628, 3168, NO_WINDOWS),
    "opt, not tied": (46668, 7488, NO_WINDOWS),
}
"""Parameters, those that are looked up, and windows of the models when they are built, which takes longer."""


def test_all_families_have_the_parameters_and_the_windows_of_built_models(tmp_path):
    for name, config in CONFIGS.items():
        shape = counted(written(tmp_path, fields_of(config))).shape
        assert (shape.parameters, shape.looked_up, [layer.window for layer in shape.layers]) == COUNTED[name], name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_counted_as_it_is_built(name, tmp_path):
    counts, made = by_both(written(tmp_path, fields_of(CONFIGS[name])))
    assert counts is not None
    assert counts == made
    assert by_both(str(tmp_path))[0] == {**counts, "name": str(tmp_path)}


def changed():
    """Families with one field less, or with another value in a field."""
    for name, config in CONFIGS.items():
        for field in fields_of(config):
            for value in ("missing", *OTHERS):
                yield name, field, value


CHANGED = list(changed())
SAMPLE = [case for case in CHANGED if zlib.crc32(repr(case).encode()) % 40 == 0]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(CHANGED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_is_counted_at_all_is_counted_right(cases, tmp_path):
    wrong, n_counted = [], 0
    for name, field, value in cases:
        fields = fields_of(CONFIGS[name])
        del fields[field]
        counts, made = by_both(written(tmp_path, fields if value == "missing" else {**fields, field: value}))
        n_counted += counts is not None
        if counts != made:
            wrong.append((name, field, value, str(made)))
    assert wrong == []
    assert n_counted > len(cases) / 20


@pytest.mark.whole
@pytest.mark.parametrize(
    "more",
    [
        {"frobnicate": 1},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"auto_map": {"AutoConfig": "evil.Config"}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"layer_types": ["chunked_attention"] * 3},
        {"rope_scaling": {"rope_type": "new", "factor": 2.0}},
        {"num_hidden_layers": 10**6},
        {"model_type": "mixtral"},
    ],
)
def test_what_is_not_known_is_left_to_others(more, tmp_path):
    assert counted(written(tmp_path, fields_of(CONFIGS["llama"]))) is not None
    assert counted(written(tmp_path, {**fields_of(CONFIGS["llama"]), **more})) is None


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "num_hidden_layers", "3"),
        ("llama", "num_attention_heads", 5),
        ("llama", "attention_bias", 1),
        ("llama", "hidden_act", "new"),
        ("llama", "rope_parameters", "llama3"),
        ("llama", "pad_token_id", 90),
        ("llama", "dtype", "float64"),
        ("llama, as many heads, bfloat16", "torch_dtype", "bfloat16"),
        ("gemma2", "layer_types", ["full_attention"]),
        ("gemma2", "sliding_window", None),
        ("gemma3", "head_dim", None),
        ("qwen2", "use_sliding_window", True),
        ("smollm3", "no_rope_layers", [1]),
        ("smollm3", "no_rope_layers", [True] * 3),
        ("smollm3", "pad_token_id", "missing"),
        ("phi3", "pad_token_id", "missing"),
        ("opt", "do_layer_norm_before", False),
        ("opt", "word_embed_proj_dim", 24),
    ],
)
def test_an_unusual_value_is_left_to_others(name, field, value, tmp_path):
    fields = fields_of(CONFIGS[name])
    if value == "missing":
        del fields[field]
    else:
        fields[field] = value
    assert counted(written(tmp_path, fields)) is None


def test_files_that_cannot_be_read_are_left_to_others(tmp_path):
    assert counted("Qwen/Qwen3-0.6B") is None
    assert counted(str(tmp_path)) is None
    for text in ("", "[]", "{", "[" * 100_000, "\ud800"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert counted(str(tmp_path)) is None
    assert counted(str(folder("gpt2"))) is None

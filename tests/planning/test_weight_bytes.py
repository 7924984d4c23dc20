"""Bytes of quantised weights, worked out by hand and measured on weights that are quantised here."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import gguf_files
import model_folders
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.models.load import load, quiet
from kvkeep.models.quantized_weights import is_packable, weight_bytes
from kvkeep.planning.model_shapes import scheme_of
from kvkeep.planning.plan import Plan, plan

SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _fast():
    with quiet(), model_folders.one_thread():
        yield


@pytest.mark.parametrize("kv_bits", ["4", "k8v4", "8"])
def test_a_head_dim_that_cannot_be_packed(kv_bits: str, tmp_path: Path) -> None:
    """Nor can the cache be made."""
    config = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 20, "n_head": 4, "n_layer": 2, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    if kv_bits == "8":
        assert plan(tmp_path, budget=16, context=64, kv_bits=kv_bits).bounded.row_bytes
        return
    with pytest.raises(UnsupportedModelError, match="head dim is 5, and at 4 bits two channels share a byte"):
        plan(tmp_path, budget=16, context=64, kv_bits=kv_bits)


@pytest.mark.parametrize("host_rows", [-1, True])
def test_sequences_that_wait_are_a_number(host_rows: int) -> None:
    with pytest.raises(InputError, match="is no number of sequences that wait"):
        plan(model_folders.folder(), budget=8, host_rows=host_rows)


def planned(folder: Path, config: dict[str, object], **options: object) -> Plan:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return plan(file, **{"context": 2048, **options})


def by_hand(bits: float, scale: float, group: int, extra: float = 0.0) -> int:
    """Bytes of `SMALL` in bfloat16 with quantised layers, with ``extra`` bytes for each input."""
    shapes = 2 * [*4 * [(256, 256)], (512, 256), (512, 256), (256, 512)]
    packed = sum((o * i * bits + o * -(-i // group) * scale) / 8 + i * extra for o, i in shapes)
    return round(packed + 2 * (2 * 512 * 256 + 5 * 256))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, by_hand(4, 20, 64)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, by_hand(4, 20, 32)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, by_hand(8, 24, 10**9, 4)),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, by_hand(3, 19, 128, 4)),
        ({"load_in_8bit": True}, by_hand(8, 32, 10**9)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, by_hand(4, 32, 64)),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, by_hand(8, 16, 10**9)),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, by_hand(4, 32, 128)),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
            by_hand(8, 32, 10**9),
        ),
        ({"quant_method": "fbgemm_fp8"}, by_hand(8, 32, 10**9)),
    ],
    ids=str,
)
def test_formats_by_hand(tmp_path: Path, fields: dict[str, object], expected: int):
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16").to_dict()
    found = planned(tmp_path, {**config, "quantization_config": fields})
    assert found.bounded.weight_bytes == expected


CHANNELS = {"weights": {"num_bits": 8, "strategy": "channel"}}
HALVES = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quant_method": "awq", "w_bit": 4}, "awq, 4 bits and 20 more for every 128 weights of a row"),
        ({"load_in_8bit": True}, "bitsandbytes, 8 bits and 32 more for every row"),
        ({"load_in_4bit": True}, "bitsandbytes, 4 bits and 32 more for every 64 weights of a row"),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True},
            "bitsandbytes, 4 bits and 8.125 more for every 64 weights of a row",
        ),
        ({"quant_method": "fp8"}, "fp8, 8 bits and 32 more for every matrix"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            "fp8, 8 bits and 32 more for every block of (64, 128)",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8, 8 bits and 32 more for every matrix"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": CHANNELS}},
            "compressed-tensors, 8 bits and 16 more for every row",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": HALVES}},
            "compressed-tensors, 4 bits and 20 more for every 32 weights of a row",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "torchao, 4 bits and 32 more for every 128 weights of a row",
        ),
        ({"quant_method": "torchao", "quant_type": "Int8WeightOnly"}, "torchao, 8 bits and 16 more for every row"),
        ({"quant_method": "torchao", "quant_type": "float8wo"}, "torchao, 8 bits and 32 more for every row"),
        ({"quant_method": "torchao", "quant_type": "Int4DynamicActivationInt8"}, "None"),
        ({"quant_method": "torchao"}, "None"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "None"),
        ({"quant_method": ["awq"]}, "None"),
        (["awq"], "None"),
    ],
    ids=str,
)
def test_how_weights_are_stored_is_said_in_words(fields: object, said: str):
    """Without a model of these shapes, which takes longer to build."""
    assert str(scheme_of(LlamaConfig(quantization_config=fields))) == said


def test_layers_that_stay_and_the_output_layer(tmp_path: Path):
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16").to_dict()

    def size(**fields: object) -> int:
        return planned(tmp_path, {**config, "quantization_config": fields}).bounded.weight_bytes

    whole = size(quant_method="fp8")
    kept = size(quant_method="fp8", modules_to_not_convert=["o_proj", "model.layers.1.mlp"])
    assert kept - whole == (2 * 256 * 256 - 2 * 4) + (3 * 256 * 512 - 3 * 4)
    group = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}
    with_head = size(quant_method="compressed-tensors", config_groups=group, ignore=[])
    without = size(quant_method="compressed-tensors", config_groups=group, ignore=["lm_head"])
    assert without - with_head == 512 * 256 - 512 * 2
    pattern = size(quant_method="compressed-tensors", config_groups=group, ignore=["re:.*lm_head"])
    assert pattern == without
    assert size(quant_method="compressed-tensors", config_groups=group, ignore=["re:(", "lm_head"]) == without


def test_tied_embeddings_stay(tmp_path: Path):
    config = LlamaConfig(**SMALL, num_attention_heads=4, tie_word_embeddings=True, dtype="bfloat16").to_dict()
    group = {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}
    fields = {"quant_method": "compressed-tensors", "config_groups": group, "ignore": []}
    assert planned(tmp_path, {**config, "quantization_config": fields}).bounded.weight_bytes > 512 * 256 * 2


def test_experts_are_quantised_and_read_in_part(tmp_path: Path):
    config = MixtralConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, dtype="bfloat16"
    ).to_dict()
    plain = planned(tmp_path, config)
    small = planned(tmp_path, {**config, "quantization_config": {"quant_method": "fp8"}})
    assert plain.bounded.weight_bytes / 2 < small.bounded.weight_bytes < 0.6 * plain.bounded.weight_bytes
    for rows in (1, 4, 1000):
        ratio = small.bounded._read_weights(rows) / plain.bounded._read_weights(rows)
        assert 0.5 < ratio < 0.6
        assert small.bounded._read_weights(rows) <= small.bounded.weight_bytes


def test_a_format_for_experts_alone(tmp_path: Path):
    config = MixtralConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, dtype="bfloat16"
    ).to_dict()
    experts = 2 * 8 * 3 * 256 * 512
    plain = planned(tmp_path, config).bounded.weight_bytes
    small = planned(tmp_path, {**config, "quantization_config": {"quant_method": "mxfp4"}}).bounded.weight_bytes
    assert plain - small == 2 * experts - experts * (4 + 8 / 32) / 8  # four bits, and eight for 32 of them
    fields = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    half = planned(tmp_path, {**config, "quantization_config": fields}).bounded.weight_bytes
    assert plain - half == (plain - small) / 2


def test_a_size_that_the_user_knows(tmp_path: Path):
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16").to_dict()
    found = planned(tmp_path, config, weights_memory=10**9, bandwidth=1e9)
    assert found.bounded.weight_bytes == found.full.weight_bytes == 10**9
    counted = planned(tmp_path, config, bandwidth=1e9)
    share = counted.bounded._read_weights(1) / counted.bounded.weight_bytes
    assert found.bounded._read_weights(1) == pytest.approx(share * 10**9)
    for nonsense in (0, -5):
        with pytest.raises(InputError, match=f"^weights_memory={nonsense} is not above 0"):
            planned(tmp_path, config, weights_memory=nonsense)
    with pytest.raises(InputError, match=r"the weights take 1\.00 GB as given"):
        planned(tmp_path, config, weights_memory=10**9, memory=10**8)


def test_a_dtype_for_the_weights_counts_them_as_unpacked(tmp_path: Path):
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16").to_dict()
    quantised = {**config, "quantization_config": {"quant_method": "fp8"}}
    plain = planned(tmp_path, config).bounded.weight_bytes
    assert planned(tmp_path, quantised, weights_dtype="bfloat16").bounded.weight_bytes == plain
    assert planned(tmp_path, quantised, dtype="float16").bounded.weight_bytes < plain


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "new"},
        {},
        {"quant_method": ["awq"]},
        {"quant_method": "awq", "bits": "4", "group_size": 2.5, "modules_to_not_convert": [None, 3, ""]},
        {"quant_method": "awq", "bits": -(10**18), "group_size": 10**18},
        {"quant_method": "fp8", "weight_block_size": [0, 0]},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}, "ignore": "lm_head"},
        {"quant_method": "compressed-tensors", "config_groups": [1], "ignore": ["re:("]},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4DynamicActivation"}}},
    ],
    ids=str,
)
def test_fields_that_make_no_sense(tmp_path: Path, fields: object):
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16").to_dict()
    plain = planned(tmp_path, config).bounded.weight_bytes
    found = planned(tmp_path, {**config, "quantization_config": fields})
    assert 0 < found.bounded.weight_bytes <= plain
    assert found.setting.outline.is_quantized


@pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")
@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "mixtral"])
def test_the_bytes_of_a_packed_file_are_those_in_memory(tmp_path: Path, name: str):
    path = gguf_files.write(tmp_path / "model.gguf", name, quantized=gguf_files.Q.Q8_0)
    with quiet():
        model, _ = load(path)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    made = plan(path, "h2o", budget=8)
    assert made.bounded.weight_bytes == weight_bytes(model) - buffers
    assert made.setting.weights_format == "packed as in the file"
    unpacked = plan(path, "h2o", budget=8, weights_dtype="bfloat16")
    assert unpacked.bounded.weight_bytes == 2 * sum(weight.numel() for weight in model.parameters())
    assert plan(path, "h2o", budget=8, weights_memory=1000).setting.weights_format == "as given"


@pytest.mark.skipif(util.find_spec("torchao") is None, reason="needs torchao")
def test_weights_that_are_quantised_here(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    config = LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    real = weight_bytes(load(folder, load_in="fp8")[0])
    model_folders.edit_json(
        folder / "config.json",
        quantization_config={"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
    )
    assert plan(folder, context=100).bounded.weight_bytes == pytest.approx(real, rel=0.01)

"""GGUF files: each family gives the logits of transformers, and every damaged file is one plain error."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from contextlib import nullcontext
from importlib.util import find_spec as find_package
from pathlib import Path

import gguf as package
import gguf_files
import model_folders
import numpy as np
import pytest
import real_folders
import torch
from gguf_files import Q
from huggingface_hub import constants
from typer.testing import CliRunner

import kvkeep
from kvkeep.backends import QuantizedTensor
from kvkeep.cli.main import app
from kvkeep.errors import InputError, KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import files, gguf, gguf_blocks, gguf_tokenization, gguf_weights
from kvkeep.models.generation_config import ends_of
from kvkeep.models.load import build_empty, find, load, quiet, read_config, read_weights
from kvkeep.models.quantized_weights import is_packable, weight_bytes

PROMPT = "the quick brown fox jumps"


@pytest.fixture(autouse=True)
def _silent_and_fast():
    with quiet(), model_folders.one_thread():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gguf_files.write(tmp_path / "model.gguf")


# What a file says.


@pytest.mark.parametrize("name", gguf_files.FAMILIES)
def test_a_file_gives_the_logits_of_the_model_that_it_was_made_of(name, tmp_path):
    expected = gguf_files.model(name)
    model, _ = load(gguf_files.write(tmp_path / "model.gguf", name), "float32", "cpu")
    ids = torch.randint(2, 250, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", gguf_files.FAMILIES)
def test_a_file_gives_the_configuration(name, tmp_path):
    found, expected = read_config(str(gguf_files.write(tmp_path / "model.gguf", name))), gguf_files.model(name).config
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for key in (*same, "model_type", "tie_word_embeddings", "eos_token_id", "bos_token_id", "layer_types"):
        assert getattr(found, key, None) == getattr(expected, key, None), key
    assert _rounded(getattr(found, "rope_parameters", None)) == _rounded(getattr(expected, "rope_parameters", None))


def _rounded(fields: object) -> object:
    """The same with floats that were float32."""
    if isinstance(fields, dict):
        kept = {key: _rounded(value) for key, value in fields.items()}
        return {key: value for key, value in kept.items() if (key, value) != ("partial_rotary_factor", 1.0)}
    return float(np.float32(fields)) if isinstance(fields, int | float) else fields


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16])
def test_weights_are_those_of_the_package(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_CHUNK", 1000)  # several parts of a tensor
    path = gguf_files.write(tmp_path / "model.gguf", quantized=kind)
    model, _ = load(path, "float32", "cpu", load_in="unpacked")
    [tensor] = [tensor for tensor in package.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight"]
    expected = package.dequantize(tensor.data, tensor.tensor_type).reshape(64, 96)
    assert np.array_equal(model.model.layers[1].mlp.down_proj.weight.detach().numpy(), expected)


def test_what_is_unpacked_is_said(tmp_path, caplog):
    model, _ = load(gguf_files.write(tmp_path / "model.gguf", quantized=Q.Q8_0), load_in="unpacked")
    assert model.dtype == torch.bfloat16
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert f"(16 Q8_0) are unpacked to bfloat16, and all weights take {size / 1e6:.0f} MB in memory" in caplog.text
    assert model.config.name_or_path == str(tmp_path / "model.gguf")


packs = pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")


@packs
@pytest.mark.parametrize(
    "name", ["llama", "llama tied", "llama with biases", "qwen2", "gemma3", "phi3", "gpt2", "mixtral"]
)
def test_packed_tensors_stay_packed(name, tmp_path, caplog):
    path = gguf_files.write(tmp_path / "model.gguf", name, quantized=Q.Q8_0)
    plain, model = load(path, "float32", load_in="unpacked")[0], load(path)[0]
    caplog.clear()
    weights = dict(model.named_parameters())
    packed = [name for name, weight in weights.items() if isinstance(weight, QuantizedTensor)]
    assert bool(packed) == (name != "gpt2") or packed == ["transformer.wte.weight", "transformer.wpe.weight"]
    for key, weight in plain.named_parameters():
        found = weights[key].to(torch.float32)
        found = found.dequantize() if isinstance(found, QuantizedTensor) else found
        torch.testing.assert_close(found, weight, rtol=1e-6 if key in packed else 8e-3, atol=1e-6)
    ids = torch.randint(2, 250, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = plain(ids).logits, model(ids).logits.float()
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert weight_bytes(model) < 0.7 * weight_bytes(plain)


@packs
def test_experts_that_are_unpacked_are_in_memory_once(tmp_path, monkeypatch):
    made, state_dict = {}, gguf_weights.state_dict

    def noted(*args, **options):
        made.update(state_dict(*args, **options))
        return made

    monkeypatch.setattr(gguf_weights, "state_dict", noted)
    model, _ = load(gguf_files.write(tmp_path / "model.gguf", "mixtral", quantized=Q.Q8_0))
    name = "model.layers.0.mlp.experts.down_proj"
    assert model.get_parameter(name).data_ptr() == made[name].data_ptr()


@packs
def test_packed_files_of_the_real_layout_say_nothing_and_answer(tmp_path, caplog):
    path = gguf_files.write(tmp_path / "model.gguf", quantized=Q.Q4_0)
    engine = kvkeep.Engine(*load(path), budget=16, rows=2)
    sampling = kvkeep.SamplingParams(max_new_tokens=5)
    requests = [kvkeep.Request(prompt=PROMPT, sampling=sampling, ignore_end=True) for _ in range(3)]
    assert [len(result.token_ids) for _, result in engine.run(requests)] == [5] * 3
    assert not caplog.text


def test_without_the_kernel_tensors_are_unpacked(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KVKEEP_BACKEND", "torch")
    model, _ = load(gguf_files.write(tmp_path / "model.gguf", quantized=Q.Q8_0))
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
    assert "are unpacked to bfloat16" in caplog.text


def _blocks(kind, count):
    """Random blocks of a type whose scales are numbers."""
    size = package.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for place in {**places, "Q6_K": (208,)}.get(kind.name, (0,)):
        scales = np.random.default_rng(1).normal(0, 1e-2, (count, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", gguf_blocks.TYPES)
def test_blocks_are_taken_apart_without_a_change(name):
    kind, way = Q[name], gguf_blocks.TYPES[name]
    blocks = _blocks(kind, 40)
    codes, scales, minimums = gguf_blocks.split(way, blocks, 20)
    assert int(codes.max()) < 2**way.bits
    numbers = codes.view(20, -1, way.group) * scales[..., None] + minimums[..., None]
    expected = torch.from_numpy(package.dequantize(blocks, kind)).view(20, -1)
    assert torch.equal(numbers.flatten(1), expected)
    tensor = QuantizedTensor.blank(tuple(expected.shape), way.bits, way.group, torch.float32)
    tensor.set_rows(0, codes, scales, minimums)
    torch.testing.assert_close(tensor.dequantize(), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(("kind", "dtype"), [(None, torch.float32), (Q.F16, torch.float16), (Q.BF16, torch.bfloat16)])
def test_a_file_of_plain_numbers_keeps_its_dtype_and_says_nothing(kind, dtype, tmp_path, caplog):
    assert load(gguf_files.write(tmp_path / "model.gguf", quantized=kind))[0].dtype == dtype
    assert not caplog.text


def test_tensors_that_stay_packed_later_are_known_by_parameter(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", quantized=Q.Q4_0)
    file = gguf.read(path)
    assert file.types() == {"Q4_0": 16, "F32": 5}
    found = gguf_weights.sources(file, build_empty(str(path), read_config(str(path))))
    query = found["model.layers.0.self_attn.q_proj.weight"]
    assert (query.names, query.heads) == (("blk.0.attn_q.weight",), 4)
    assert file.tensors[query.names[0]].type == "Q4_0"


def test_a_vocabulary_with_fewer_tokens_than_weights_is_padded(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf")
    tokens = gguf_files.vocabulary()["tokenizer.ggml.tokens"]
    short = {"tokenizer.ggml.tokens": tokens[:-1], "tokenizer.ggml.token_type": [1] * (len(tokens) - 1)}
    merges = [
        merge for merge in gguf_files.vocabulary()["tokenizer.ggml.merges"] if merge.replace(" ", "") != tokens[-1]
    ]
    gguf_files.write(path, **{k.replace(".", "__"): v for k, v in {**short, "tokenizer.ggml.merges": merges}.items()})
    assert find(path).config.vocab_size == len(tokens)


# Tokenizers.


def test_the_tokenizer_of_a_file(file):
    found, expected = find(file).tokenizer, model_folders.tokenizer()
    for text in (PROMPT, " two  spaces\n", "Ünïcödé 🙂 12", "a<s>b</s>", ""):
        assert found(text)["input_ids"] == expected(text)["input_ids"]
        assert found.decode(found(text)["input_ids"]) == text
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    assert found.chat_template == model_folders.TEMPLATE
    assert found.decode(found("a<s>b")["input_ids"], skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(("asked", "pre", "begins"), [(True, "gpt-2", 1), (None, "gpt-2", 0), (None, "llama-bpe", 1)])
def test_a_text_begins_as_the_file_says(asked, pre, begins, tmp_path):
    words = {"tokenizer__ggml__add_bos_token": asked, "tokenizer__ggml__pre": pre}
    path = gguf_files.write(tmp_path / "model.gguf", **words)
    assert find(path).tokenizer("the")["input_ids"].count(0) == begins


def test_digits_are_split_as_the_rule_of_the_file_says(tmp_path):
    def pieces(pre: str) -> list[str]:
        found = gguf_files.write(tmp_path / "model.gguf", tokenizer__ggml__pre=pre)
        backend = find(found).tokenizer.backend_tokenizer
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab 12345")]

    assert pieces("gpt-2") == ["ab", "Ġ12345"]
    assert pieces("smollm") == ["ab", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces("llama-bpe") == ["ab", "Ġ", "123", "45"]
    assert pieces("qwen2") == ["ab", "Ġ", "1", "2", "3", "4", "5"]


def test_a_file_without_a_rule_for_words_is_said(tmp_path, caplog):
    found = find(gguf_files.write(tmp_path / "model.gguf", tokenizer__ggml__pre=None)).tokenizer
    assert found.decode(found(PROMPT)["input_ids"]) == PROMPT
    assert "names no rule for splitting words" in caplog.text


def test_special_tokens_of_phi_3_take_the_space_behind_them(tmp_path):
    tokenizer = find(gguf_files.write(tmp_path / "model.gguf", "phi3", **_sentencepiece())).tokenizer
    assert tokenizer.tokenize("</s> \nabc") == ["</s> \n", "▁abc"]
    assert tokenizer.tokenize("<s>\nabc")[1] != "▁abc"


def test_every_token_that_ends_a_turn_ends_a_text(tmp_path):
    tokens = gguf_files.vocabulary()["tokenizer.ggml.tokens"]
    tokens[280], tokens[281], tokens[282] = "<|im_end|>", "<end_of_turn>", "<|eom_id|>"
    kinds = [3 if token in ("<s>", "</s>", "<|im_end|>") else 1 for token in tokens]
    merges = [merge for merge in gguf_files.vocabulary()["tokenizer.ggml.merges"] if merge.replace(" ", "") in tokens]
    merges = [merge for merge in merges if all(part in tokens for part in merge.split(" "))]
    words = {"tokens": tokens, "token_type": kinds, "merges": merges, "eot_token_id": 282}
    path = gguf_files.write(
        tmp_path / "model.gguf", **{f"tokenizer__ggml__{key}": value for key, value in words.items()}
    )
    model, tokenizer = load(path)
    assert ends_of(model, tokenizer) == {1, 280, 282}  # 281 is an ordinary token of that name
    assert gguf_tokenization.end_tokens(gguf.read(path))[0] == 1


def _sentencepiece(**changes: object) -> dict[str, object]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "c", "ab", "abc", "▁ab", "▁abc", "  ", "\n\n"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 8, 4, 4]
    tokens = [*pieces, *words]
    found = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "token_type": kinds,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "scores": [0.0] * 259 + [-float(number) for number in range(10)],
    }
    return {f"tokenizer__ggml__{key}": value for key, value in {**found, **changes}.items()}


def test_a_sentencepiece_vocabulary(tmp_path):
    tokenizer = find(gguf_files.write(tmp_path / "model.gguf", **_sentencepiece())).tokenizer
    assert tokenizer.tokenize("abc ab") == ["▁abc", "▁ab"]
    assert tokenizer("abc")["input_ids"][0] == 1
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.tokenize("<s>abc") == ["<s>", "▁abc"]
    assert tokenizer.decode(tokenizer("abc é")["input_ids"], skip_special_tokens=True) == "abc é"
    path = gguf_files.write(tmp_path / "b.gguf", **_sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert find(path).tokenizer.tokenize("abc ab") == ["abc", "▁ab"]
    assert find(path).tokenizer("abc")["input_ids"][0] != 1


def test_a_vocabulary_of_gemma_holds_spaces_as_such(tmp_path):
    tokenizer = find(gguf_files.write(tmp_path / "model.gguf", "gemma3", **_sentencepiece())).tokenizer
    assert tokenizer.tokenize("a  b\n\n") == ["a", "▁▁", "b", "\n\n"]
    assert tokenizer.tokenize("abc") == ["abc"]


# Every damaged file is one plain error, before weights are read.


def _refused(path: Path | str, error: type[KVKeepError], *said: str) -> None:
    with pytest.raises(error) as caught:
        find(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message, message


@pytest.mark.parametrize("share", [0, 1, 10, 30, 70, 99])
def test_a_file_that_is_cut_off(share, file):
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * share // 100])
    _refused(file, ModelFileError, "cannot be read as a GGUF file", "it is empty" if not share else "it is ")


@pytest.mark.parametrize(
    ("version", "said"), [(1, "its version is 1;"), (4, "its version is 4;"), (3 << 24, "big-endian order")]
)
def test_a_file_of_an_unknown_version(version, said, file):
    file.write_bytes(b"GGUF" + struct.pack("<I", version) + file.read_bytes()[8:])
    _refused(file, ModelFileError, said, "kvkeep reads versions 2 and 3")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(100))
    _refused(tmp_path / "model.gguf", ModelFileError, "it does not begin with GGUF")
    (tmp_path / "model.bin").write_bytes(bytes(100))
    _refused(tmp_path / "model.bin", ModelFileError, "is a file and no GGUF file")
    _refused(tmp_path / "none.gguf", ModelFileError, "The model file", "does not exist")
    _refused("none.gguf", ModelFileError, "The model file none.gguf does not exist")


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    _refused(tmp_path / "pipe.gguf", ModelFileError, "is no regular file but a pipe or a device")
    (tmp_path / "pipe.gguf").unlink()
    (tmp_path / "folder.gguf").mkdir()
    _refused(tmp_path, ModelFileError, "has no config.json")


def test_a_file_is_known_by_its_content(tmp_path, file):
    shutil.copy(file, tmp_path / "sha256-0123")
    assert find(tmp_path / "sha256-0123").config.model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"general__type": "mmproj"}, UnsupportedModelError, "the vision or audio tower of a model"),
        ({"general__architecture": "clip"}, UnsupportedModelError, "the vision or audio tower of a model"),
        ({"general__type": "adapter"}, UnsupportedModelError, "an adapter (LoRA), not a language model"),
        ({"general__architecture": "mamba"}, UnsupportedModelError, "of the architecture 'mamba'"),
        ({"general__architecture": "gemma4"}, UnsupportedModelError, "of the architecture 'gemma4'"),
        ({"llama__block_count": None}, ModelFileError, "has no llama.block_count"),
        ({"llama__block_count": "many"}, ModelFileError, "llama.block_count is 'many' and not a whole number"),
        ({"llama__block_count": 3}, ModelFileError, "has no tensor blk.2,"),
        ({"llama__block_count": 1}, UnsupportedModelError, "tensors that kvkeep has no place for (blk.1."),
        ({"llama__block_count": 100_000}, ModelFileError, "has no tensor blk.99999,"),
        ({"llama__attention__head_count": 0}, ModelFileError, "has 0 heads"),
        (
            {"llama__attention__head_count_kv": [2, 1]},
            UnsupportedModelError,
            "another attention.head_count_kv for each",
        ),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, ModelFileError, "is nan and not a number"),
        ({"llama__embedding_length": 128}, ModelFileError, "has the shape"),
        ({"llama__rope__scaling__type": "spiral"}, UnsupportedModelError, "scales rotary frequencies by 'spiral'"),
        ({"llama__rope__dimension_count": 4}, UnsupportedModelError, "rotates 4 of 16 dimensions of a head"),
        ({"llama__expert_count": 2, "llama__expert_used_count": 3}, ModelFileError, "sends a token to 3 of 2 experts"),
        ({"general__alignment": 0}, ModelFileError, "its general.alignment is 0"),
        ({"tokenizer__ggml__model": "bert"}, UnsupportedModelError, "a tokenizer of the kind 'bert'"),
        ({"tokenizer__ggml__pre": "runes"}, UnsupportedModelError, "splits words by the rule 'runes'"),
        ({"tokenizer__ggml__tokens": None}, ModelFileError, "has no tokenizer"),
        ({"tokenizer__ggml__token_type": [1, 1]}, ModelFileError, "other numbers of their kinds"),
        ({"tokenizer__ggml__merges": None}, ModelFileError, "has no merges"),
        ({"tokenizer__ggml__merges": ["a b c"]}, ModelFileError, "is 'a b c', not two tokens"),
        ({"tokenizer__ggml__merges": ["nothing known"]}, ModelFileError, "do not fit its vocabulary"),
        ({"tokenizer__ggml__eos_token_id": 300}, ModelFileError, "eos_token_id is 300, and its vocabulary has"),
        ({"tokenizer__chat_template": 7}, ModelFileError, "chat_template is 7 and not a text"),
        (_sentencepiece(scores=None), ModelFileError, "have no scores"),
    ],
)
def test_a_file_with_other_contents(changes, error, said, tmp_path):
    _refused(gguf_files.write(tmp_path / "model.gguf", **changes), error, said)


def test_a_vocabulary_that_does_not_fit(tmp_path):
    tokens = [*gguf_files.vocabulary()["tokenizer.ggml.tokens"], "one", "more"]
    words = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * len(tokens)}
    said = f"has {len(tokens)} tokens, and its weights know {len(tokens) - 2}"
    _refused(gguf_files.write(tmp_path / "model.gguf", **words), ModelFileError, said)


def test_a_tensor_of_a_type_that_cannot_be_unpacked(file, monkeypatch):
    gguf._unpacks.cache_clear()
    _with_type(file, "blk.0.attn_q.weight", Q.Q8_K)
    _refused(file, UnsupportedModelError, "holds a tensor of the type Q8_K (blk.0.attn_q.weight)")
    _with_type(file, "blk.0.attn_q.weight", 4321)
    _refused(file, UnsupportedModelError, "holds a tensor of the type number 4321")


def _with_type(path: Path, name: str, kind: int) -> None:
    """Overwrite the number of a tensor's type, which stands behind its name and its two dimensions."""
    content = bytearray(path.read_bytes())
    at = content.index(name.encode()) + len(name) + 4 + 16
    content[at : at + 4] = struct.pack("<I", kind)
    path.write_bytes(content)


def test_other_frequencies_than_llama_3_are_refused(tmp_path, monkeypatch):
    factors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    family = gguf_files.FAMILIES["llama"]._replace(extra=lambda: factors)
    monkeypatch.setitem(gguf_files.FAMILIES, "llama", family)
    said = "divides rotary frequencies by numbers of its own"
    _refused(gguf_files.write(tmp_path / "model.gguf"), UnsupportedModelError, said)


def test_counts_that_exhaust_the_memory_are_refused_at_once(file):
    content = bytearray(file.read_bytes())
    content[8:16] = struct.pack("<Q", 2**60)
    file.write_bytes(content)
    _refused(file, ModelFileError, f"there is no room for {2**60} entries")


def test_a_packed_file_is_not_packed_once_more(file, monkeypatch):
    checkpoint = find(file)
    monkeypatch.setattr("kvkeep.models.quantized_weights.find_spec", lambda name: True)
    with pytest.raises(InputError, match=r"is a GGUF file, which cannot be loaded in int8\. Its weights keep"):
        read_weights(checkpoint, load_in="int8")
    with pytest.raises(InputError, match="is a GGUF file, which cannot be split over processes"):
        read_weights(checkpoint, tp=True)


def test_without_the_package_a_file_is_refused(file, monkeypatch):
    gguf._read.cache_clear()
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else find_package(name))
    _refused(file, InputError, "the package that unpacks its weights is missing: pip install gguf")


# Which file of several.


def test_a_folder_stands_for_its_only_file(file):
    (file.parent / "mmproj-model.gguf").write_bytes(b"")
    (file.parent / "config.json").write_text("{}")  # repositories of GGUF files may have one
    assert find(file.parent).name == str(file)


def test_a_folder_with_several_files(file):
    shutil.copy(file, file.parent / "other.gguf")
    _refused(file.parent, ModelFileError, "has 2 GGUF files: model.gguf, other.gguf. Give the path of one")


def test_a_folder_with_safetensors_stands_for_these(tmp_path):
    folder = model_folders.copy(tmp_path / "m")
    gguf_files.write(folder / "model.gguf", "qwen2")
    assert find(folder).config.model_type == "llama"
    assert find(folder / "model.gguf").config.model_type == "qwen2"


def _split(path: Path, parts: int = 2) -> list[Path]:
    """Divide the tensors of a file among several."""
    reader = package.GGUFReader(path)
    found = [path.with_name(f"m-{number:05}-of-{parts:05}.gguf") for number in range(1, parts + 1)]
    words = {
        **gguf_files.vocabulary(),
        **{f.name: f.contents() for f in reader.fields.values() if f.name[:6] == "llama."},
    }
    for number, part in enumerate(found):
        own = {tensor.name: np.array(tensor.data) for tensor in reader.tensors[number::parts]}
        own = {name: tensor.astype(np.float32) for name, tensor in own.items()}
        more = {"split.no": number, "split.count": parts}
        gguf_files.write_file(part, "llama", {**(words if number == 0 else {}), **more}, own)
    return found


@pytest.mark.long
def test_a_split_file(file):
    whole, parts = load(file, "float32")[0], _split(file, 3)
    file.unlink()
    for name in (file.parent, parts[0], parts[1]):
        assert all(map(torch.equal, load(name)[0].parameters(), whole.parameters()))
    assert find(parts[1]).name == find(parts[0]).name == str(parts[0])
    parts[2].unlink()
    _refused(parts[0], ModelFileError, "one of 3 parts of a split file, and m-00003-of-00003.gguf is not beside it")


def test_a_part_of_another_file(file):
    parts = _split(file)
    shutil.copy(parts[0], parts[1])
    _refused(parts[0], ModelFileError, "is not part 2 of 2")


NAMES = [
    *("a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a.Q8_0.gguf", "mmproj-a-F16.gguf", "README.md"),
    *("BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"),
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        *[
            ("Q4_K_M", "a-Q4_K_M.gguf"),
            ("q4_k_s", "a-Q4_K_S.gguf"),
            ("a.Q8_0.gguf", "a.Q8_0.gguf"),
            ("Q8_0", "a.Q8_0.gguf"),
        ],
        *[("bf16", "BF16/a-BF16-00001-of-00002.gguf"), ("a-Q4_K_M", "a-Q4_K_M.gguf")],
    ],
)
def test_a_file_of_a_repository(wanted, found):
    assert gguf.chosen("org/repo", NAMES, wanted) == found


@pytest.mark.parametrize("wanted", ["Q4_K", "F16", "4_K_M", "Q6_K", ".*", ""])
def test_no_file_of_a_repository(wanted):
    with pytest.raises(ModelFileError, match=r"org/repo has no GGUF file of the name .* It has BF16/.*a-Q4_K_M\.gguf"):
        gguf.chosen("org/repo", NAMES, wanted)


def test_a_name_of_the_hub(file, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(file.parent / "cache"))
    name = "someone/something-of-kvkeep-tests"
    _refused(f"{name}:Q8_0", ModelFileError, "The hub cannot be reached")
    home = file.parent / "cache" / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    (home / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(file, home / "snapshots" / ("0" * 40) / "model-Q8_0.gguf")
    assert find(f"{name}:Q8_0").config.model_type == "llama"
    _refused(f"{name}:Q4_K_M", ModelFileError, "has no GGUF file of the name Q4_K_M", "model-Q8_0.gguf")


def test_a_name_of_a_hub_that_answers(file, monkeypatch):
    parts, asked = _split(file), []
    monkeypatch.setattr(files, "cached_if_unreachable", lambda name: nullcontext())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(files, "list_repo_files", lambda name: ["README.md", *(f"Q8_0/{part.name}" for part in parts)])

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(file.parent / Path(name).name)

    monkeypatch.setattr(files, "cached_file", download)
    assert find("org/repo:m").name == str(parts[0])
    assert asked == [("org/repo", f"Q8_0/{part.name}") for part in parts]
    monkeypatch.setattr(files, "list_repo_files", lambda name: [f"Q8_0/{parts[0].name}"])
    _refused("org/repo:m", ModelFileError, "org/repo lacks Q8_0/m-00002-of-00002.gguf, one of 2 parts")


# Commands and memories.


def kv(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.stdout if code == 0 else " ".join(done.output.split())


def test_commands_take_a_file(file, tmp_path):
    answer = json.loads(kv("generate", file, "-p", PROMPT, "-n", 4, "-t", 0, "--budget", 16, "--json"))
    model, tokenizer = load(file)
    engine = kvkeep.Engine(model, tokenizer, budget=16, rows=1)
    messages = [{"role": "user", "content": PROMPT}]
    sampling = kvkeep.SamplingParams(max_new_tokens=4, temperature=0.0)
    [expected] = engine.generate(kvkeep.Request(messages=messages, sampling=sampling))
    assert answer["token_ids"] == list(expected.token_ids)
    assert json.loads(kv("plan", file, "--budget", 16, "--json"))["model"] == str(file)
    shutil.copy(file, tmp_path / "other.gguf")
    assert "has 2 GGUF files" in kv("plan", tmp_path, code=2)
    assert json.loads(kv("plan", tmp_path, "--gguf", "model.gguf", "--json"))["model"] == str(file)
    assert "nothing.gguf does not exist" in kv("generate", tmp_path, "--gguf", "nothing.gguf", "-p", "a", code=2)
    assert "cannot be loaded in" in kv("generate", file, "-p", "a", "--load-in", "8bit", code=2) or not find_package(
        "bitsandbytes"
    )


@pytest.mark.long
def test_a_memory_of_a_file_opens_on_the_file(file, tmp_path):
    (tmp_path / "text.txt").write_text(PROMPT * 3)
    memory = tmp_path / "m.kvkeep"
    kv("remember", file, "-f", tmp_path / "text.txt", "-o", memory, "--budget", 24)
    assert kv("generate", file, "--memory", memory, "-p", "the", "-n", 3)
    assert "model.gguf" in kv("memory", memory)
    gguf_files.write(tmp_path / "other.gguf", "llama", llama__rope__freq_base=777.0)
    assert "model" in kv("generate", tmp_path / "other.gguf", "--memory", memory, "-p", "the", code=2)


# Pretrained models, after `make real`.

TEXTS = (
    *("Hello, world! 12345 + 67 = ?", "  two  spaces\n\n\n\tTab", "Ünïcödé – 日本語 🙂", "don't DON'T we'll 3.14159"),
    *("<|im_start|>user\nhi<|im_end|>", "<start_of_turn>user\nhi<end_of_turn>", "<bos><eos> x", "<h1>x</h1>", "", " "),
)


@pytest.mark.real
@pytest.mark.parametrize("name", real_folders.NAMES)
def test_a_real_file_is_the_model_of_its_folder(name):
    folder, file = find(real_folders.folder(name)), find(real_folders.gguf_file(name))
    own = {"_name_or_path", "_model_name_or_path", "architectures", "eos_token_id", "unk_token_id", "rms_norm_eps"}
    fields, expected = ({**made.config.to_dict()} for made in (file, folder))
    assert file.config.rms_norm_eps == pytest.approx(folder.config.rms_norm_eps)
    for key in expected.keys() - own - {"_sliding_window_pattern"}:
        assert fields[key] == expected[key], key
    for text in TEXTS:
        assert file.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"], text
    assert file.tokenizer.special_tokens_map.items() <= folder.tokenizer.special_tokens_map.items()
    assert file.tokenizer.chat_template == folder.tokenizer.chat_template
    weights, others = read_weights(file, load_in="unpacked"), read_weights(folder)
    assert weights.dtype == others.dtype == torch.bfloat16
    assert all(map(torch.equal, weights.state_dict().values(), others.state_dict().values()))  # also rounded once
    assert ends_of(others, folder.tokenizer) < ends_of(weights, file.tokenizer)


@pytest.mark.real
@pytest.mark.parametrize(("name", "ends"), [("smollm2", {0, 2}), ("gemma3", {1, 106})])
def test_a_real_file_holds_the_numbers_that_the_package_reads(name, ends):
    file = real_folders.gguf_file(name)
    model, tokenizer = load(file, "float32", load_in="unpacked")
    assert ends_of(model, tokenizer) == ends
    tensors = {tensor.name: tensor for tensor in package.GGUFReader(file).tensors}
    stored = tensors["blk.3.ffn_down.weight"]
    expected = package.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(model.model.layers[3].mlp.down_proj.weight.detach().numpy(), expected)
    packed = load(file, "float32")[0]
    ids = torch.tensor(tokenizer(TEXTS[0] * 5)["input_ids"])[None]
    with torch.inference_mode():
        found, expected = (read(ids).logits for read in (packed, model))
    assert float((found - expected).norm() / expected.norm()) < 2e-3  # scales of Q4_K and Q6_K are rounded to float16
    copied = copy.deepcopy(tokenizer)  # as servers do
    assert copied("12345")["input_ids"] == tokenizer("12345")["input_ids"]

"""Headers of GGUF files, each with only what is looked at: what they are refused for, and what a model's configuration
has from them. Whole files: `test_gguf`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.errors import KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import gguf, gguf_models, gguf_tokenization, gguf_weights
from kvkeep.models.gguf import GGUFFile, TensorInfo

_STRING, _ARRAY, _UINT32 = 8, 9, 4


def _refused(call: Any, error: type[KVKeepError], said: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


# The bytes of a header.


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


_LLAMA = _entry("general.architecture", _STRING, _text("llama"))


def _file(path: Path, entries: list[bytes], tensors: list[bytes], data: bytes = bytes(512)) -> Path:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    path.write_bytes(head + b"".join([*entries, *tensors]) + data)
    return path


def test_a_header_that_contradicts_itself_is_refused_with_the_reason(tmp_path):
    one = [_tensor("a", (4,))]
    alignment = [_LLAMA, _entry("general.alignment", _UINT32, bytes(4))]
    cases = [
        ([_LLAMA, _LLAMA], one, "it has two values of the name 'general.architecture'"),
        ([_entry("a", 99, bytes(8))], [], "it holds a value of the unknown kind 99"),
        ([_entry("a", _ARRAY, struct.pack("<IQ", _ARRAY, 1))], [], "it holds a list of the unknown kind 9"),
        ([_LLAMA], [_tensor("a", ())], "its tensor 'a' has 0 dimensions"),
        ([_LLAMA], [_tensor("a", (1,) * 5)], "its tensor 'a' has 5 dimensions"),
        (alignment, one, "its general.alignment is 0"),
        ([_LLAMA], [_tensor("a", (4, 0))], "its tensor 'a' has the shape [0, 4], which its type F32 cannot have"),
        ([_LLAMA], [_tensor("a", (33,), 2)], "its tensor 'a' has the shape [33], which its type Q4_0 cannot have"),
        ([_LLAMA], [_tensor("a", (4,), 0, 512)], "it is cut off: the tensor 'a' ends behind its end"),
        ([_LLAMA], [*one, *one], "has two tensors of the name 'a'"),
        ([_LLAMA], [], "has no tensors, so it is no whole model"),
        ([], one, "names no general.architecture in its metadata"),
        ([_entry("general.architecture", _STRING, _text(""))], one, "names no general.architecture in its metadata"),
    ]
    for entries, tensors, said in cases:
        path = _file(tmp_path / "model.gguf", entries, tensors)
        _refused(lambda path=path: gguf.read(path), ModelFileError, said)


def test_a_header_that_ends_within_a_length_is_cut_off(tmp_path):
    path = _file(tmp_path / "model.gguf", [_text("a") + struct.pack("<I", _STRING)], [], bytes(7))
    _refused(lambda: gguf.read(path), ModelFileError, "(it is cut off)")


def test_a_file_that_becomes_shorter_while_it_is_read_is_said(tmp_path):
    path = _file(tmp_path / "model.gguf", [_LLAMA], [_tensor("a", (4,))], np.arange(64, dtype=np.float32).tobytes())
    tensor = gguf.read(path).tensors["a"]
    assert gguf.values(tensor, torch.float32).shape == (4,)
    with open(path, "r+b") as file:
        file.truncate(tensor.offset + 8)
    _refused(lambda: gguf.values(tensor, torch.float32), ModelFileError, "has become shorter while it was read")


def test_names_of_parts_and_of_files_that_lead_to_no_single_one():
    _refused(lambda: gguf.part_names("m-00001-of-00000.gguf"), ModelFileError, "one of 0 parts; kvkeep takes 1 to 1000")
    _refused(lambda: gguf.part_names("m-00001-of-01001.gguf"), ModelFileError, "one of 1001 parts")
    assert gguf.part_names("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    _refused(lambda: gguf.chosen("o/r", ["README.md"], "Q8_0"), ModelFileError, "o/r has no GGUF files, so Q8_0 is")
    twice = ["b-Q8_0.gguf", "a-Q8_0.gguf", "a-F16.gguf"]
    said = "several GGUF files of the name Q8_0: a-Q8_0.gguf, b-Q8_0.gguf. Give one."
    _refused(lambda: gguf.chosen("o/r", twice, "Q8_0"), ModelFileError, said)


# Values of a header.


def _header(architecture: str, /, tensors: dict[str, Any] | None = None, **keys: Any) -> GGUFFile:
    """A header of these keys, in which two underscores are dots, and of tensors by name: shapes or whole entries."""
    named = {key.replace("__", "."): value for key, value in keys.items()}
    own = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": value for key, value in named.items()}
    path = Path("m.gguf")
    return GGUFFile(
        path,
        {"general.architecture": architecture, **own},
        {
            name: entry if isinstance(entry, TensorInfo) else TensorInfo(path, "F32", entry, 0, 4 * math.prod(entry))
            for name, entry in (tensors or {}).items()
        },
    )


def test_a_value_is_missing_or_one_for_all_layers_or_another_for_each():
    file = _header("llama", same=[3, 3], each=[3, 4], eps=[1e-5, 1e-5], tokenizer__list=["a", "b"])
    assert file.integer("same") == 3
    assert file.number("eps") == 1e-5
    assert file.integer("none", 7) == 7
    _refused(lambda: file.integer("none"), ModelFileError, "m.gguf has no llama.none in its metadata")
    _refused(lambda: file.integer("each"), UnsupportedModelError, "'llama' with another each for each layer")
    _refused(lambda: file.text("tokenizer.list"), ModelFileError, "tokenizer.list is ['a', 'b'] and not a text")
    _refused(lambda: file.shape("a.weight"), ModelFileError, "m.gguf has no tensor a.weight")


_SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention__head_count": 4,
    "attention__layer_norm_rms_epsilon": 1e-5,
    "attention__layer_norm_epsilon": 1e-5,
}


def _fields(architecture: str = "llama", /, tensors: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    sizes = {**_SIZES, **keys}
    last = {"token_embd.weight": (9, 32), f"blk.{sizes['block_count'] - 1}.attn_norm.weight": (32,)}
    return gguf_models.config_fields(_header(architecture, {**last, **(tensors or {})}, **sizes), [1])


def test_sizes_that_no_model_has_are_refused():
    cases = [
        (("mamba", {}), UnsupportedModelError, "of the architecture 'mamba', which kvkeep does not read"),
        (("llama", {"attention__value_length": 16}), UnsupportedModelError, "values of another width than keys"),
        (("llama", {"attention__head_count": 0}), ModelFileError, "has 0 heads, with which nothing can be computed"),
        (("llama", {"nextn_predict_layers": 1}), ModelFileError, "has no tensor blk.-1, so it is no whole model"),
        (("llama", {"expert_count": 2, "expert_used_count": 3}), ModelFileError, "a token to 3 of 2 experts"),
        (("llama", {"expert_count": 2, "expert_used_count": 0}), ModelFileError, "a token to 0 of 2 experts"),
        (("llama", {"attention__head_count_kv": ["2", "2"]}), ModelFileError, "is '2' and not a whole number"),
        (("llama", {"rope__dimension_count": 4}), UnsupportedModelError, "rotates 4 of 8 dimensions of a head"),
        (("phi3", {"rope__dimension_count": 3}), UnsupportedModelError, "rotates 3 of 8 dimensions of a head"),
        (("llama", {"rope__scaling__type": "spiral"}), UnsupportedModelError, "rotary frequencies by 'spiral'"),
    ]
    for (architecture, keys), error, said in cases:
        _refused(lambda name=architecture, keys=keys: _fields(name, **keys), error, said)


def test_kv_heads_are_those_of_the_layers_with_attention():
    assert _fields(attention__head_count_kv=[0, 2, 0, 2])["num_key_value_heads"] == 2
    assert _fields()["num_key_value_heads"] == 4
    assert _fields("phi3", rope__dimension_count=6)["rope_parameters"]["partial_rotary_factor"] == 0.75


def test_the_largest_gemma_scales_queries_by_the_width_of_a_share_of_the_embedding():
    wide = {"attention__sliding_window": 8, "attention__key_length": 16}
    assert _fields("gemma3", block_count=62, **wide)["query_pre_attn_scalar"] == 32 // 4
    assert _fields("gemma3", block_count=46, **wide)["query_pre_attn_scalar"] == 16
    assert _fields("gemma2", block_count=46, **wide)["query_pre_attn_scalar"] == 32 // 4


_LINEAR = {
    "full_attention_interval": 4,
    "rope__dimension_count": 4,
    "rope__dimension_sections": [1, 1, 0, 0],
    "ssm__conv_kernel": 4,
    "ssm__state_size": 8,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 24,
}


def test_linear_attention_needs_heads_and_sections():
    fields = _fields("qwen35", **_LINEAR)
    assert (fields["linear_num_value_heads"], fields["linear_value_head_dim"]) == (4, 6)
    rotation = fields["rope_parameters"]
    assert (rotation["mrope_section"], rotation["partial_rotary_factor"]) == ([1, 1], 0.5)
    for change in ({"ssm__time_step_rank": 0}, {"rope__dimension_sections": "11"}, {"rope__dimension_sections": [0.5]}):
        said = "names no heads of linear attention, or no sections"
        _refused(lambda change=change: _fields("qwen35", **{**_LINEAR, **change}), ModelFileError, said)


def _table(path: Path, numbers: list[float]) -> TensorInfo:
    """A tensor of a file of its own."""
    np.array(numbers, np.float32).tofile(path)
    return TensorInfo(path, "F32", (len(numbers),), 0, 4 * len(numbers))


def test_the_scaling_of_rotary_frequencies_is_read(tmp_path):
    def rotation(tensors: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
        return _fields(tensors=tensors, **keys)["rope_parameters"]

    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert rotation() == plain
    linear = {**plain, "rope_type": "linear", "factor": 4.0}
    assert rotation(rope__scaling__type="linear", rope__scaling__factor=4.0) == rotation(rope__scale_linear=4.0)
    assert rotation(rope__scale_linear=4.0) == linear
    assert rotation(rope__scaling__factor=1.0) == plain
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 16}
    expected = {**plain, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    assert rotation(**yarn) == expected
    assert rotation(**yarn, rope__scaling__yarn_beta_fast=8.0) == {**expected, "beta_fast": 8.0}
    long, short = _table(tmp_path / "long", [2.0, 3.0, 4.0, 5.0]), _table(tmp_path / "short", [1.0, 1.1, 1.2, 1.3])
    tables = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    found = rotation(tables, rope__scaling__original_context_length=16)
    assert (found["rope_type"], found["original_max_position_embeddings"]) == ("longrope", 16)
    assert (found["long_factor"], found["short_factor"]) == ([2.0, 3.0, 4.0, 5.0], [1.0, 1.1, 1.2, 1.3])


def test_the_divisors_of_llama_3_name_its_factor_and_its_first_length(tmp_path):
    def found(divisors: list[float], base: float) -> dict[str, Any]:
        table = {"rope_freqs.weight": _table(tmp_path / "table", divisors)}
        return _fields(tensors=table, context_length=32, rope__freq_base=base)["rope_parameters"]

    # waves below a quarter of the length are kept, those above all of it divided: here 6.3, 628, 62832, 6.3 million
    known = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    long = found([1.0, 1.0, 4.0, 4.0], 1e8)
    assert long == {**known, "rope_theta": 1e8, "original_max_position_embeddings": 8192}
    # and here 6.3, 63, 628, 6283 by the length of the context
    assert found([1.0, 4.0, 4.0, 4.0], 1e4) == {**long, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    for other in ([1.0, 2.0, 4.0, 4.0], [1.0, 4.0, 4.0]):
        _refused(lambda other=other: found(other, 1e4), UnsupportedModelError, "that are not Llama 3's")


# Tokenizers.


def _vocabulary(**changes: Any) -> GGUFFile:
    own = {"tokens": ["a", "b", "ab", "</s>"], "model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}
    keys = {f"tokenizer__ggml__{key}": value for key, value in {**own, **changes}.items() if value is not None}
    return _header("llama", {"token_embd.weight": (4, 8)}, **keys)


def test_a_vocabulary_that_fits_nothing_is_refused():
    assert gguf_tokenization.tokenizer_of(_vocabulary())("abb")["input_ids"] == [2, 1]
    cases = [
        ({"tokens": None}, ModelFileError, "has no tokenizer (tokenizer.ggml.tokens)"),
        ({"tokens": ["a", 7]}, ModelFileError, "has no tokenizer (tokenizer.ggml.tokens)"),
        ({"token_type": [1, 1]}, ModelFileError, "has 4 tokens, and other numbers of their kinds"),
        ({"eos_token_id": 4}, ModelFileError, "eos_token_id is 4, and its vocabulary has 4 tokens"),
        ({"eos_token_id": True}, ModelFileError, "eos_token_id is True, and its vocabulary has 4 tokens"),
        ({"pre": "runes"}, UnsupportedModelError, "splits words by the rule 'runes'"),
        ({"merges": None}, ModelFileError, "has no merges of its tokens"),
        ({"merges": ["a b c"]}, ModelFileError, "A merge of its tokens is 'a b c', not two tokens"),
        ({"merges": [7]}, ModelFileError, "A merge of its tokens is 7, not two tokens"),
        ({"model": "llama"}, ModelFileError, "Its tokens have no scores"),
        ({"model": "llama", "scores": [0.0]}, ModelFileError, "Its tokens have no scores"),
    ]
    for changes, error, said in cases:
        _refused(lambda changes=changes: gguf_tokenization.tokenizer_of(_vocabulary(**changes)), error, said)
    assert gguf_tokenization.end_tokens(_vocabulary(eos_token_id=3)) == [3]


# What fills a model's parameters.


def _model(shapes: dict[str, tuple[int, ...]], **config: int) -> Any:
    """What is asked of a model: its parameters' shapes, and its configuration."""
    sizes = SimpleNamespace(num_hidden_layers=1, tie_word_embeddings=False, **config)
    return SimpleNamespace(
        config=sizes, state_dict=lambda: {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )


def test_tensors_of_another_shape_or_without_a_place_are_refused():
    tensors = {"token_embd.weight": (9, 32), "blk.0.attn_norm.weight": (32,)}
    shapes = {"model.embed_tokens.weight": (9, 32), "model.layers.0.input_layernorm.weight": (32,)}
    found = gguf_weights.sources(_header("qwen2", tensors, block_count=1), _model(shapes))
    assert {name: source.names for name, source in found.items()} == dict(
        zip(shapes, ((name,) for name in tensors), strict=True)
    )

    def refused(error: type[KVKeepError], said: str, more: Any = (), also: Any = ()) -> None:
        file, model = _header("qwen2", {**tensors, **dict(more)}, block_count=1), _model({**shapes, **dict(also)})
        _refused(lambda: gguf_weights.sources(file, model), error, said)

    other = "The tensor token_embd.weight has the shape [32, 9], and the model's metadata ask for [9, 32]"
    refused(ModelFileError, other, more={"token_embd.weight": (32, 9)})
    refused(ModelFileError, "has the shape [9, 16]", more={"token_embd.weight": (9, 16)})
    refused(UnsupportedModelError, "no place for (blk.0.x and 1 more)", more={"blk.0.x": (1,), "blk.0.y": (1,)})
    refused(UnsupportedModelError, "gguf has no name for its model.rune.weight", also={"model.rune.weight": (1,)})


def test_the_states_of_linear_attention_are_restored_in_the_order_of_their_groups():
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 1, "linear_num_value_heads": 4}
    name = "model.layers.0.linear_attn.A_log"
    model = _model({name: (4,)}, **sizes, linear_value_head_dim=1)
    source = gguf_weights.sources(_header("qwen35", {"blk.0.ssm_a": (4,)}, block_count=1), model)[name]
    assert source.names == ("blk.0.ssm_a",)
    stored = -torch.exp(torch.tensor([0.0, 2.0, 1.0, 3.0]))  # by number within a group, the groups within it
    torch.testing.assert_close(source.restore(stored), torch.tensor([0.0, 1.0, 2.0, 3.0]))

"""Model folders of somebody who is careless or means harm: each ends in one line and exit code 2, soon."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import model_folders
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sweeps import sweep
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.errors import InputError, ModelFileError, UnsupportedModelError
from kvkeep.models import load as loading
from kvkeep.models.tokenization import encode

DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000
HUGE = "1" + "0" * 5000
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def edit(file: str, **changes: object) -> Damage:
    return lambda folder: model_folders.edit_json(folder / file, **changes)


def config(**changes: object) -> Damage:
    return edit("config.json", **changes)


def tokenizer_config(**changes: object) -> Damage:
    return edit("tokenizer_config.json", **changes)


def generation(**changes: object) -> Damage:
    return edit("generation_config.json", **changes)


def write(file: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(data)


def insert(file: str, text: str) -> Damage:
    """Put text behind the first brace of a JSON file."""

    def work(folder: Path) -> None:
        path = folder / file
        path.write_text("{" + text + ", " + path.read_text().lstrip()[1:])

    return work


def pipe(file: str) -> Damage:
    def work(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return work


def link(file: str, target: str) -> Damage:
    def work(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return work


def tokenizer(change: Callable[[dict], object]) -> Damage:
    def work(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return work


def shards(name: object, **others: object) -> Damage:
    """An index by which all tensors stand in one file."""

    def work(folder: Path) -> None:
        weights = folder / "model.safetensors"
        names = dict.fromkeys(load_file(weights), name)
        index = {"metadata": {}, "weight_map": names, **others}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.rename(folder.parent / "elsewhere.safetensors")

    return work


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def header(content: bytes, length: int | None = None) -> Damage:
    """A safetensors file with this header."""
    return write("model.safetensors", struct.pack("<Q", len(content) if length is None else length) + content)


def tensors(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Damage:
    def work(folder: Path) -> None:
        path = folder / "model.safetensors"
        changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(changed, path, metadata={"format": "pt"})

    return work


def pickled_shard(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "model-1.bin")
    shards("model-1.bin")(folder)


def template(text: str) -> Damage:
    return write("chat_template.jinja", text)


CONFIGS = {
    "a type that is a list": config(model_type=["llama"]),
    "a type that is an object": config(model_type={"a": 1}),
    "a type that is a number": config(model_type=7),
    "a type that is empty": config(model_type=""),
    "no layers": config(num_hidden_layers=0),
    "fewer than no layers": config(num_hidden_layers=-1),
    "half a layer": config(num_hidden_layers=0.5),
    "layers as a text": config(num_hidden_layers="2"),
    "layers as a list": config(num_hidden_layers=[2]),
    "no number of layers": config(num_hidden_layers=None),
    "200 000 layers": config(num_hidden_layers=200_000),
    "10^18 layers": config(num_hidden_layers=10**18),
    "200 000 layers of a part": config(text_config={"num_hidden_layers": 200_000}),
    "a width of 0": config(hidden_size=0),
    "a negative width": config(hidden_size=-32),
    "a width as a text": config(hidden_size="wide"),
    "a width of 10^18": config(hidden_size=10**18),
    "a width that takes all memory": config(intermediate_size=10**9),
    "a vocabulary that takes all memory": config(vocab_size=10**9),
    "layers that take all memory": config(num_hidden_layers=30, intermediate_size=10**7),
    "a width of 10^30": config(hidden_size=10**30),
    "no heads": config(num_attention_heads=0),
    "heads as a text": config(num_attention_heads="four"),
    "heads as an object": config(num_attention_heads={}),
    "heads that do not divide": config(num_attention_heads=5),
    "no KV heads": config(num_key_value_heads=0),
    "KV heads that do not divide": config(num_key_value_heads=3),
    "negative KV heads": config(num_key_value_heads=-2),
    "a head of no width": config(head_dim=0),
    "a head of an odd width": config(head_dim=7),
    "a head's width as a text": config(head_dim="8"),
    "no vocabulary": config(vocab_size=0),
    "a negative vocabulary": config(vocab_size=-300),
    "a vocabulary as a text": config(vocab_size="300"),
    "a vocabulary of 10^30": config(vocab_size=10**30),
    "positions as a text": config(max_position_embeddings="40"),
    "positions as a list": config(max_position_embeddings=[40]),
    "negative positions": config(max_position_embeddings=-1),
    "an activation that does not exist": config(hidden_act="evil"),
    "an activation that is a list": config(hidden_act=["silu"]),
    "an epsilon that is a text": config(rms_norm_eps="small"),
    "rotary options that are a list": config(rope_parameters=[1]),
    "rotary options of an unknown kind": config(rope_parameters={"rope_type": "evil", "rope_theta": 1.0}),
    "a rotary base that is a text": config(rope_parameters={"rope_type": "default", "rope_theta": "x"}),
    "layer types that do not exist": config(layer_types=["evil", "evil"]),
    "fewer layer types than layers": config(layer_types=["full_attention"]),
    "layer types as a text": config(layer_types="full_attention"),
    "a dtype that does not exist": config(dtype="float3"),
    "a dtype that is a list": config(dtype=[1]),
    "a quantisation that is a list": config(quantization_config=[1]),
    "a quantisation that is a text": config(quantization_config="x"),
    "dropout in attention": config(attention_dropout="x"),
    "weights elsewhere": config(transformers_weights="../elsewhere.bin"),
    "weights as a pickle": config(transformers_weights="adapter_model.bin"),
    "a config that is nested too deep": write("config.json", DEEP),
    "a config of objects nested too deep": write("config.json", DEEP_OBJECT),
    "a value that is nested too deep": insert("config.json", f'"deep": {DEEP}'),
    "a number of 5000 digits": insert("config.json", f'"rope_theta": {HUGE}'),
    "twice the same key": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().rstrip()[:-1] + ', "num_hidden_layers": 0}'
    ),
    "NaN for a number": config(hidden_size=float("nan")),
    "infinity for a number": config(num_hidden_layers=float("inf")),
    "a config that is no UTF-8": write("config.json", b'{"model_type": "\xff\xfe"}'),
    "an empty config": write("config.json", b""),
    "a config of zero bytes": write("config.json", b"\0" * 99),
    "a config that is a list": write("config.json", "[1]"),
    "a config that is a text": write("config.json", '"llama"'),
    "a config that is a number": write("config.json", "7"),
    "a config that is null": write("config.json", "null"),
    "a config that is a pipe": pipe("config.json"),
    "a config that is a device": link("config.json", "/dev/zero"),
    "a config that is a folder": both(lambda f: (f / "config.json").unlink(), lambda f: (f / "config.json").mkdir()),
    "a config that leads to itself": link("config.json", "config.json"),
}

TOKENIZERS = {
    "a longest text that is a text": tokenizer_config(model_max_length="long"),
    "a longest text that is a list": tokenizer_config(model_max_length=[1]),
    "a class that is a number": tokenizer_config(tokenizer_class=7),
    "a class that is a list": tokenizer_config(tokenizer_class=["a"]),
    "a first token that is a number": tokenizer_config(bos_token=7),
    "a first token that is a list": tokenizer_config(bos_token=["<s>"]),
    "a template that is a number": tokenizer_config(chat_template=7),
    "a template that is an object": tokenizer_config(chat_template={"a": 7}),
    "added tokens that are a text": tokenizer_config(added_tokens_decoder="x"),
    "added tokens without numbers": tokenizer_config(added_tokens_decoder={"x": {"content": "y"}}),
    "extra tokens that are a number": tokenizer_config(extra_special_tokens=7),
    "a tokenizer config nested too deep": write("tokenizer_config.json", DEEP),
    "a tokenizer config that is a list": write("tokenizer_config.json", "[1]"),
    "a tokenizer config that is null": write("tokenizer_config.json", "null"),
    "a tokenizer config of 5000 digits": write("tokenizer_config.json", HUGE),
    "a tokenizer config that is no UTF-8": write("tokenizer_config.json", b'{"a": "\xff"}'),
    "a tokenizer config that is a pipe": pipe("tokenizer_config.json"),
    "a tokenizer nested too deep": write("tokenizer.json", DEEP_OBJECT),
    "a tokenizer that is null": write("tokenizer.json", "null"),
    "a tokenizer that is a list": write("tokenizer.json", "[]"),
    "a tokenizer that is no UTF-8": write("tokenizer.json", b"\xff\xfe"),
    "a tokenizer that is a pipe": pipe("tokenizer.json"),
    "a tokenizer that is a device": link("tokenizer.json", "/dev/zero"),
    "an empty tokenizer": write("tokenizer.json", "{}"),
    "a tokenizer without a vocabulary": tokenizer(lambda t: t["model"].update(vocab={}, merges=[])),
    "a vocabulary that is a list": tokenizer(lambda t: t["model"].update(vocab=[])),
    "a vocabulary of negative numbers": tokenizer(lambda t: t["model"]["vocab"].update({"a": -5})),
    "a vocabulary of 64-bit numbers": tokenizer(lambda t: t["model"]["vocab"].update({"a": 2**40})),
    "tokens that the model does not have": tokenizer(
        lambda t: t["model"].update(vocab={piece: n + 10**6 for piece, n in t["model"]["vocab"].items()})
    ),
    "merges of unknown pieces": tokenizer(lambda t: t["model"].update(merges=[["evil", "piece"]])),
    "a model that does not exist": tokenizer(lambda t: t["model"].update(type="Evil")),
    "a decoder that does not exist": tokenizer(lambda t: t.update(decoder={"type": "Evil"})),
    "a pattern that is none": tokenizer(
        lambda t: t.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
        )
    ),
    "special tokens nested too deep": write("special_tokens_map.json", DEEP),
    "added tokens nested too deep": write("added_tokens.json", DEEP),
    "another version": tokenizer(lambda t: t.update(version="9.9")),
}

INDEXES = {
    "a shard with an absolute path": lambda folder: shards(str(folder.parent / "elsewhere.safetensors"))(folder),
    "a shard above the folder": shards("../elsewhere.safetensors"),
    "a shard that is a link to above": both(shards("a.safetensors"), link("a.safetensors", "../elsewhere.safetensors")),
    "a shard that is a device": shards("/dev/zero"),
    "a shard that is a link to a device": both(shards("a.safetensors"), link("a.safetensors", "/dev/zero")),
    "a shard that is a pipe": both(shards("a.safetensors"), pipe("a.safetensors")),
    "a shard that is a folder": both(shards("a.safetensors"), lambda folder: (folder / "a.safetensors").mkdir()),
    "a shard that leads to itself": both(shards("a.safetensors"), link("a.safetensors", "a.safetensors")),
    "a shard that is a pickle": pickled_shard,
    "a shard that is missing": shards("a.safetensors"),
    "a shard without a name": shards(""),
    "a shard that is the folder": shards("."),
    "a shard that is a number": shards(7),
    "a shard that is a list": shards(["a.safetensors"]),
    "a shard that is null": shards(None),
    "a shard with a zero byte": shards("a\0.safetensors"),
    "a shard with a name without end": shards("a" * 5000 + ".safetensors"),
    "a map that is a list": shards("a.safetensors", weight_map=[1]),
    "a map that is null": shards("a.safetensors", weight_map=None),
    "a map of nothing": shards("a.safetensors", weight_map={}),
    "an index that is a list": both(shards("a"), write("model.safetensors.index.json", "[1]")),
    "an index that is null": both(shards("a"), write("model.safetensors.index.json", "null")),
    "an index that is empty": both(shards("a"), write("model.safetensors.index.json", "")),
    "an index nested too deep": both(shards("a"), write("model.safetensors.index.json", DEEP)),
    "an index that is no UTF-8": both(shards("a"), write("model.safetensors.index.json", b'{"\xff": 1}')),
    "an index that is a pipe": both(shards("a"), pipe("model.safetensors.index.json")),
}

WEIGHTS = {
    "a header longer than the file": header(b"{}", 2**40),
    "a header of 2^63 bytes": header(b"{}", 2**63),
    "an empty header": header(b""),
    "a header that is a list": header(b"[]"),
    "a header nested too deep": header(DEEP.encode()),
    "a header that is no UTF-8": header(b'{"\xff": 1}'),
    "a tensor of 2^60 elements": header(
        json.dumps({"a": {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 4]}}).encode() + b"0000"
    ),
    "a tensor of a negative shape": header(
        json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode()
    ),
    "a dtype that is none": header(json.dumps({"a": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}).encode()),
    "no tensors": header(b"{}"),
    "weights that are a pipe": pipe("model.safetensors"),
    "weights that are a device": link("model.safetensors", "/dev/zero"),
    "weights that are a folder": both(
        lambda f: (f / "model.safetensors").unlink(), lambda f: (f / "model.safetensors").mkdir()
    ),
    "weights that lead to themselves": link("model.safetensors", "model.safetensors"),
    "weights that are no number": tensors(lambda name, tensor: tensor * torch.nan),
    "one weight that is no number": tensors(
        lambda name, tensor: tensor.fill_(torch.nan) if "layers.1.mlp.down" in name else tensor
    ),
    "weights that are infinite": tensors(lambda name, tensor: tensor + torch.inf),
    "logits that are no number": tensors(lambda name, tensor: tensor * torch.nan if "lm_head" in name else tensor),
}

GENERATIONS = {
    "an end that is a text": generation(eos_token_id="</s>"),
    "an end that is a list of texts": generation(eos_token_id=["a"]),
    "an end that is an object": generation(eos_token_id={"a": 1}),
    "an end that is a fraction": generation(eos_token_id=1.5),
    "an end inside lists": generation(eos_token_id=[[1]]),
    "a generation config nested too deep": write("generation_config.json", DEEP),
    "a generation config that is a list": write("generation_config.json", "[1]"),
    "a generation config that is null": write("generation_config.json", "null"),
    "a generation config that is no UTF-8": write("generation_config.json", b'{"\xff": 1}'),
    "a generation config that is a pipe": pipe("generation_config.json"),
}

TEMPLATES = {
    "a template that is no template": template("{% for %}"),
    "a template that fails": template("{{ messages[9].content }}{{ 1 // 0 }}"),
    "a template that recurses": template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "a template that asks for a lot": template("{% for i in range(10**9) %}x{% endfor %}"),
    "a template that is a pipe": pipe("chat_template.jinja"),
    "a template that is no UTF-8": write("chat_template.jinja", b"\xff\xfe"),
}

HARMLESS = {
    "an end that is negative": generation(eos_token_id=-1),
    "an end that no vocabulary has": generation(eos_token_id=10**6),
    "no generation config": lambda folder: (folder / "generation_config.json").unlink(),
    "a base of positions that is large": config(rope_parameters={"rope_type": "default", "rope_theta": 10**11}),
}

ALL = {**CONFIGS, **TOKENIZERS, **INDEXES, **WEIGHTS, **GENERATIONS, **TEMPLATES}


@pytest.mark.parametrize("name", sweep(ALL, lambda name: len(name) % 2))
def test_ends_in_one_line(name: str, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    ALL[name](folder)
    result = CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick brown fox", "-n", "4"])
    assert result.exit_code == 2, result.output or result.exception
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") <= 2
    assert len(result.stderr) < 1000
    assert result.stdout == ""


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_models_have_and_does_no_harm_is_taken(damage: Damage, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    damage(folder)
    result = CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick brown fox", "-n", "4"])
    assert result.exit_code == 0, result.output or result.exception


@pytest.mark.parametrize("damage", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_plan_ends_in_one_line(damage: Damage, tmp_path: Path):
    """It reads nothing but the configuration, and takes some of them for what they say."""
    folder = model_folders.copy(tmp_path / "model")
    damage(folder)
    result = CliRunner().invoke(app, ["plan", str(folder), "--context", "100"])
    assert result.exit_code in (0, 2), result.output or result.exception
    if result.exit_code == 2:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") <= 2
        assert len(result.stderr) < 1000


@pytest.mark.parametrize("allowed", [False, True])
def test_a_pickle_named_by_an_index_is_read_only_if_that_is_allowed(allowed: bool, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    pickled_shard(folder)
    (folder / "other.safetensors").write_bytes(b"")  # a folder of safetensors, as far as its names tell
    options = ["--allow-pickle"] if allowed else []
    result = CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick brown fox", "-n", "2", *options])
    if allowed:
        assert result.exit_code == 0, result.output or result.exception
    else:
        assert result.exit_code == 2
        assert "model-1.bin" in result.stderr
        assert "--allow-pickle" in result.stderr


def adapter(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "adapter_model.bin")


def another_index(folder: Path) -> None:
    pickled_shard(folder)
    (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
    (folder / "other.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "named"),
    [(adapter, "adapter_model.bin"), (another_index, "other.safetensors.index.json"), (adapter, ["adapter_model.bin"])],
    ids=["a pickle", "an index of pickles", "a list"],
)
def test_weights_that_a_configuration_names_are_safetensors(damage: Damage, named: object, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    damage(folder)
    model_folders.edit_json(folder / "config.json", transformers_weights=named)
    result = CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick", "-n", "2"])
    assert result.exit_code == 2, result.output or result.exception
    assert "that its config.json names" in result.stderr


def in_cache(folder: Path) -> Path:
    """The same model as the hub's cache holds it: links from a snapshot into blobs."""
    snapshot = folder.parent / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def whole_shard(folder: Path) -> None:
    shards("model-1.safetensors")(folder)
    (folder.parent / "elsewhere.safetensors").rename(folder / "model-1.safetensors")


@pytest.mark.parametrize("damage", [lambda folder: None, whole_shard], ids=["a file", "shards"])
def test_links_of_the_hubs_cache_go_on_working(damage: Damage, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    damage(folder)
    found = in_cache(folder)
    assert CliRunner().invoke(app, ["generate", str(found), "-p", "the quick", "-n", "2"]).exit_code == 0


def test_a_link_out_of_the_hubs_cache_is_refused(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "model")
    whole_shard(folder)
    found = in_cache(folder)
    (found / "model-1.safetensors").resolve().rename(tmp_path / "private.safetensors")
    (found / "model-1.safetensors").unlink()
    (found / "model-1.safetensors").symlink_to(tmp_path / "private.safetensors")
    result = CliRunner().invoke(app, ["generate", str(found), "-p", "the quick", "-n", "2"])
    assert result.exit_code == 2
    assert "no regular file in the model's own folder" in " ".join(result.stderr.split())


def test_a_folder_of_links_can_be_a_model(tmp_path: Path):
    """As people make them who keep large files elsewhere."""
    folder = tmp_path / "links"
    folder.mkdir()
    for path in model_folders.folder().iterdir():
        (folder / path.name).symlink_to(path)
    assert CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick", "-n", "2"]).exit_code == 0


def test_what_is_too_large_for_its_weights_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = model_folders.copy(tmp_path / "model")
    model_folders.edit_json(folder / "config.json", intermediate_size=10**9)

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(ModelFileError, match=r"describes [0-9]{12} numbers"):
        loading.load(folder)


@pytest.mark.parametrize("layers", [1001, 200_000, 10**18])
def test_too_many_layers_are_refused_before_one_is_built(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = model_folders.copy(tmp_path / "model")
    model_folders.edit_json(folder / "config.json", num_hidden_layers=layers)
    monkeypatch.setattr(loading, "build_empty", lambda *args: pytest.fail("it is built"))
    with pytest.raises(UnsupportedModelError, match=f"num_hidden_layers={layers} .* at most 1000"):
        loading.find(folder)


def test_a_prompt_of_which_the_tokenizer_knows_nothing():
    inner = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    checkpoint = replace(loading.find(model_folders.folder()), tokenizer=inner)
    assert encode(checkpoint, "a?").tolist() == [[0]]
    with pytest.raises(InputError, match="The prompt has no tokens"):
        encode(checkpoint, "?")

"""Loading models: what comes back, and every way in which it can fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import model_folders
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import kvkeep
import kvkeep.models.load as loading
from kvkeep.errors import InputError, ModelFileError, UnsupportedModelError
from kvkeep.models import files, tiny
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.files import no_conversion_service
from kvkeep.models.load import find, load, quiet, read_config, read_weights
from kvkeep.models.tiny import embedded


@pytest.fixture(autouse=True)
def _silent_and_fast():
    with quiet(), model_folders.one_thread():
        yield


def test_model_is_attached_in_evaluation_mode_and_generates():
    model, tokenizer = load(model_folders.folder())
    assert model.config._attn_implementation == "kvkeep"
    assert not model.training
    assert model.dtype == torch.float32
    cache = kvkeep.BoundedCache(model.config, "h2o", budget=4)
    prompt = tokenizer("the quick brown fox", return_tensors="pt")
    output = model.generate(**prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert output.shape[1] == prompt["input_ids"].shape[1] + 8
    assert int((cache.positions() >= 0).sum(-1).max()) == 4


def test_dtype_is_the_one_asked_for():
    assert load(model_folders.folder(), "bfloat16", "cpu")[0].dtype == torch.bfloat16


def test_find_reads_no_weights(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    assert find(folder).config.model_type == "llama"


def test_config_of_the_caller_is_not_changed():
    checkpoint = find(model_folders.folder())
    before = checkpoint.config.to_dict()
    read_weights(checkpoint)
    assert checkpoint.config.to_dict() == before
    assert checkpoint.config._attn_implementation != "kvkeep"


@pytest.mark.parametrize(
    ("family", "limit"), [("llama", None), ("gpt2", model_folders.POSITIONS), ("opt", model_folders.POSITIONS)]
)
def test_position_limit_is_that_of_a_learned_table(family: str, limit: int | None):
    assert find(model_folders.folder(family)).position_limit == limit


def test_tied_weights_are_not_missing():
    load(model_folders.folder("gpt2"))


def expect(kind: type[Exception], *words: str):
    return pytest.raises(kind, match="".join(f"(?=.*{word})" for word in words))


def test_folder_that_does_not_exist(tmp_path: Path):
    with expect(ModelFileError, "does not exist"):
        find(tmp_path / "nowhere")


def test_file_instead_of_folder():
    with expect(ModelFileError, "is a file", "folder"):
        find(model_folders.folder() / "model.safetensors")


def test_folder_without_config(tmp_path: Path):
    with expect(ModelFileError, "no config.json"):
        find(model_folders.copy(tmp_path / "m", "config.json"))


def test_folder_without_weights(tmp_path: Path):
    with expect(ModelFileError, "no weights", "safetensors"):
        find(model_folders.copy(tmp_path / "m", "*.safetensors"))


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}'])
def test_config_that_is_no_config(tmp_path: Path, text: str):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with expect(ModelFileError, "config.json"):
        find(folder)


@pytest.mark.parametrize("value", [0, "four"])
def test_config_with_values_that_cannot_be_used(tmp_path: Path, value: object):
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", num_attention_heads=value)
    with expect(ModelFileError, "config.json"):
        find(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("missing", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_folder_without_tokenizer(tmp_path: Path, family: str, missing: list[str]):
    with expect(ModelFileError, "tokenizer"):
        find(model_folders.copy(tmp_path / "m", *missing, family=family))


def test_damaged_tokenizer(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{")
    with expect(ModelFileError, "tokenizer"):
        find(folder)


def pickled(folder: Path) -> Path:
    """Turn a folder's weights into a pickle."""
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


def test_pickled_weights_are_refused_unless_allowed(tmp_path: Path):
    folder = pickled(model_folders.copy(tmp_path / "m"))
    with expect(ModelFileError, "pytorch_model.bin", "`allow_pickle=True`"):
        load(folder)
    ours, theirs = load(folder, allow_pickle=True)[0], load(model_folders.folder())[0]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class Exploit:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def test_pickle_that_runs_code_does_not_run_even_when_allowed(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "*.safetensors")
    torch.save({"model.embed_tokens.weight": Exploit(tmp_path / "trace")}, folder / "pytorch_model.bin")
    with expect(ModelFileError, "weights cannot be read"):
        load(folder, allow_pickle=True)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b""], ids=["lfs", "empty"])
def test_damaged_weights(tmp_path: Path, content: bytes):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with expect(ModelFileError, "weights", "partial download"):
        load(folder)


def test_truncated_weights(tmp_path: Path):
    weights = model_folders.copy(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with expect(ModelFileError, "weights"):
        load(weights.parent)


def test_missing_shard(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    weights = folder / "model.safetensors"
    shards = dict.fromkeys(load_file(weights), "model-00002-of-00002.safetensors")
    weights.rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    with expect(ModelFileError, "model-00002-of-00002"):
        load(folder)


def split(folder: Path, *, twice: str = "", index_of: int = 1) -> None:
    """Split weights into two shards; a tensor may stand in both, and is the model's in the first or second."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    given = {tensor: names["layers.1" in tensor] for tensor in tensors}
    stored = [{tensor: tensors[tensor] for tensor in given if given[tensor] == name} for name in names]
    if twice:
        stored[index_of % 2][twice] = torch.zeros_like(tensors[twice])
        stored[index_of - 1][twice] = tensors[twice]
        given[twice] = names[index_of - 1]
    for name, content in zip(names, stored, strict=True):
        save_file(content, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": given}))


def test_a_tensor_in_two_shards_is_the_one_of_the_index_or_refused(tmp_path: Path):
    """transformers takes the one of the last shard."""
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load(model_folders.folder())[0].get_parameter(name)
    split(folder := model_folders.copy(tmp_path / "once"))
    assert torch.equal(load(folder)[0].get_parameter(name), whole)
    split(folder := model_folders.copy(tmp_path / "last"), twice=name, index_of=2)
    assert torch.equal(load(folder)[0].get_parameter(name), whole)
    split(folder := model_folders.copy(tmp_path / "first"), twice=name)
    with expect(ModelFileError, name, "in 'model-00001-of-00002.safetensors'", "Remove the other"):
        load(folder)
    # with a whole file beside them, the shards are not read
    (folder / "model.safetensors").write_bytes((model_folders.folder() / "model.safetensors").read_bytes())
    assert torch.equal(load(folder)[0].get_parameter(name), whole)


def test_weights_that_lack_a_tensor(tmp_path: Path):
    weights = model_folders.copy(tmp_path / "m") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with expect(ModelFileError, "lack tensors of the model", "model.layers.1.mlp.up_proj.weight"):
        load(weights.parent)


def test_weights_of_another_shape(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", intermediate_size=40)
    with expect(ModelFileError, "other shapes", "mlp", "more"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_weights_of_more_layers_than_the_model_has(family: str, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", family=family)
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model_folders.edit_json(folder / "config.json", **{key: 1})
    with pytest.raises(ModelFileError, match=r"no layer: \S+\.1\.\S+, .* and \d+ more\. .*mend num_hidden_layers"):
        load(folder)


@pytest.mark.parametrize("extra", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.gate", "visual.proj"])
def test_tensors_that_no_part_of_the_model_takes_are_named(
    extra: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = model_folders.copy(tmp_path / "m")
    load(folder)
    assert not caplog.records
    add_tensor(folder, extra)
    load(folder)
    assert f"no part of the model takes; the model runs without them: {extra}." in caplog.text


def test_layers_that_predict_further_tokens_are_no_surplus(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", num_nextn_predict_layers=1)
    add_tensor(folder, "model.layers.2.input_layernorm.weight")
    load(folder)
    assert "model.layers.2.input_layernorm.weight" in caplog.text
    add_tensor(folder, "model.layers.3.input_layernorm.weight")
    with pytest.raises(ModelFileError, match=r"no layer: model\.layers\.3\.input_layernorm\.weight\."):
        load(folder)


def add_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})


def test_falcon_is_refused_before_its_weights_are_read(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", family="falcon")
    (folder / "model.safetensors").write_bytes(b"")
    with expect(UnsupportedModelError, "Falcon", "attention interface"):
        find(folder)


def test_layers_that_cannot_be_bounded_are_refused(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", attention_chunk_size=16)
    with expect(UnsupportedModelError, "chunked_attention"):
        find(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "frobnicate"}, ["frobnicate", "not known"]),
        ({"model_type": "frobnicate", "auto_map": {"AutoConfig": "evil.Config"}}, ["own code", "never runs"]),
        ({"model_type": "vit"}, ["vit", "decoder"]),
    ],
)
def test_model_types_that_do_not_work(tmp_path: Path, config: dict[str, object], words: list[str]):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\n")
    with expect(UnsupportedModelError, *words):
        find(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["-", "a b", "a/b--c"])
def test_names_that_cannot_be(name: str):
    with expect(ModelFileError, "neither a local folder nor a hub name"):
        find(name)


@pytest.mark.parametrize("name", ["./here", "~/models/here", "a/b/c"])
def test_names_that_can_only_be_folders(name: str):
    with expect(ModelFileError, "does not exist"):
        find(name)


def test_a_name_that_is_nearly_right_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    for name in ("models/smolm2", "./models/smollm", str(tmp_path / "models" / "smollm3")):
        with expect(ModelFileError, f"Did you mean {Path(name).with_name('smollm2')}"):
            find(name)
    with pytest.raises(ModelFileError) as caught:
        find("./models/qwen")
    assert "Did you mean" not in str(caught.value)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with expect(ModelFileError, "hub cannot be reached", "someone/something", "network"):
        find("someone/something-of-kvkeep-tests")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (hub.GatedRepoError, ["gated", "log in"]),
        (hub.RepositoryNotFoundError, ["neither a local folder nor a public model"]),
        (hub.LocalEntryNotFoundError, ["cannot be reached"]),
    ],
)
def test_answers_of_the_hub(kind: type[Exception], words: list[str]):
    cause = kind.__new__(kind)  # its arguments differ between versions of the client
    error = OSError("a long story\nwith many lines")
    error.__cause__ = cause
    message = str(files._explain("a/b", "Its config.json cannot be read", error))
    assert all(word in message for word in words)
    assert "long story" not in message


def test_weights_on_the_hub_that_are_not_safetensors():
    error = OSError(
        "a/b does not appear to have a file named model.safetensors and cannot be loaded with `safetensors`"
    )
    assert "allow_pickle=True" in str(files._explain("a/b", "Its weights cannot be read", error))


def test_conversion_service_is_never_asked(monkeypatch: pytest.MonkeyPatch):
    key = "DISABLE_SAFETENSORS_CONVERSION"
    monkeypatch.delenv(key, raising=False)
    with no_conversion_service():
        assert os.environ[key] == "1"
    assert key not in os.environ
    monkeypatch.setenv(key, "0")
    with no_conversion_service():
        assert os.environ[key] == "1"
    assert os.environ[key] == "0"


@pytest.mark.parametrize(("name", "hint"), [("bf16", "bfloat16"), ("float23", "float32"), ("int8", "Known: auto")])
def test_unknown_dtype(name: str, hint: str):
    with expect(InputError, name, hint):
        parse_dtype(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "cpu:x"])
def test_devices_that_are_not_there(name: str):
    with expect(InputError, name, "Available: auto, cpu"):
        parse_device(name)


def test_device_and_dtype_are_checked_first(tmp_path: Path):
    with expect(InputError, "float23"):
        load(tmp_path / "nowhere", "float23")
    with expect(InputError, "gpu"):
        load(tmp_path / "nowhere", device="gpu")


def test_memory_that_does_not_suffice():
    with expect(InputError, "Out of memory on cpu", "budget"), enough_memory(torch.device("cpu")):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), enough_memory(torch.device("cpu")):
        raise RuntimeError("another error")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "weights"), ModelFileError("they are corrupted")]
)
def test_embedded_model_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, error: OSError):
    def fail() -> Path:
        raise error

    monkeypatch.setattr(tiny, "path", fail)
    with expect(ModelFileError, "(no embedded model|corrupted)", "Give a `model`"):
        embedded()


def test_quiet_puts_everything_back():
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    with quiet():
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    assert transformers_logging.get_verbosity() == transformers_logging.INFO
    transformers_logging.set_verbosity(before)


def test_configurations_that_name_no_decoder_are_told_apart(tmp_path: Path):
    def refused(kind: type[Exception], said: str, **fields: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(kind, match=said):
            read_config(str(tmp_path))

    refused(ModelFileError, "names no model_type", hidden_size=3)
    refused(ModelFileError, "model_type in its config.json is 7, which is no name", model_type=7)
    refused(UnsupportedModelError, "of type 'rune', which is not known to transformers", model_type="rune")
    refused(UnsupportedModelError, "of type 'vit', which transformers does not offer as a decoder", model_type="vit")
    (tmp_path / "config.json").write_text(json.dumps(model_folders.config_of("llama").to_dict()))
    assert read_config(str(tmp_path)).model_type == "llama"


def test_a_split_model_takes_no_adapters_and_a_missing_kernel_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loading, "missing_kernel", lambda place: "There is no kernel for these tests.")
    checkpoint = Checkpoint("m", model_folders.config_of("llama"), model_folders.tokenizer(), None, allow_pickle=False)
    for _ in range(2):
        with expect(InputError, "Adapters do not go together with a model that is split over processes"):
            read_weights(checkpoint, device="cpu", tp=True, adapters={"a": "folder"})
    assert [record.getMessage() for record in caplog.records] == ["There is no kernel for these tests."]


# Processes of torchrun; none is started.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """As the second of two processes of torchrun: with what each of them joins and leaves."""
    seen: list[object] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(loading.dist, "init_process_group", lambda kind, device_id: seen.append((kind, device_id)))
    monkeypatch.setattr(loading.dist, "destroy_process_group", lambda: seen.append("left"))
    monkeypatch.setattr(loading.dist, "get_world_size", lambda: 2)
    return seen


def test_processes_join_over_gloo_or_over_a_gpu_of_their_own(started: list[object], monkeypatch: pytest.MonkeyPatch):
    assert loading.join_processes() == 2
    assert started == [("gloo", None)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading.join_processes() == 2
    assert started[1:] == [1, ("nccl", torch.device("cuda", 1))]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with expect(InputError, r"Process 1 of this machine has no GPU: there are 1\. Start 1 processes"):
        loading.join_processes()
    assert len(started) == 3


def test_processes_that_have_joined_are_counted_and_left_at_the_end(
    started: list[object], monkeypatch: pytest.MonkeyPatch
):
    with loading.process_group():
        pass
    assert started == []
    monkeypatch.setattr(loading.dist, "is_initialized", lambda: True)
    with loading.process_group():
        assert loading.join_processes() == 2
        assert started == []
    assert started == ["left"]
    monkeypatch.setattr(loading.dist, "is_available", lambda: False)
    with expect(InputError, r"This build of torch has no torch\.distributed"):
        loading.join_processes()
    with loading.process_group():
        pass
    assert started == ["left"]


def test_without_torchrun_nothing_is_joined(started: list[object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR")
    with expect(InputError, "processes that torchrun has started, which sets MASTER_ADDR"):
        loading.join_processes()
    assert started == []

"""What a model's files are refused for before its weights are read."""

import json
import os

import model_folders
import pytest

from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models import files, quantized_weights
from kvkeep.models.folder import check_folder

INDEX = "model.safetensors.index.json"


def test_an_adapter_is_no_model(tmp_path):
    files.check_adapter(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelFileError, match=r"holds an adapter of PEFT for 'org/base' .* and no model"):
        files.check_adapter(str(tmp_path))


def test_numbers_that_no_model_has():
    with pytest.raises(ModelFileError, match=r"m: the number of 'hidden_size' in its config\.json has more than 64"):
        files.check_numbers("m", {"text_config": {"hidden_size": -(2**64)}})
    with pytest.raises(UnsupportedModelError, match=r"m has num_hidden_layers=1000000 in its config\.json"):
        files.check_numbers("m", {"num_hidden_layers": 10**6})
    config = model_folders.config_of("llama")
    for key in ("vocab_size", "max_position_embeddings"):
        other = model_folders.config_of("llama")
        vars(other)[key] = 0
        with pytest.raises(ModelFileError, match=rf"m: Its config\.json has {key}=0, with which nothing can be gen"):
            files.check_shape("m", other)
    files.check_numbers("m", config.to_dict())
    files.check_shape("m", config)


def test_an_index_that_leads_nowhere_or_outside(tmp_path):
    def refused(found: object, match: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps(found))
        with pytest.raises(ModelFileError, match=match):
            files.check_index(str(tmp_path), model_folders.config_of("llama"), allow_pickle=False)

    for found in ({}, [], {"weight_map": {}}, {"weight_map": {"a": 1}}):
        refused(found, "does not map tensors to files")
    refused({"weight_map": {"a": "m.safetensors"}, "metadata": 7}, "has metadata that are no JSON object")
    for name in ("../m.safetensors", "a\0.safetensors", "a//m.safetensors", "a" * 300 + ".safetensors"):
        refused({"weight_map": {"a": name}}, "no regular file in the model's own folder")
    refused({"weight_map": {"a": "m.bin"}}, "not safetensors but Python pickles")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "m.safetensors"}, "metadata": {}}))
    files.check_index(str(tmp_path), model_folders.config_of("llama"), allow_pickle=False)
    assert not (tmp_path / "m.safetensors").exists()  # a missing file is reported later


def test_a_pipe_among_the_files_is_refused_and_a_lock_is_not(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "a.lock")
    check_folder(tmp_path, allow_pickle=False, weights=False)
    os.mkfifo(tmp_path / "weights")
    with pytest.raises(ModelFileError, match="weights is no regular file but a pipe, a device or a link"):
        check_folder(tmp_path, allow_pickle=False, weights=False)


def test_memory_that_no_file_stands_behind_is_not_mapped():
    assert not quantized_weights._is_mapped(0, 1)
    assert not quantized_weights._is_mapped(0, 2**46)

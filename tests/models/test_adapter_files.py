"""Adapters that cannot be used: each gets one sentence that says what is wrong, and nothing is unpickled."""

import json
import pickle
import shutil
from pathlib import Path

import adapter_folders
import model_folders
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvkeep
from kvkeep.backends import QuantizedTensor
from kvkeep.models import adapters
from kvkeep.models.load import quiet
from kvkeep.models.quantized_weights import PACKED

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def load(folder, name="a"):
    with quiet():
        return kvkeep.load(model_folders.folder(), dtype="float32", adapters={name: folder})[0]


def refused(folder, match):
    with pytest.raises(kvkeep.ModelFileError, match=match) as caught:
        load(folder)
    assert "kvkeep0" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Bomb:
    def __reduce__(self):
        return (Path("/never/unpickled").write_text, ("",))


def test_a_pickle_is_refused(tmp_path):
    folder = adapter_folders.copy(tmp_path / "a")
    (folder / adapters.WEIGHTS).unlink()
    (folder / adapters.PICKLE).write_bytes(pickle.dumps(Bomb()))
    refused(folder, "not safetensors but Python pickles")
    with pytest.raises(kvkeep.ModelFileError, match="pickles"):
        kvkeep.load(model_folders.folder(), adapters={"a": folder}, allow_pickle=True)
    shutil.copy(adapter_folders.folder() / adapters.WEIGHTS, folder)
    load(folder)  # as with models: what is beside safetensors is not read


@pytest.mark.parametrize("keep", [0, 7, 300, -9])
def test_a_file_that_is_cut_is_refused(tmp_path, keep):
    folder = adapter_folders.copy(tmp_path / "a")
    path = folder / adapters.WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "cannot be read")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"peft_type": "LORA", "r": "4"}', '{"peft_type": 5}', "[" * 10**5]
)
def test_a_configuration_that_is_cut_is_refused(tmp_path, text):
    folder = adapter_folders.copy(tmp_path / "a")
    (folder / adapters.CONFIG).write_text(text)
    refused(folder, "adapter")


def test_folders_without_an_adapter_are_refused(tmp_path):
    refused(tmp_path / "none", "does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no adapter_config.json")
    refused(model_folders.folder(), "holds a whole model")
    folder = adapter_folders.copy(tmp_path / "a")
    (folder / adapters.WEIGHTS).unlink()
    refused(folder, "has no weights")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    refused(adapter_folders.folder("a", "opt"), r"does not fit|lacks .*trained on")
    folder = adapter_folders.copy(tmp_path / "wide")
    found = load_file(folder / adapters.WEIGHTS)
    save_file(
        {name: torch.cat([t, t], 1) if "lora_A" in name else t for name, t in found.items()}, folder / adapters.WEIGHTS
    )
    refused(folder, r"does not fit .*size mismatch .*trained on")
    refused(adapter_folders.copy(tmp_path / "names", target_modules=["query"]), r"does not fit .*not found in the base")


def test_missing_and_surplus_tensors_are_refused(tmp_path):
    folder = adapter_folders.copy(tmp_path / "a")
    found = load_file(folder / adapters.WEIGHTS)
    first = sorted(found)[0]
    save_file({name: t for name, t in found.items() if name != first}, folder / adapters.WEIGHTS)
    refused(folder, "lacks model.layers.0.self_attn")
    save_file(
        {**found, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": found[first].clone()},
        folder / adapters.WEIGHTS,
    )
    refused(folder, r"does not fit .*has no model.layers.7")
    save_file({**found, first: found[first] * float("nan")}, folder / adapters.WEIGHTS)
    refused(folder, "values that are no numbers")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"peft_type": "IA3"}, "kind 'IA3'"),
        ({"peft_type": "PREFIX_TUNING"}, "kind 'PREFIX_TUNING'"),
        ({"r": 10**9}, "ranks of up to 4"),
        ({"r": -1}, "ranks of up to 4"),
        ({"rank_pattern": {"q_proj": 10**12}}, "ranks of up to 4"),
        ({"init_lora_weights": "pissa_niter_4"}, "its training has changed"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"a_field_of_later": "value"}, "a_field_of_later"),
        ({"bias": "all"}, "bias='all'"),
        ({"alpha_pattern": [1]}, "is no value for it"),
        ({"lora_alpha": float("nan")}, "is no value for it"),
        ({"modules_to_save": [1]}, "is no value for it"),
        ({"use_dora": "x"}, "is no value for it"),
        ({"bias": "some"}, "bias='some'"),
        ({"target_modules": "("}, "adapter"),
    ],
)
def test_settings_that_nobody_knows_are_refused(tmp_path, settings, match):
    refused(adapter_folders.copy(tmp_path / "a", **settings), match)


@pytest.mark.slow
def test_weights_of_the_base_model_within_an_adapter_are_refused_if_they_are_others(tmp_path):
    folder = adapter_folders.copy(tmp_path / "a", "embed")
    found = load_file(folder / adapters.WEIGHTS)
    (name,) = (name for name in found if "lora_" not in name)
    load(folder)
    save_file({**found, name: found[name] + 1}, folder / adapters.WEIGHTS)
    refused(folder, r"brings weights of its own for the base model \(model.embed_tokens")
    surplus = {**found, "base_model.model.model.norm.weight": torch.ones(32)}
    save_file(surplus, folder / adapters.WEIGHTS)
    load(folder)  # as in the model
    save_file({**surplus, "base_model.model.model.norm.weight": torch.zeros(32)}, folder / adapters.WEIGHTS)
    refused(folder, "brings weights of its own")


@pytest.mark.parametrize("name", ["a:b", "a/b", "", "-a", "a b", "ä", "a" * 65, "..", "a=b", 5, "a\n"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(kvkeep.InputError, match="is no name for an adapter"):
        load(adapter_folders.folder(), name)


def test_adapters_that_are_no_mapping_are_refused():
    with pytest.raises(kvkeep.InputError, match="no mapping"):
        adapters.check_names(["a"])


def test_without_peft_it_is_named(monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(kvkeep.InputError, match=r"needs? peft.*pip install 'kvkeep\[adapters\]"):
        load(adapter_folders.folder())


def test_the_base_model_of_an_adapter_is_compared_by_name(tmp_path, caplog):
    load(adapter_folders.folder())
    assert not caplog.records
    load(adapter_folders.copy(tmp_path / "a", base_model_name_or_path="org/Other-7B"))
    assert "was trained on 'org/Other-7B'" in caplog.text


@pytest.mark.slow
def test_a_folder_whose_name_has_strange_letters_is_read(tmp_path, monkeypatch):
    load(adapter_folders.copy(tmp_path / "a:b = ü"))
    monkeypatch.chdir(tmp_path)
    load("a:b = ü")
    monkeypatch.setenv("HOME", str(tmp_path))
    load("~/a:b = ü")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_an_adapter_are_as_exact_as_with_peft(dtype):
    with quiet():
        model, _ = kvkeep.load(model_folders.folder(), dtype=dtype, adapters={"a": adapter_folders.folder()})
    kinds = {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}
    assert kinds == {torch.float32}


# Parts of it, on a model of two linear layers.


def settings_refused(tmp_path, match, text=None, **settings):
    (tmp_path / adapters.WEIGHTS).write_bytes(b"")
    (tmp_path / adapters.CONFIG).write_text(text or json.dumps({"peft_type": "LORA", **settings}))
    with pytest.raises(kvkeep.ModelFileError, match=match):
        adapters.check_folders({"a": str(tmp_path)})


def test_settings_are_refused_before_weights_are_read(tmp_path):
    settings_refused(tmp_path, "is no JSON object", "[]")
    settings_refused(
        tmp_path, r"its training has changed \(init_lora_weights is 'PiSSA_niter_4'", init_lora_weights="PiSSA_niter_4"
    )
    settings_refused(tmp_path, "has bias='all' in its adapter_config.json, which kvkeep does not know", bias="all")
    for name, value in {
        "r": True,
        "lora_alpha": float("nan"),
        "modules_to_save": [1],
        "rank_pattern": {"q": "2"},
    }.items():
        settings_refused(tmp_path, f"has {name}=.* which is no value for it", **{name: value})
    passing = {"init_lora_weights": True, "bias": "none", "layer_replication": None, "lora_alpha": 2.5, "r": 4}
    (tmp_path / adapters.CONFIG).write_text(json.dumps({"peft_type": "LORA", **passing}))
    adapters.check_folders({"a": str(tmp_path)})


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture
def two():
    """A model with an adapter of its body and another head, each with random weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Two().eval()
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, "own")
    torch.nn.init.normal_(model.head.modules_to_save["own"].weight)
    return model


def test_adapters_that_somebody_else_switches_are_switched_back(two):
    x, named = torch.randn(2, 4), adapters.NamedAdapters(two, {"a": "own"})
    plain = two(x)
    with named.activated("a"):
        wanted = two(x)
    assert not torch.equal(wanted, plain)
    assert named.check()
    two.body.enable_adapters(False)
    assert not named.check()
    assert named.check()  # told once
    with named.activated("a"):
        assert torch.equal(two(x), wanted)
    two.body.scaling["own"] *= 2
    assert not named.check()


def test_a_merged_model_has_its_own_modules_and_computes_as_with_its_adapter(two):
    x, named = torch.randn(2, 4), adapters.NamedAdapters(two, {"a": "own"})
    named.activate("a")
    wanted = two(x)
    adapters._merge(two)
    assert [type(two.body), type(two.head)] == [torch.nn.Linear] * 2
    torch.testing.assert_close(two(x), wanted)
    assert not hasattr(two, "peft_config")


def test_weights_of_the_base_model_are_taken_out_of_an_adapter_if_they_are_the_models_own():
    model, folder = Two(), "folder"
    own = {"body.weight": model.body.weight.detach().clone(), "body.lora_A.weight": torch.ones(2, 4)}
    adapters._check_base(model, folder, own, {})
    assert own.keys() == {"body.lora_A.weight"}
    whole = {"head.weight": torch.zeros(3, 4)}
    adapters._check_base(model, folder, whole, {"modules_to_save": ["head"]})
    assert whole.keys() == {"head.weight"}
    for name, tensor in {
        "body.weight": torch.zeros(4, 4),
        "head.weight": torch.zeros(4, 3),
        "tail.bias": torch.ones(1),
    }.items():
        with pytest.raises(kvkeep.ModelFileError, match=rf"brings weights of its own for the base model \({name}\)"):
            adapters._check_base(model, folder, {name: tensor}, {})


def test_quantized_weights_are_compared_as_they_are_rounded_and_unpacked_in_copies():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for bits in PACKED.values():
        packed = QuantizedTensor.quantize(weight, bits)
        assert adapters._equal(packed, weight)
        assert not adapters._equal(packed, 1 - weight)
    assert not adapters._equal(QuantizedTensor.blank((32, 64), 5, 32, torch.float32), torch.zeros(32, 64))
    model = torch.nn.Module()
    model.head = torch.nn.Module()
    copies = {name: torch.nn.Linear(64, 32, bias=False) for name in ("own", "other")}
    for copied in copies.values():
        copied._parameters["weight"] = packed
    model.head.modules_to_save = torch.nn.ModuleDict(copies)
    adapters._unpack(model, "own")
    assert type(copies["own"].weight) is torch.nn.Parameter
    assert torch.equal(copies["own"].weight, packed.dequantize())
    assert copies["other"].weight is packed

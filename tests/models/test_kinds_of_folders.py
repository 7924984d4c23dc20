"""Folders that are no plain text decoder: models that see images, adapters, architectures without a KV cache."""

import json

import model_folders
import pytest
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DogeConfig, LlavaConfig, MambaConfig, MixtralConfig
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.errors import UnsupportedModelError
from kvkeep.models import load as loading
from kvkeep.models import support
from kvkeep.models.files import check_numbers


def generate(folder, *more):
    return CliRunner().invoke(app, ["generate", str(folder), "-p", "the quick brown fox", "-n", "4", *more])


def test_a_model_that_sees_images_writes_text():
    model, tokenizer = loading.load(model_folders.folder("llava"))
    assert isinstance(model.config, LlavaConfig)
    assert model.config.vision_config._attn_implementation == "sdpa"
    ids = tokenizer("the quick brown fox", return_tensors="pt").input_ids
    cache = kvkeep.BoundedCache(model.config, budget=64)
    want = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    done = generate(model_folders.folder("llava"), "--budget", "64")
    assert done.exit_code == 0, done.output
    assert tokenizer.decode(want, skip_special_tokens=True) in done.stdout


def test_a_plan_of_a_model_that_sees_images():
    done = CliRunner().invoke(app, ["plan", str(model_folders.folder("llava")), "--context", "100"])
    assert done.exit_code == 0, done.output


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "someone/large", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (json.dumps(ADAPTER), "for 'someone/large' (adapter_config.json)"),
        ("[1]", "for another model"),
        ("null", "for another model"),
        ('{"base_model_name_or_path": 7}', "for another model"),
        ("[" * 100_000, "for another model"),
    ],
    ids=["adapter", "list", "null", "number", "deep"],
)
@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_alone_is_no_model(text, named, with_config, tmp_path):
    folder = model_folders.copy(tmp_path / "adapter", *([] if with_config else ["config.json"]))
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(text)
    done = generate(folder)
    assert done.exit_code == 2
    assert named in " ".join(done.stderr.split())
    assert "Give that model, and the adapter beside it by a name: --adapter" in done.stderr
    assert done.stderr.count("\n") <= 4


SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MambaConfig(**SIZES, state_size=4), "takes no KV cache"),
        (DogeConfig(**SIZES, **HEADS, num_experts=16), "DogeForCausalLM cannot run with kvkeep.*wants a mask tensor"),
        (
            DiffLlamaConfig(**SIZES, **HEADS),
            "DiffLlamaForCausalLM (cannot run.*several times|computes attention itself)",
        ),
    ],
    ids=["mamba", "doge", "diffllama"],
)
def test_what_cannot_run_is_refused_before_weights_are_read(config, named, tmp_path, monkeypatch):
    folder = model_folders.copy(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights are read"))
    with pytest.raises(UnsupportedModelError, match=named):
        loading.load(folder)


def test_the_largest_number_of_experts_of_a_published_family_is_taken():
    check_numbers("doge", DogeConfig().to_dict())
    with pytest.raises(UnsupportedModelError, match="at most 20000"):
        check_numbers("damaged", {"num_experts": 20_001})


def test_a_trial_reaches_every_layer_also_past_experts(monkeypatch):
    seen = []
    step = support.IdleStepper.step
    monkeypatch.setattr(support.IdleStepper, "step", lambda *a, **k: seen.append(1) or step(*a, **k))
    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=4)
    support.try_out(loading.build_empty("mixtral", config))
    assert len(seen) == 2


def test_the_working_directory_is_a_folder_like_any_other(monkeypatch):
    monkeypatch.chdir(model_folders.folder())
    assert loading.find(".").parameters == loading.find(model_folders.folder()).parameters

"""Models whose weights lie elsewhere: accelerate's `device_map`, and weights in main memory or on the disk."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep.errors import InputError
from kvkeep.models.device import device_of, weights_of
from kvkeep.models.weight_hash import fingerprint

pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # old versions, on meta
accelerate = pytest.mark.skipif(util.find_spec("accelerate") is None, reason="needs accelerate")
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
)
PROMPT = [7 * i * i % 61 for i in range(40)]
SAMPLING = kvkeep.SamplingParams(max_new_tokens=8)
OPTIONS = {"policy": "h2o:recent=4", "budget": 16}
ENDS = ("model.norm", "model.rotary_emb", "lm_head")
WAYS = ["cpu", "disk", "mixed", "embedding on disk", "cpu_offload", "disk_offload"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose logits are far apart."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    place = tmp_path_factory.mktemp("offloaded")
    model.save_pretrained(place)
    return place


def loaded(folder: Path, way: str, away: Path) -> torch.nn.Module:
    """The model with its weights in memory, or where accelerate puts them."""
    if way in ("cpu_offload", "disk_offload"):
        from accelerate import cpu_offload, disk_offload

        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        place = {"execution_device": torch.device("cpu")}
        return cpu_offload(model, **place) if way == "cpu_offload" else disk_offload(model, str(away), **place)
    if way == "memory":
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    layers = {f"model.layers.{i}": "disk" if way == "disk" or (way == "mixed" and i % 2) else "cpu" for i in range(3)}
    places = {"model.embed_tokens": "disk" if way.startswith("embedding") else "cpu", **dict.fromkeys(ENDS, "cpu")}
    return AutoModelForCausalLM.from_pretrained(folder, device_map={**places, **layers}, offload_folder=away).eval()


def told(model: torch.nn.Module) -> list[object]:
    """What a cache, an engine, and a session of a model say."""
    ids = torch.tensor([PROMPT])
    cache = kvkeep.BoundedCache(model.config, **OPTIONS)
    out = kvkeep.attach(model).generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    engine = kvkeep.Engine(model, **OPTIONS, rows=2)
    requests = [kvkeep.Request(prompt=PROMPT[i:], sampling=SAMPLING) for i in range(3)]
    session = engine.session()
    turns = [session.ask(PROMPT[:n], SAMPLING).token_ids for n in (9, 20)]
    answers = [one.token_ids for one in engine.generate(requests)]
    return [out[0, 40:].tolist(), answers, turns, session.snapshot().fingerprint.weights, cache.memory()]


@pytest.mark.slow
@accelerate
@pytest.mark.parametrize("way", WAYS)
def test_weights_elsewhere_change_nothing(folder: Path, way: str, tmp_path: Path):
    model = loaded(folder, way, tmp_path)
    assert told(model) == told(loaded(folder, "memory", tmp_path))
    assert device_of(model) == torch.device("cpu")
    assert fingerprint(model) == fingerprint(model)


@accelerate
def test_a_memory_moves_between_them(folder: Path, tmp_path: Path):
    plain = kvkeep.Engine(loaded(folder, "memory", tmp_path), **OPTIONS, rows=1)
    away = kvkeep.Engine(loaded(folder, "disk", tmp_path), **OPTIONS, rows=1)
    found = [
        to.generate(kvkeep.Request(prompt=PROMPT[:5], snapshot=of.prefix(PROMPT), sampling=SAMPLING))[0].token_ids
        for to, of in ((plain, plain), (away, plain), (plain, away))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@accelerate
def test_layers_whose_weights_are_elsewhere_are_neither_packed_nor_fused(folder: Path, tmp_path: Path):
    model = kvkeep.attach(loaded(folder, "disk_offload", tmp_path))
    assert (kvkeep.pack_weights(model), kvkeep.fuse_modules(model)) == (0, 0)
    assert told(model) == told(loaded(folder, "memory", tmp_path))


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_quantised_weights_on_the_disk_are_refused_by_name(place):
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.hf_device_map, model.config.quantization_config = {"": place}, {"quant_method": "torchao"}
    if place == "cpu":
        kvkeep.attach(model)
        return
    with pytest.raises(kvkeep.UnsupportedModelError, match="torchao has quantised and that are offloaded to the disk"):
        kvkeep.attach(model)


def test_a_model_on_the_meta_device_has_nothing_to_run_with(folder: Path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    kvkeep.attach(model)
    cache = kvkeep.BoundedCache(model.config, **OPTIONS)
    with pytest.raises(InputError, match="is on the meta device"):
        model(input_ids=torch.tensor([PROMPT]), past_key_values=cache)
    with pytest.raises(InputError, match="is on the meta device"):
        model(input_ids=torch.tensor([PROMPT], device=model.device), past_key_values=cache)
    with pytest.raises(InputError, match="is on the meta device"):
        model.generate(torch.tensor([PROMPT]), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(InputError, match="is on the meta device"):
        kvkeep.Engine(model, **OPTIONS)
    with pytest.raises(InputError, match="is on the meta device"):
        fingerprint(model)


def test_the_numbers_of_an_offloaded_weight_are_those_of_the_hook_that_knows_them():
    layer = torch.nn.Linear(2, 2, bias=False, device="meta")
    others = [SimpleNamespace(), SimpleNamespace(weights_map={"bias": torch.zeros(2)})]
    layer._hf_hook = SimpleNamespace(hooks=[*others, SimpleNamespace(weights_map={"weight": torch.eye(2)})])
    [(name, found)] = weights_of(layer)
    assert (name, found.tolist()) == ("weight", [[1.0, 0.0], [0.0, 1.0]])
    layer._hf_hook = others[1]
    with pytest.raises(InputError, match="weight is on the meta device, and accelerate does not know its numbers"):
        list(weights_of(layer))

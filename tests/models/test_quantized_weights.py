"""Weights that are quantised while they are read, and checkpoints that are quantised already."""

from __future__ import annotations

import gc
import shutil
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import model_folders
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, HunYuanMoEV1Config, LlamaConfig, Qwen2MoeConfig
from typer.testing import CliRunner

import kvkeep
from kvkeep.backends import QuantizedTensor, quantized_tensor
from kvkeep.cli.main import app
from kvkeep.errors import InputError, ModelFileError
from kvkeep.models import prepare, quantized_weights
from kvkeep.models.compile import compile_layers
from kvkeep.models.load import find, load, quiet, read_weights
from kvkeep.models.packed_weights import pack_weights
from kvkeep.models.quantized_weights import is_packable, weight_bytes
from kvkeep.models.tiny import embedded
from kvkeep.models.weight_hash import fingerprint

torchao = pytest.mark.skipif(util.find_spec("torchao") is None, reason="needs torchao")
kernel = pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")
MAPS = Path("/proc/self/maps")
FORMATS = [
    pytest.param("int4", marks=kernel),
    pytest.param("int8", marks=kernel),
    pytest.param("fp8", marks=torchao),
]
WIDE = LlamaConfig(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


@pytest.fixture(autouse=True)
def _fast():
    with quiet(), model_folders.one_thread():
        yield


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is wide enough for linear layers to be most of it."""
    folder = model_folders.copy(tmp_path_factory.mktemp("wide") / "m", "config.json", "*.safetensors")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(WIDE).save_pretrained(folder)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(5, 45)[None] % 300).logits


def generate(*options: object, model: Path | str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["generate", str(model), "-p", "the quick", "-n", "4", *map(str, options)])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@torchao
def test_weights_of_torchao_take_less_and_answers_are_near(wide: Path):
    plain, small = load(wide)[0], load(wide, load_in="fp8")[0]
    layers = [module for module in plain.model.modules() if isinstance(module, torch.nn.Linear)]
    linear = sum(layer.weight.numel() for layer in layers)
    saved = weight_bytes(plain) - weight_bytes(small)
    assert 0.97 * 3 * linear < saved < 3 * linear  # one byte instead of four, and the scales
    expected, found = logits(plain), logits(small)
    assert float((expected - found).norm() / expected.norm()) < 0.1


@kernel
@pytest.mark.parametrize(("form", "bits", "error"), [("int4", 4, 0.2), ("int8", 8, 0.02)])
@pytest.mark.parametrize("fused", [True, False])
def test_packed_weights_take_less_and_answers_are_near(wide: Path, form: str, bits: int, error: float, fused: bool):
    plain, small = load(wide)[0], load(wide, load_in=form, fused=fused)[0]
    layers = [module for module in plain.model.modules() if isinstance(module, torch.nn.Linear)]
    tables = [plain.model.embed_tokens, plain.lm_head]
    expected = sum(packed_bytes(layer.weight, bits) for layer in layers)
    expected += sum(packed_bytes(table.weight, 8) for table in tables)
    norms = sum(weight.nbytes for weight in plain.parameters() if weight.ndim == 1)
    rest = sum(buffer.nbytes for buffer in plain.buffers())
    assert weight_bytes(small) == expected + norms + rest
    assert float((logits(plain) - logits(small)).norm() / logits(plain).norm()) < error
    assert prepare.describe(small).startswith("all 2 layers" if fused else "as transformers has them")


def packed_bytes(weight: torch.Tensor, bits: int) -> int:
    """With a scale and a minimum in float16 for 32 weights, and a factor for each row of whole blocks of 16."""
    rows = -(-weight.shape[0] // 16) * 16
    return rows * (weight.shape[1] * bits // 8 + weight.shape[1] // 32 * 4 + 4)


@pytest.mark.long
@kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fused_modules_compute_what_plain_ones_do(wide: Path, dtype: str):
    texts = [[5 + i, 9, 17, 40, 3, 8, 22] for i in range(3)]
    sampling = kvkeep.SamplingParams(max_new_tokens=8)
    found = []
    for fused in (True, False):
        engine = kvkeep.Engine(*load(wide, dtype, load_in="int4", fused=fused), budget=16, rows=3)
        requests = [kvkeep.Request(prompt=text, sampling=sampling, ignore_end=True, logprobs=0) for text in texts]
        found.append([result for _, result in engine.run(requests)])
    near = {"float32": 5e-5, "bfloat16": 0.05, "float16": 0.01}[dtype]
    for one, other in zip(*found, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        parted = next((at for at, (token, its) in enumerate(pairs) if token != its), len(pairs))
        assert parted == len(pairs) or dtype != "float32"  # in half precision two tokens can be as likely
        values = ([p.value for p in result.logprobs][: parted + 1] for result in (one, other))
        assert next(values) == pytest.approx(next(values), abs=near)


@kernel
def test_tied_embeddings_share_their_packed_weights(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**WIDE.to_dict(), "tie_word_embeddings": True})).save_pretrained(
        folder
    )
    plain, small = load(folder)[0], load(folder, load_in="int4")[0]
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert small.lm_head.weight.bits == 8
    assert float((logits(plain) - logits(small)).norm() / logits(plain).norm()) < 0.2


@kernel
def test_weights_of_odd_widths_stay_plain(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    AutoModelForCausalLM.from_config(LlamaConfig(**{**WIDE.to_dict(), "intermediate_size": 100})).save_pretrained(
        folder
    )
    model = load(folder, load_in="int8")[0]
    feed = model.model.layers[0].mlp
    assert type(feed.down_proj.weight) is torch.nn.Parameter
    assert isinstance(feed.up_proj.weight, QuantizedTensor)
    assert logits(model).isfinite().all()


EXPERTS = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
}


@kernel
def test_layers_that_choose_experts_stay_plain(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    own = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 2}
    AutoModelForCausalLM.from_config(Qwen2MoeConfig(**EXPERTS, **own)).save_pretrained(folder)
    feed = load(folder, load_in="int4")[0].model.layers[0].mlp
    assert type(feed.shared_expert_gate.weight) is type(feed.gate.weight) is torch.nn.Parameter
    assert isinstance(feed.shared_expert.up_proj.weight, QuantizedTensor)


@kernel
def test_layers_within_modules_that_choose_experts_stay_plain(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    own = {"moe_topk": 2, "moe_intermediate_size": 32, "head_dim": 16, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(HunYuanMoEV1Config(**EXPERTS, **own)).save_pretrained(folder)
    layer = load(folder, load_in="int4")[0].model.layers[0]
    assert type(layer.mlp.gate.wg.weight) is torch.nn.Parameter
    assert isinstance(layer.self_attn.o_proj.weight, QuantizedTensor)


def test_only_gguf_files_can_be_unpacked():
    with pytest.raises(InputError, match=r"`load_in=unpacked` is for GGUF files, and this is none\. Leave it out"):
        load(model_folders.folder(), load_in="unpacked")


@pytest.mark.usefixtures("only_new_garbage")
@kernel
@pytest.mark.skipif(not MAPS.exists(), reason="the system does not say which files are mapped")
def test_a_packed_model_lets_go_of_its_file(wide: Path, tmp_path: Path):
    folder = shutil.copytree(wide, tmp_path / "m")
    model = load(folder, load_in="int4")[0]
    gc.collect()
    assert str(folder) not in MAPS.read_text()
    assert logits(model).isfinite().all()


@kernel
def resident_pages() -> int:
    """Return the bytes of files that this process holds in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssFile:")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_pages_of_a_checkpoint_leave_memory_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = torch.randn(4096, 1024)
    file = tmp_path / "blob"  # as the hub's cache names it
    save_file({"x": numbers}, file)
    with safe_open(file, "pt") as opened:
        weight = opened.get_slice("x")[...]
    assert torch.equal(weight, numbers)
    before = resident_pages()
    monkeypatch.setattr(quantized_tensor, "_READ", 2**20)
    packed = QuantizedTensor.quantize(weight, 8, quantized_weights._let_go)
    assert resident_pages() < before - 8 * 2**20  # of 16; code that is first used here is read from files as well
    assert torch.equal(packed.dequantize(), QuantizedTensor.quantize(numbers, 8).dequantize())
    assert torch.equal(weight, numbers)


def test_memory_that_is_no_file_stays():
    numbers = torch.randn(1024, 1024)
    expected = numbers.tolist()
    quantized_weights._let_go(numbers)
    assert numbers.tolist() == expected


def test_a_packed_model_is_not_saved(wide: Path, tmp_path: Path):
    model = load(wide, load_in="int4")[0]
    assert model.config.to_dict() == load(wide)[0].config.to_dict()  # so that memories name other weights, not this
    with pytest.raises(ValueError, match="quantized with kvkeep and is not serializable"):
        model.save_pretrained(tmp_path)


@kernel
def test_a_packed_model_runs_under_autograd(wide: Path):
    model = load(wide, load_in="int8")[0]
    ids = torch.arange(5, 45)[None] % 300
    with torch.enable_grad():
        found = model(input_ids=ids).logits.detach()
    assert float((found - logits(model)).norm() / found.norm()) < 1e-3


@pytest.mark.long
@kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eviction_works_as_ever(wide: Path, dtype: str):
    model, tokenizer = load(wide, dtype, load_in="int8")
    engine = kvkeep.Engine(model, tokenizer, budget=8, rows=2)
    prompts = [[5 + i, 9, 17, 40, 3, 8, 22] for i in range(3)]
    sampling = kvkeep.SamplingParams(max_new_tokens=24)
    results = engine.run([kvkeep.Request(prompt=p, sampling=sampling, ignore_end=True) for p in prompts])
    assert [len(result.token_ids) for _, result in results] == [24] * 3
    cache = kvkeep.BoundedCache(model.config, "h2o", budget=8)
    with torch.inference_mode():
        for part in (torch.arange(20)[None], torch.tensor([[7]])):
            model(input_ids=part, past_key_values=cache)
    assert int((cache.positions() >= 0).sum(-1).max()) == 8


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_layers_get_no_other_layout(wide: Path, form: str):
    model = load(wide, load_in=form)[0]
    before = logits(model)
    assert pack_weights(model, 2) <= (form == "fp8")  # where the output layer is plain
    assert float((logits(model) - before).norm() / before.norm()) < 1e-5


@kernel
def test_compiling_changes_nothing_but_the_speed(wide: Path):
    model = load(wide, load_in="int8")[0]
    before = logits(model)
    compile_layers(model, backend="eager")
    assert float((logits(model) - before).norm() / before.norm()) < 1e-5


@kernel
def test_the_fingerprint_tells_formats_apart_and_is_stable(wide: Path):
    found = find(wide)
    plain, small, again, other = (fingerprint(read_weights(found, load_in=f)) for f in (None, "int8", "int8", "int4"))
    assert small == again
    assert len({plain, small, other}) == 3


@pytest.mark.long
@kernel
def test_the_embedded_model_still_answers():
    code, out, err = generate("--load-in", "int8", "--budget", 64, model=embedded())
    assert code == 0, err
    assert out.strip()


@kernel
def test_a_job_is_not_resumed_with_other_weights(tmp_path: Path, wide: Path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "the quick"}\n')
    job = ["generate", str(wide), "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-n", "2"]
    assert CliRunner().invoke(app, [*job, "--load-in", "int8"]).exit_code == 0
    assert CliRunner().invoke(app, [*job, "--load-in", "int8"]).exit_code == 0
    refused = CliRunner().invoke(app, job)
    assert refused.exit_code == 2
    assert "load_in" in refused.stderr or "load-in" in refused.stderr


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: None)
    code, out, err = generate("--load-in", "fp8", model="nowhere/at-all")
    assert (code, out) == (2, "")
    assert "--load-in fp8 needs torchao: pip install torchao (extra: kvkeep[quantized])" in err
    assert "bitsandbytes and accelerate" in generate("--load-in", "4bit", model="nowhere/at-all")[2]


def test_without_the_kernel_int8_is_torchaos_and_int4_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVKEEP_BACKEND", "torch")
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: None)
    assert "--load-in int8 needs torchao" in generate("--load-in", "int8", model="nowhere/at-all")[2]
    err = generate("--load-in", "int4", model="nowhere/at-all")[2]
    assert "--load-in int4 needs a CPU and kvkeep's native kernel (KVKEEP_BACKEND=torch). Leave it out." in err


@pytest.mark.parametrize("form", ["4bit", "8bit"])
def test_formats_for_cuda_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch, form: str):
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: name)
    code, _, err = generate("--load-in", form, "--device", "cpu", model=model_folders.folder())
    assert code == 2
    assert f"--load-in {form} needs CUDA" in err
    assert "--load-in int8" in err


@pytest.mark.parametrize(("form", "field"), [("4bit", "load_in_4bit"), ("8bit", "load_in_8bit")])
def test_formats_for_cuda_are_read_right_onto_the_card(monkeypatch: pytest.MonkeyPatch, form: str, field: str):
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: name)
    card = torch.device("cuda", 1)
    found = quantized_weights.options(form, WIDE, card)
    assert found["device_map"] == {"": card}
    assert getattr(found["quantization_config"], field)
    if form == "4bit":
        assert found["quantization_config"].bnb_4bit_quant_type == "nf4"


@pytest.mark.parametrize(
    ("form", "name", "device"),
    [
        ("int8", "Int8WeightOnlyConfig", "cuda"),
        ("fp8", "Float8WeightOnlyConfig", "cuda"),
        ("fp8", "Float8WeightOnlyConfig", "cpu"),
    ],
)
@pytest.mark.usefixtures("no_checked_annotations")
def test_formats_of_torchao_go_wherever_the_model_goes(
    monkeypatch: pytest.MonkeyPatch, form: str, name: str, device: str
):
    package = ModuleType("torchao.quantization")
    setattr(package, name, lambda: name)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", package)
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: name)
    monkeypatch.setattr(quantized_weights, "TorchAoConfig", lambda kind: ("torchao", kind))
    assert quantized_weights.options(form, WIDE, torch.device(device)) == {"quantization_config": ("torchao", name)}


def test_the_bytes_of_a_tensor_are_those_of_its_parts():
    layer = torch.nn.Linear(4, 3)  # 12 weights and 3 biases of 4 bytes
    assert quantized_weights.weight_bytes(layer) == 60
    data, scales = torch.zeros(3, 4), torch.ones(3, 4)
    layer.weight = torch.nn.Parameter(TwoTensor(data, TwoTensor(scales, scales.clone())), requires_grad=False)
    assert [part.data_ptr() for part in quantized_weights.parts(layer.weight)][:2] == [
        data.data_ptr(),
        scales.data_ptr(),
    ]
    assert quantized_weights.weight_bytes(layer) == 3 * 48 + 12


@pytest.mark.parametrize("form", ["int88", "", "INT8", "5bit", "x" * 5000])
def test_unknown_formats(form: str):
    with pytest.raises(InputError, match="Known: int4, int8, unpacked, 4bit, 8bit, fp8") as caught:
        load(model_folders.folder(), load_in=form)
    assert len(str(caught.value)) < 200


# checkpoints that are quantised already


def already(folder: Path, fields: object) -> Path:
    model_folders.copy(folder)
    model_folders.edit_json(folder / "config.json", quantization_config=fields)
    return folder


@pytest.mark.parametrize(
    ("fields", "packages"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "optimum"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "accelerate bitsandbytes"),
        ({"load_in_8bit": True}, "accelerate bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "accelerate"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed_tensors"),
        ({"quant_method": "quanto", "weights": "int8"}, "quanto"),
    ],
    ids=lambda value: value.get("quant_method", "8bit") if isinstance(value, dict) else None,
)
def test_the_package_of_a_quantised_checkpoint_is_named(tmp_path: Path, fields: dict[str, object], packages: str):
    package = next((name for name in packages.split() if util.find_spec(name) is None), None)
    if package is None:
        pytest.skip(f"{packages} is installed")
    code, out, err = generate(model=already(tmp_path / "m", fields))
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert package in err.replace("-", "_")
    assert len(err) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "nonsense"},
        {},
        {"bits": 4},
        [],
        7,
        "awq",
        {"quant_method": ["awq"]},
        {"quant_method": None},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "os.system", "_data": {}}}},
        {"quant_method": "fp8", "weight_block_size": [0, -1]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_one_line(tmp_path: Path, fields: object):
    code, _, err = generate(model=already(tmp_path / "m", fields))
    assert code == 2, err
    assert "Traceback" not in err
    assert len(err) < 700
    plan = CliRunner().invoke(app, ["plan", str(tmp_path / "m"), "--budget", "8", "--json"])
    assert plan.exit_code in (0, 2), plan.exception
    assert "Traceback" not in plan.stderr


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: name)
    with pytest.raises(InputError, match=r"quantised already \(awq\); leave `load_in=int8` out"):
        load(already(tmp_path / "m", {"quant_method": "awq"}), load_in="int8")


@torchao
def test_a_checkpoint_of_torchao_loads(tmp_path: Path, wide: Path):
    model_folders.copy(tmp_path / "m", "config.json", "*.safetensors")
    small = load(wide, load_in="fp8")[0]
    try:
        small.save_pretrained(tmp_path / "m")
    except (ImportError, ValueError) as error:
        pytest.skip(f"this version of torchao cannot save: {error}")
    model = load(tmp_path / "m")[0]
    assert weight_bytes(model) == weight_bytes(small)
    assert torch.equal(logits(model), logits(small))


def test_a_damaged_checkpoint_keeps_its_own_message(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFileError, match="Its weights cannot be read"):
        load(folder)


@pytest.mark.parametrize("form", [4, ["int8"], True])
def test_a_format_that_is_no_text_is_refused(form: object, no_checked_annotations: None):
    with pytest.raises(InputError, match="Weights cannot be loaded in"):
        kvkeep.load(load_in=form)  # type: ignore[arg-type]

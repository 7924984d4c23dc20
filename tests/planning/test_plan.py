"""Plans made from Python: bytes against real tensors, rows that fit, default budgets, refusals that name arguments."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import allocation
import model_folders
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

import kvkeep
from kvkeep.backends import SWITCH
from kvkeep.budget import per_layer
from kvkeep.cache.layer_layout import DEFAULT_BUDGET, default_budget
from kvkeep.engine import Engine
from kvkeep.engine.host_copies import COPIES
from kvkeep.engine.swapping import MOST_HOST_ROWS
from kvkeep.errors import BudgetError, InputError, KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import tiny
from kvkeep.models.key_transforms import key_transforms
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.planning import bandwidth, families, model_shapes
from kvkeep.planning.bandwidth import measure_bandwidth, measure_products
from kvkeep.planning.cost import LayerShape, joint_bytes
from kvkeep.planning.plan import Plan, plan
from kvkeep.policies.registry import parse
from kvkeep.types import Phase

CONTEXT = model_folders.TRAINED_LENGTH
PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers × heads × (K, V) × head dim × float32
WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1000}
EVICTING = [name for name in kvkeep.available_policies() if parse(name).evicts]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _fast():
    with quiet(), model_folders.one_thread():
        yield


def made(*arguments: object, model: Path | None = None, **options: object) -> Plan:
    return plan(model or model_folders.folder(), *arguments, **options)


def both(found: Plan):
    return found.full, found.bounded


# bytes


def measured(model: torch.nn.Module, policy: str, budget: int, rows: int, **options: object) -> int:
    """Bytes of a real cache after a prompt and one more token."""
    cache = kvkeep.BoundedCache(model.config, policy, budget, **options)
    with torch.inference_mode():
        for T in (CONTEXT - 2, 1):
            model(input_ids=torch.randint(0, 9, (rows, T)), past_key_values=cache)
    return cache.memory().allocated_bytes


@pytest.fixture(scope="module")
def model():
    with quiet():
        return read_weights(find(model_folders.folder()))


@pytest.mark.parametrize("policy", EVICTING)
def test_the_cache_of_a_row_is_what_real_tensors_take(model: torch.nn.Module, policy: str):
    found = made(policy, 34, context=CONTEXT)
    assert found.full.row_bytes == CONTEXT * PER_TOKEN
    real = measured(model, policy, 34, rows=3)
    spreads = parse(policy).spreads
    assert 3 * found.bounded.row_bytes <= real if spreads else 3 * found.bounded.row_bytes == real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layer_budgets_and_dtypes(model: torch.nn.Module, dtype: str):
    found = made("h2o", 16, layer_budget="pyramid:4", dtype=dtype)
    assert found.setting.layer_budgets() == per_layer("pyramid:4", 16, 2, least=parse("h2o").least) == [27, 5]
    try:
        real = measured(model.to(getattr(torch, dtype)), "h2o", 16, rows=2, layer_budget="pyramid:4")
    finally:
        model.to(torch.float32)
    assert 2 * found.bounded.row_bytes == real
    assert found.bounded.weight_bytes == sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize


@pytest.mark.parametrize("kv_bits", [None, "8", "4", "k8v4"])
@pytest.mark.parametrize("policy", ["h2o", "leverage:recent=2", "local"])
def test_heads_that_share_a_budget_take_what_is_planned(policy: str, kv_bits: str | None, model: torch.nn.Module):
    found, apart = (made(policy, 12, head_budget=rule, kv_bits=kv_bits).bounded for rule in ("global", "ada"))
    for rule, one in (("global", found), ("ada", apart)):
        assert 2 * one.row_bytes == measured(model, policy, 12, rows=2, head_budget=rule, kv_bits=kv_bits)
    assert found.row_bytes < apart.row_bytes
    assert found.step_bytes == apart.step_bytes


@pytest.mark.long
def test_the_peak_holds_the_layers_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If no token goes before the last layer has attended. Attention of the model needs little beside its keys."""
    monkeypatch.setattr("kvkeep.cache.shared_budget.AT_ONCE", 1e9)
    sizes = {"num_hidden_layers": 16, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100, "head_dim": 128}
    config = LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=4096)
    config.save_pretrained(tmp_path)
    model = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    cache, ids = kvkeep.BoundedCache(config, "h2o", 64, head_budget="global"), torch.zeros((1, 384), dtype=torch.int64)
    with torch.inference_mode():
        peak = allocation.peak_bytes(lambda: model(input_ids=ids, past_key_values=cache, logits_to_keep=1))
    shared, apart = (
        made("h2o", 64, head_budget=rule, context=384, model=tmp_path).bounded for rule in ("global", "ada")
    )
    assert apart.prompt_bytes + apart.row_bytes < peak <= shared.prompt_bytes + shared.row_bytes


@pytest.mark.slow
def test_layers_that_wait_hold_the_tokens_of_their_slots_as_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvkeep.cache.shared_budget.AT_ONCE", 1e9)
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100, "head_dim": 128}
    config = LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=4096)
    config.save_pretrained(tmp_path)
    model, given = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval()), {"head_budget": "global:1"}
    pieces, peaks = torch.zeros((1, 192), dtype=torch.int64).split(48, dim=1), {}
    key_transforms(model)  # once for a model, when it is first met with keys of 4 bits: no part of a prompt
    for kv_bits in (None, "4"):
        cache = kvkeep.BoundedCache(config, "h2o", 128, **given, kv_bits=kv_bits)
        cache.phase = Phase.PREFILL

        def read(cache: kvkeep.BoundedCache = cache) -> None:
            for piece in pieces:
                model(input_ids=piece, past_key_values=cache, logits_to_keep=1)

        with torch.inference_mode():
            peaks[kv_bits] = allocation.peak_bytes(read)
        found = made("h2o", 128, **given, kv_bits=kv_bits, context=192, prefill_chunk=48, model=tmp_path).bounded
        assert 0.75 * (found.prompt_bytes + found.row_bytes) < peaks[kv_bits] <= found.prompt_bytes + found.row_bytes
    assert peaks["4"] < 0.6 * peaks[None]


def test_layers_of_other_shapes_share_no_budget():
    shapes = [LayerShape(2, 8, 8), LayerShape(2, 16, 16)]
    with pytest.raises(kvkeep.UnsupportedOperationError, match="heads of one shape"):
        joint_bytes(shapes, 12, 4)


def test_weights_of_another_dtype():
    found = made(dtype="bfloat16", weights_dtype="float32")
    assert (found.setting.dtype, found.setting.weights_dtype) == (torch.bfloat16, torch.float32)
    assert found.setting.token_bytes == PER_TOKEN // 2
    assert found.bounded.weight_bytes == made().bounded.weight_bytes


def test_sliding_windows_bound_both_caches(tmp_path: Path):
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        sliding_window=12,
    )
    config.save_pretrained(tmp_path)
    model = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    found = made("h2o", 30, model=tmp_path)
    assert found.setting.layer_budgets() == [12, 12]
    assert found.full.row_bytes == 12 * PER_TOKEN
    assert 2 * found.bounded.row_bytes == measured(model, "h2o", 30, rows=2)


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", [None, "4"])
def test_layers_with_windows_share_no_budget(tmp_path: Path, kv_bits: str | None):
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    waiting = []
    for name, kinds in (("some", ["sliding_attention", "full_attention"] * 2), ("none", ["full_attention"] * 4)):
        config = Gemma2Config(
            **sizes, vocab_size=300, intermediate_size=48, head_dim=8, sliding_window=12, layer_types=kinds
        )
        config.save_pretrained(tmp_path / name)
        model = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
        given = {"model": tmp_path / name, "context": CONTEXT, "kv_bits": kv_bits}
        found, apart = (made("h2o", 30, **given, head_budget=rule) for rule in ("global", "ada"))
        real = measured(model, "h2o", 30, rows=2, head_budget="global", kv_bits=kv_bits)
        assert 2 * found.bounded.row_bytes == real
        assert found.setting.layer_budgets() == [12 if kind == "sliding_attention" else 30 for kind in kinds]
        waiting.append(found.bounded.prompt_bytes - apart.bounded.prompt_bytes)
        spread = {"layer_budget": "sliding:0.5", "head_budget": "global"}
        assert 2 * made("h2o", 30, **given, **spread).bounded.row_bytes == measured(
            model, "h2o", 30, rows=2, kv_bits=kv_bits, **spread
        )
    assert waiting[1] == 3 * waiting[0] > 0


def test_the_peak_is_weights_rows_and_the_larger_of_two_steps():
    found = made("h2o", 8).bounded
    working = max(found.prompt_bytes, 3 * found.step_bytes)
    assert found.peak_bytes(3) == found.weight_bytes + 3 * found.row_bytes + working


def test_chunks_of_prompts_are_part_of_the_peak():
    small, large = (made("h2o", 8, prefill_chunk=chunk) for chunk in (4, CONTEXT - 1))
    assert small.setting.chunk == 4
    for one, other in zip(both(small), both(large), strict=True):
        assert one.prompt_bytes < other.prompt_bytes
    assert made(prefill_chunk=4096).setting.chunk == CONTEXT  # not more than there is


def test_prompts_are_planned_as_the_engine_reads_them():
    """Whole, unless a chunk is given."""
    assert inspect.signature(Engine).parameters["prefill_chunk"].default is None
    long = made(context=4096).setting
    assert (long.chunk, long.reads_whole) == (4096, True)
    assert not made(context=4096, prefill_chunk=512).setting.reads_whole


@pytest.mark.parametrize("policy", ["ahakv", "keyformer", "scissorhands_release", "spatten", "streaming_llm"])
def test_working_memory_of_demanding_policies_is_not_more_than_planned(tmp_path: Path, policy: str):
    config = LlamaConfig(**WIDE, intermediate_size=704, num_key_value_heads=2, max_position_embeddings=4096)
    config.save_pretrained(tmp_path)
    model = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    chunk, rows = 384, 4
    found = made(policy, 64, prefill_chunk=chunk, model=tmp_path).bounded
    ids = torch.zeros((rows, chunk), dtype=torch.int64)

    def feed(cache: kvkeep.BoundedCache, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    cache = kvkeep.BoundedCache(config, policy, budget=64)
    feed(cache, ids[:1])
    assert allocation.peak_bytes(lambda: feed(cache, ids[:1])) <= found.prompt_bytes
    cache = kvkeep.BoundedCache(config, policy, budget=64)
    feed(cache, ids[:, :96])
    assert allocation.peak_bytes(lambda: feed(cache, ids[:, :1])) <= rows * found.step_bytes


# rows and speeds


def test_rows_that_fit_are_those_whose_peak_fits():
    options = {"context": 4096, "prefill_chunk": 16}
    for one in both(made("h2o", 8, **options)):
        peak = one.peak_bytes(7)
        assert (one.most_rows(peak), one.most_rows(peak - 1)) == (7, 6)


def test_speeds_follow_from_bytes():
    found = made("h2o", 8, bandwidth=2e9)
    tokens = len(model_folders.tokenizer()) * 32 * 4  # the input embedding: one line of it is read
    for one in both(found):
        read = one.weight_bytes - tokens + 5 * one.row_bytes
        assert one.read_bytes(5) == read
        assert one.tokens_per_s(5, found.bandwidth) == pytest.approx(5 * 2e9 / read)


def test_bandwidth_is_the_median_of_several_repeats(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 9.0, 0.0, 1.0, 0.0, 2.0, 0.0, 4.0] * 2)  # a first time that does not count, then three
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    found = measure_bandwidth(torch.device("cpu"), size_bytes=4000, repeats=3)
    assert (found.read, found.copy, found.best) == (2000, 4000, 4000)


@pytest.mark.parametrize(("native", "seconds"), [(None, 2), ([0.0, 9.0, 0.0, 0.5, 0.0, 1.0, 0.0, 4.0], 1)])
def test_products_are_the_median_of_several_repeats_of_the_faster_way(native, seconds, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 9.0, 0.0, 1.0, 0.0, 2.0, 0.0, 4.0, *(native or ())])
    monkeypatch.setattr(bandwidth, "choose", lambda device, dtype: SimpleNamespace(has_layer_ops=True))
    monkeypatch.setattr(bandwidth.layer_ops, "products", lambda x, layers: native and [x])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    sizes = {"width": 10, "size_bytes": 3000, "repeats": 3}  # two layers of 30 x 10 float32 numbers
    assert measure_products(torch.device("cpu"), torch.float32, 2, **sizes) == 2 * 30 * 10 * 4 / seconds


def test_products_by_torch_alone_if_the_switch_says_so(monkeypatch: pytest.MonkeyPatch):
    """Nothing is fused then, so the kernel's speed would be nobody's."""
    monkeypatch.setenv(SWITCH, "torch")
    monkeypatch.setattr(bandwidth.layer_ops, "products", lambda x, layers: pytest.fail("the kernel was asked"))
    assert measure_products(torch.device("cpu"), torch.float32, 2, width=16, size_bytes=1, repeats=1) > 0


def test_one_layer_is_multiplied_at_least():
    found = measure_products(torch.device("cpu"), torch.bfloat16, 3, width=16, size_bytes=1, repeats=1)
    assert found > 0


def test_results_of_products_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """Of narrow layers they would take more memory than the weights, and time."""
    alive = WeakSet()

    def multiplied(x, layer):
        assert len(alive) < 2
        result = torch.empty(x.shape[0], layer.shape[0])
        alive.add(result)
        return result

    monkeypatch.setattr(bandwidth, "linear", multiplied)
    measure_products(torch.device("cpu"), torch.float32, 2, width=4, size_bytes=4000, repeats=1)


def test_bandwidth_of_this_machine():
    found = measure_bandwidth(torch.device("cpu"), size_bytes=2**20, repeats=3)
    assert min(found.read, found.copy) > 10**6


# defaults


def test_default_budgets():
    assert made().setting.budget == made().setting.context == CONTEXT
    assert made(context=4096).setting.budget == DEFAULT_BUDGET == 1024
    assert made(context=4096, keep_ratio=0.25).setting.budget == 1024
    assert made("full", context=4096).setting.budget == 4096
    assert made(parse("local"), 7).setting.budget == 7


def test_a_default_budget_holds_what_policies_protect_and_no_more_than_the_tokens():
    h2o, sinks = parse("h2o"), parse("streaming_llm:sinks=9")
    assert default_budget(h2o, 2000) == DEFAULT_BUDGET
    assert default_budget(h2o, 17) == 17
    assert default_budget(h2o, 2, [sinks]) == default_budget(sinks, 2) >= 9
    assert default_budget(parse("full"), 5000) == 5000


def test_a_configuration_file_a_folder_and_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = both(made())
    bare = model_folders.copy(tmp_path / "m", "*.safetensors", "tokenizer*")
    assert both(made(model=bare)) == both(made(model=bare / "config.json")) == whole
    monkeypatch.setattr(tiny, "path", model_folders.folder)
    assert both(plan()) == whole


# refusals


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"budget": 0}, BudgetError, "^budget=0 keeps no token; the smallest budget is 1"),
        ({"budget": 8, "policy": "full"}, BudgetError, "full never evicts, so a budget of 8 .* 40 tokens"),
        ({"budget": 8, "policy": "h2o:sinks=4,recent=5"}, BudgetError, "at least 9"),
        ({"budget": 8, "keep_ratio": 0.5}, InputError, "^`budget` and `keep_ratio` were both given"),
        ({"keep_ratio": 1.5}, BudgetError, r"^keep_ratio=1.5 is outside \(0, 1\]"),
        ({"policy": "h2p"}, KVKeepError, "Did you mean 'h2o'"),
        ({"context": 0}, InputError, "^context=0 is not above 0"),
        ({"prefill_chunk": -1}, InputError, "^prefill_chunk=-1 is not above 0"),
        ({"rows": 0}, InputError, "^rows=0 asks for nothing: give 1 or more"),
        ({"rows": 10**400}, InputError, f"^rows is above {MOST_HOST_ROWS},"),
        ({"host_rows": 10**400}, InputError, f"^host_rows is above {MOST_HOST_ROWS},"),
        ({"memory": 10**400}, InputError, "^memory is above 9223372036854775807, more than any machine holds"),
        ({"weights_memory": 2**63}, InputError, "^weights_memory is above 9223372036854775807,"),
        *(({"bandwidth": n}, InputError, "^bandwidth=.* is no speed") for n in (0.0, -1.0, 1e300, math.inf, math.nan)),
        ({"rows": -2, "memory": 10**9}, InputError, r"^rows=-2 asks for nothing.* \d+ would fit"),
        ({"kv_bits": True}, InputError, "^kv_bits=True is no number of bits"),
        ({"kv_bits": "5"}, InputError, "^kv_bits='5' is no number of bits"),
        ({"head_budget": "ada:1.5"}, BudgetError, "^'ada:1.5' is out of range"),
        ({"layer_budget": [1.0]}, BudgetError, "1 layer weights were given for 2 layers"),
        ({"dtype": "int8"}, InputError, "Unknown dtype 'int8'"),
        ({"weights_dtype": "int8"}, InputError, "Unknown dtype 'int8'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(options: dict[str, object], kind: type[Exception], words: str):
    with pytest.raises(kind, match=words):
        plan(model_folders.folder(), **options)


def test_memory_that_does_not_hold_the_weights():
    found = made("h2o", 8)
    with pytest.raises(InputError, match=r"^`memory` is .*, and the weights take .* in float32 \(.* in bfloat16\)"):
        made("h2o", 8, memory=found.bounded.weight_bytes - 1)


def test_memory_that_does_not_hold_one_row_says_which_arguments_would():
    options = {"context": 5000, "prefill_chunk": 64}
    found = made("h2o", 4000, **options).bounded
    memory = found.weight_bytes + found.row_bytes - 1
    with pytest.raises(InputError, match=r"^Not one row fits into the `memory` of ") as caught:
        made("h2o", 4000, memory=memory, **options)
    words = str(caught.value).split("What fits: ")[1].rstrip(".")
    ways = dict(way.strip("`").split("=") for way in words.split(", or "))
    assert list(ways) == ["budget", "memory"]  # no chunk is small enough
    assert made("h2o", int(ways["budget"]), memory=memory, **options).bounded.most_rows(memory) == 1
    with pytest.raises(InputError):
        made("h2o", int(ways["budget"]) + 1, memory=memory, **options)
    assert made("h2o", 4000, memory=int(ways["memory"]), **options)


def test_no_budget_is_named_where_even_the_smallest_is_too_large():
    options = {"context": 5000, "prefill_chunk": 1}
    policy = "snapkv:window=2,decode=grow,room=3"  # refuses a budget of 5, which leaves nothing to choose
    found = made(policy, 4000, **options).bounded
    with pytest.raises(InputError, match=r"^Not one row fits") as caught:
        made(policy, 4000, memory=found.weight_bytes + 1, **options)
    assert "What fits: `memory=" in str(caught.value)
    assert "`budget=" not in str(caught.value)


def test_learned_positions_end():
    gpt2 = model_folders.folder("gpt2")
    with pytest.raises(InputError, match=f"positions for {model_folders.POSITIONS} tokens, and `context` is 33"):
        plan(gpt2, context=model_folders.POSITIONS + 1)
    assert plan(gpt2).setting.context == model_folders.POSITIONS


def test_a_model_that_does_not_say_its_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(families, "counted", lambda name: None)
    monkeypatch.setattr(model_shapes, "trained_length", lambda config: None)
    with pytest.raises(InputError, match="give `context`, in tokens"):
        made()
    assert made(context=50).setting.context == 50


def test_models_that_cannot_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelFileError, match="does not exist"):
        plan(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        plan(model_folders.folder("falcon"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFileError, match="The hub cannot be reached"):
        plan("someone/something-of-kvkeep-tests")


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]):
    (code,) = [part.partition("```")[0] for part in (DOCS / "plan.md").read_text().split("```python\n")[1:]]
    exec(code.replace('"Qwen/Qwen3-0.6B"', "folder"), {"folder": model_folders.folder()})
    assert len(capsys.readouterr().out.split()) >= 2


def test_sequences_in_main_memory_take_the_bytes_of_rows():
    found = plan(policy="h2o", budget=64, host_rows=3)
    assert found.host_bytes == 3 * found.bounded.row_bytes > 0
    assert found.staged_bytes == COPIES * found.bounded.row_bytes
    assert plan(policy="h2o", budget=64).host_bytes == plan(policy="h2o", budget=64).staged_bytes == 0
    with pytest.raises(InputError, match="host_rows=-1 is no number of sequences"):
        plan(host_rows=-1)


def test_a_measurement_without_room_says_what_it_takes():
    for measure in (
        measure_bandwidth,
        lambda device, **size: measure_products(device, torch.float32, 1, width=2**28, **size),
    ):
        with pytest.raises(InputError, match=r"^Out of memory on cpu. A measurement takes .* TB: .* give a bandwidth"):
            measure(torch.device("cpu"), size_bytes=2**59)


def test_narrow_layers_that_are_measured_are_few(monkeypatch):
    """A model of two channels would have five million layers in a buffer."""
    made = []
    monkeypatch.setattr(bandwidth, "_linear", lambda weight: made.append(weight) or torch.nn.Linear(2, 6, bias=False))
    assert measure_products(torch.device("cpu"), torch.float32, 1, width=2, repeats=1) > 0
    assert len(made) == bandwidth.MOST_LAYERS

"""``kvkeep plan``: its options, what it prints, and bad input as one line and exit code 2; figures: tests/planning."""

from __future__ import annotations

import json
from pathlib import Path

import model_folders
import pytest
import torch
from typer.testing import CliRunner

from kvkeep.cli import console, plan_run
from kvkeep.cli.main import app
from kvkeep.cli.options import parse_bytes
from kvkeep.cli.plan import parse_speed
from kvkeep.errors import InputError
from kvkeep.models import tiny
from kvkeep.planning import families, model_shapes
from kvkeep.planning.bandwidth import Bandwidth
from kvkeep.planning.plan import plan as plan_of
from kvkeep.policies import DEFAULT

CONTEXT = model_folders.TRAINED_LENGTH


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments: object, model: Path | None = None):
    where = [] if model is None else [str(model)]
    return CliRunner().invoke(app, ["plan", *where, *map(str, arguments)])


def plan(*arguments: object, model: Path | None = None):
    result = invoke(*arguments, model=model or model_folders.folder())
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments: object, model: Path | None = None):
    return json.loads(plan(*arguments, "--json", model=model).stdout)


def refused(*arguments: object, model: Path | None = None) -> str:
    """The one line that a bad input gets."""
    result = invoke(*arguments, model=model or model_folders.folder())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def with_rows(kind: dict, rows: int) -> dict:
    return next(case for case in kind["with_rows"] if case["rows"] == rows)


# figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_options_reach_the_plan(dtype: str):
    options = {"layer_budget": "pyramid:4", "positions": "slot", "prefill_chunk": 4, "weights_dtype": "bfloat16"}
    made = plan_of(model_folders.folder(), "tova", 16, context=50, dtype=dtype, **options)
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = as_json("--policy", "tova", "--budget", 16, "--context", 50, "--dtype", dtype, *given)
    assert found["layer_budgets"] == made.setting.layer_budgets()
    assert found["weights_bytes"] == made.bounded.weight_bytes
    assert (found["dtype"], found["weights_dtype"]) == (dtype, "bfloat16")
    assert (found["context_tokens"], found["prefill_chunk"], found["token_bytes"]) == (50, 4, made.setting.token_bytes)
    for kind, cost in (("full", made.full), ("bounded", made.bounded)):
        assert [found[kind][f"{name}_bytes"] for name in ("row", "prompt", "step")] == [
            cost.row_bytes,
            cost.prompt_bytes,
            cost.step_bytes,
        ]
        assert with_rows(found[kind], 1)["peak_bytes"] == cost.peak_bytes(1)
        assert with_rows(found[kind], 1)["fits"] is None


@pytest.mark.parametrize(
    "asked", [("adakv",), ("snapkv", "--head-budget", "ada"), ("h2o", "--head-budget", "global:0.5")]
)
def test_heads_that_share_a_budget_take_what_equal_ones_take(asked: tuple[str, ...]):
    equal = ("snapkv" if asked[0] == "adakv" else asked[0],)
    shared, alike = (as_json("--policy", *one, "--budget", 134, "--context", CONTEXT) for one in (asked, equal))
    ratio = shared["bounded"]["row_bytes"] / alike["bounded"]["row_bytes"]
    assert 1.0 < ratio < 1.01
    assert shared["layer_budgets"] == alike["layer_budgets"]


def test_budgets_by_layer_are_shown():
    shown = plan("--budget", 16, "--layer-budget", "pyramid:4").stdout
    assert "(5 to 27 by layer)" in " ".join(shown.split())


def test_rows_that_fit_are_those_whose_peak_fits():
    for kind in ("full", "bounded"):
        options = ["--budget", 8, "--context", "4K", "--prefill-chunk", 16, "--rows", 7]
        peak = with_rows(as_json(*options)[kind], 7)["peak_bytes"]
        exactly = as_json(*options, "--memory", f"{peak}B")[kind]
        one_less = as_json(*options, "--memory", f"{peak - 1}B")[kind]
        assert (exactly["rows"], with_rows(exactly, 7)["fits"]) == (7, True)
        assert (one_less["rows"], with_rows(one_less, 7)["fits"]) == (6, False)


def test_speeds_follow_from_bytes():
    found = as_json("--budget", 8, "--rows", 5, "--bandwidth", "2GB/s")
    assert found["bandwidth"] == {"bytes_per_s": 2 * 10**9, "source": "given"}
    for kind in ("full", "bounded"):
        case = with_rows(found[kind], 5)
        assert case["tokens_per_s"] == pytest.approx(5 * 2e9 / case["read_bytes"])
    assert found["bounded"]["compression"] == found["full"]["row_bytes"] / found["bounded"]["row_bytes"]


def test_measured_bandwidth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_run, "measure_bandwidth", lambda device: Bandwidth(read=3e9, copy=4e9))
    monkeypatch.setattr(plan_run, "measure_products", lambda device, dtype, rows, **more: 6e9 / min(rows, 3))
    found = as_json("--measure", "--device", "cpu", "--rows", 5, "--budget", 8)
    assert found["bandwidth"] == {
        "bytes_per_s": 4e9,
        "source": "measured",
        "device": "cpu",
        "read_bytes_per_s": 3e9,
        "copy_bytes_per_s": 4e9,
        "weight_bytes_per_s": {"1": 6e9, "5": 2e9},
    }
    for kind in ("full", "bounded"):
        case = with_rows(found[kind], 5)
        cache = 5 * found[kind]["row_bytes"]
        assert case["tokens_per_s"] == pytest.approx(5 / ((case["read_bytes"] - cache) / 2e9 + cache / 4e9))
    text = plan("--measure", "--device", "cpu").stdout
    assert "4.00 GB/s, measured on cpu" in text
    assert "6.00 GB/s of weights with 1 row" in text
    assert "at most" not in text


def test_products_of_quantised_weights_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_run, "measure_bandwidth", lambda device: Bandwidth(read=3e9, copy=4e9))
    monkeypatch.setattr(plan_run, "measure_products", None)
    text = plan("--measure", "--device", "cpu", "--weights-memory", "1MB").stdout
    assert "tokens/s at most, 1 row" in text


def test_products_of_more_rows_than_are_measured_follow_from_fewer(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def speed(device, dtype, rows, *, width, size_bytes):
        asked.append((rows, size_bytes))
        return 8e9

    monkeypatch.setattr(plan_run, "measure_products", speed)
    found = [plan_run._products(torch.device("cpu"), torch.float32, rows, 64) for rows in (32, 1024, 4096)]
    assert found == [8e9, 8e9, 2e9]
    assert asked == [(32, 2**28), (1024, 2**23), (1024, 2**23)]


# defaults


@pytest.mark.slow
def test_default_budgets():
    assert as_json()["budget"] == CONTEXT
    assert as_json("--context", "4K")["budget"] == 1024
    assert "1024" in invoke("--help").stdout
    assert as_json("--context", "4K", "--budget", "25%")["budget"] == 1024
    assert as_json("--policy", "full", "--context", "4K")["budget"] == 4096
    assert as_json("--context", "32k")["context_tokens"] == 32_000
    assert as_json()["context_tokens"] == CONTEXT
    assert as_json("--prefill-chunk", "4K")["prefill_chunk"] == CONTEXT  # not more than there is
    assert as_json("--context", "4K")["prefill_chunk"] == 4096


def test_it_says_how_prompts_are_read():
    whole, chunks = plan("--context", "4K").stdout, plan("--context", "4K", "--prefill-chunk", 512).stdout
    assert "4096 tokens each, prompts read whole" in whole
    assert "working memory of a prompt " in whole
    assert "4096 tokens each, prompts in chunks of 512" in chunks
    assert "working memory of a prompt's chunk " in chunks


def test_the_embedded_model_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny, "path", model_folders.folder)
    assert json.loads(invoke("--json").stdout) == {**as_json(), "model": "embedded"}


def test_no_memory_no_rows():
    found = as_json()
    assert found["memory_bytes"] is found["full"]["rows"] is found["bandwidth"] is None
    text = " ".join(plan().stdout.split())
    assert "rows that fit" not in text
    assert "tokens/s" not in text
    assert "how many rows fit: --memory 24GiB; how fast they are at most: --bandwidth 100GB/s, or --measure" in text
    text = plan("--memory", "1GiB", "--bandwidth", "1GB/s").stdout
    assert "--memory" not in text
    assert "--measure" not in text


# what people see


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    options = ["--memory", "1GiB", "--budget", 8, "--rows", 64, "--bandwidth", "20GB/s", "--policy", "h2o:recent=3"]
    result = plan(*options)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    head = next(number for number, line in enumerate(lines) if "full cache" in line)
    assert "budget 8" in lines[head]
    table = {line[: line.index("  ")]: line.split()[-1] for line in lines[head + 1 :] if "  " in line}
    assert list(table) == [
        "cache of a row",
        "compression",
        "working memory of a prompt",
        "rows that fit",
        "memory for 64 rows",
        "a step reads more cache than weights from",
        "tokens/s at most, 1 row",
        "tokens/s at most, all that fit",
        "tokens/s at most, 64 rows",
    ]
    found = as_json(*options)
    assert int(table["rows that fit"]) == found["bounded"]["rows"]
    assert table["memory for 64 rows"] == "fits"
    for words in ("h2o:recent=3", "1.074 GB", "(1 GiB)", "20.0 GB/s, given", "not counted: "):
        assert words.replace("1.074", "1.07") in result.stdout


def test_rows_that_do_not_fit_get_no_speed():
    peak = with_rows(as_json("--budget", 8, "--rows", 2)["bounded"], 2)["peak_bytes"]
    text = plan("--budget", 8, "--rows", 3, "--memory", f"{peak}B", "--bandwidth", "1GB/s").stdout
    line = next(line for line in text.splitlines() if line.startswith("memory for 3 rows"))
    assert line.endswith("too much")
    assert next(line for line in text.splitlines() if "3 rows" in line and "tokens/s" in line).endswith("–")


def test_notes(tmp_path: Path):
    assert "nothing is evicted: the budget of 40 is not smaller" in plan().stderr
    text = " ".join(plan("--context", 100, "--budget", 8).stderr.split())
    assert text == "note: 100 tokens are more than the 40 that the model was trained for."
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", dtype=None, quantization_config={"quant_method": "gptq", "bits": 4})
    notes = as_json("--budget", 8, model=folder)["notes"]
    assert any("names no dtype" in note for note in notes)
    assert any("quantised weights" in note and "float32" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "kept"),
    [(("--layer-budget", "uniform"), True), ((), False), (("--policy", "h2o:keep_prompt=0.5"), False)],
)
def test_what_is_kept_is_known_layer_by_layer(words: tuple[str, ...], kept: bool):
    """Layers with windows get half of a budget of 90 by default, and a prompt may get a share."""
    notes = as_json("--context", 90, "--budget", 90, *words, model=model_folders.folder("gemma3"))["notes"]
    assert any("nothing is evicted" in note for note in notes) == kept


def test_layers_without_keys_and_values_are_named(tmp_path: Path):
    file = tmp_path / "hybrid.json"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    types = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    file.write_text(json.dumps({"model_type": "lfm2", "vocab_size": 300, **sizes, **types}))
    found = as_json("--context", 100, "--budget", 8, model=file)
    assert len(found["layer_budgets"]) == 1
    assert "2 layers without keys and values are not counted." in found["notes"]


def test_help_has_its_groups_and_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, ["plan", "--help"]).stdout
    for group in ("KV memory", "Model", "Machine", "Output"):
        assert f"\n{group}\n" in text
    for option in ("--memory", "--budget", "--context", "--rows", "--bandwidth", "--measure", "--prefill-chunk"):
        assert option in text
    assert max(map(len, text.splitlines())) <= 80
    assert "plan" in CliRunner().invoke(app, ["--help"]).stdout


# bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "24"], ["--memory '24'", "24GiB"]),
        (["--memory", "24G"], ["--memory '24G'", "unit"]),
        (["--memory", "24KiBB"], ["unit"]),
        (["--memory", "kiB"], ["unit"]),
        (["--memory", "nanGB"], ["unit"]),
        (["--memory", "-5GiB"], ["-5GiB is not above 0"]),
        (["--memory", "0GB"], ["0GB is not above 0"]),
        (["--bandwidth", "100GB"], ["'100GB' is not a size per second", "100GB/s"]),
        (["--bandwidth", "fast/s"], ["--bandwidth", "100GB/s"]),
        (["--bandwidth", "0GB/s"], ["not above 0"]),
        (["--bandwidth", "1GB/s", "--measure"], ["--bandwidth and --measure"]),
        (["--budget", "0"], ["smallest budget is 1"]),
        (["--budget", "-3"], ["smallest budget is 1"]),
        (["--budget", "some"], ["--budget 'some'"]),
        (["--budget", "0%"], ["--budget 0% is outside"]),
        (["--budget", "8", "--policy", "full"], ["full never evicts", "a budget of 8", "40 tokens"]),
        (["--budget", "8", "--policy", "h2o:sinks=4,recent=5"], ["at least 9"]),
        (["--policy", "h2p"], ["Did you mean 'h2o'"]),
        (["--layer-budget", "slope"], ["--layer-budget 'slope'"]),
        (["--positions", "3"], ["--positions '3'"]),
        (["--context", "0"], ["--context 0 is not above 0"]),
        (["--context", "long"], ["--context 'long'"]),
        (["--prefill-chunk", "-1"], ["--prefill-chunk -1 takes no token"]),
        (["--rows", "0"], ["--rows 0 asks for nothing"]),
        (["--rows", "-2", "--memory", "1GB"], ["--rows -2 asks for nothing", "would fit"]),
        (["--dtype", "int8"], ["Unknown dtype 'int8'"]),
        (["--weights-dtype", "int8"], ["Unknown dtype 'int8'"]),
        (["--device", "cuda:99"], ["'cuda:99'", "Available"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(arguments: list[str], words: list[str]):
    line = refused(*arguments)
    assert all(word in line for word in words), line


def test_memory_that_does_not_hold_the_weights():
    found = as_json("--budget", 8)
    line = refused("--budget", 8, "--memory", f"{found['weights_bytes'] - 1}B")
    needed = console.show_bytes(with_rows(found["bounded"], 1)["peak_bytes"])
    assert f"the weights take {console.show_bytes(found['weights_bytes'])} in float32" in line
    assert f"({console.show_bytes(found['weights_bytes'] // 2)} in bfloat16)" in line
    assert f"One row of {DEFAULT} with a budget of 8 fits into {needed}" in line


@pytest.mark.slow
def test_memory_that_does_not_hold_one_row_says_what_fits():
    """The budget, the chunk and the memory that the message names do fit, and are the largest or smallest that do."""
    found = as_json("--budget", 4000, "--context", 5000, "--prefill-chunk", 64)
    memory = f"{found['weights_bytes'] + found['bounded']['row_bytes'] - 1}B"
    options = ["--context", 5000, "--memory", memory]
    line = refused(*options, "--budget", 4000, "--prefill-chunk", 64)
    assert "Not one row fits" in line
    budget = int(line.split("--budget ")[1].split(",")[0])
    assert as_json(*options, "--budget", budget, "--prefill-chunk", 64)["bounded"]["rows"] == 1
    refused(*options, "--budget", budget + 1, "--prefill-chunk", 64)
    needed = line.split("--memory ")[2].rstrip(".\n")  # rounded up
    assert as_json("--context", 5000, "--memory", needed, "--budget", 4000, "--prefill-chunk", 64)["bounded"]["rows"]
    assert "--prefill-chunk" not in line.split("What fits")[1]  # no chunk is small enough
    peak = with_rows(as_json("--budget", 8, "--context", 5000, "--prefill-chunk", 64)["bounded"], 1)["peak_bytes"]
    line = refused("--context", 5000, "--memory", f"{peak}B", "--budget", 8, "--prefill-chunk", 3000)
    chunk = int(line.split("--prefill-chunk ")[1].split(",")[0])
    assert 64 <= chunk < 3000


def test_learned_positions_end():
    line = refused("--context", model_folders.POSITIONS + 1, model=model_folders.folder("gpt2"))
    assert f"learned positions for {model_folders.POSITIONS} tokens" in line
    assert as_json(model=model_folders.folder("gpt2"))["context_tokens"] == model_folders.POSITIONS


def test_models_that_cannot_be_planned(tmp_path: Path):
    assert "does not exist" in refused(model=tmp_path / "nowhere")
    assert "attention interface" in refused(model=model_folders.folder("falcon"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(model=empty)
    file = tmp_path / "config.json"
    file.write_text("{")
    assert "config.json" in refused(model=file)
    file.write_text(json.dumps({"model_type": "frobnicate", "auto_map": {"AutoConfig": "evil.Config"}}))
    assert "own code, which kvkeep never runs" in refused(model=file)


def test_a_model_that_does_not_say_its_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(families, "counted", lambda name: None)
    monkeypatch.setattr(model_shapes, "trained_length", lambda config: None)
    assert "give --context, in tokens" in refused()
    assert as_json("--context", 50)["context_tokens"] == 50


# units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("512MiB", 2**29),
        ("1.5 TB", 15 * 10**11),
        ("4kB", 4000),
        (".5KiB", 512),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_bytes(text, "--memory") == size
    assert parse_speed(f"{text}/s") == size


@pytest.mark.parametrize("text", ["", "GiB", "24", "24GIB", "24gb", "1e3GB", "infGB", "24 GiB x", "kiB", "1 0GB"])
def test_sizes_that_are_none(text: str):
    with pytest.raises(InputError, match="unit"):
        parse_bytes(text, "--memory")

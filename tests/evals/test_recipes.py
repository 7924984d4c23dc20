"""Recipes: every file is whole and can be run, and the paper's figures stand beside ours."""

import itertools
import json
import math
import re

import model_folders
import public_files
import pytest
import real_folders
from transformers import LlamaConfig, OPTConfig
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.errors import InputError
from kvkeep.evals import tasks
from kvkeep.evals.arms import split_arms
from kvkeep.evals.recipes import find, names, read_line
from kvkeep.evals.tasks import choice, longbench, ruler
from kvkeep.policies.registry import spec
from kvkeep.result_files import ROWS

KNOWN = {
    "choice": set(choice.NAMES),
    "longbench": set(longbench.described()),
    "ruler": set(ruler.PARTS),
}


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("quick", [False, True])
def test_a_recipe_is_whole(name, quick):
    recipe = find(name)
    options = recipe.options(quick=quick)
    (task,) = tasks.find(options["tasks"])
    arms = {(spec(policy), f"kv-bits={bits}" if bits else "") for policy, bits, _ in split_arms(options["policies"])}
    asked = set(filter(None, options.get("parts", "").split(",")))
    assert asked <= KNOWN[task.name]
    assert recipe.source
    assert recipe.model
    for policy, figures in recipe.figures.items():
        assert len(figures) == len(recipe.columns)
        assert all(math.isnan(figure) or 0 <= figure <= 100 for figure in figures)
        *arm, budget = read_line(policy)
        assert quick or tuple(arm) in arms
        assert quick or budget is None or budget in options["budgets"].split(",")
    for parts in recipe.columns.values():
        assert set(parts) <= {*KNOWN[task.name], "*"}
    known = {"tasks", "parts", "policies", "budgets", "shots", "ask", "limit", "context"}
    assert options.keys() <= known


def test_every_recipe_is_named_on_the_page_of_help():
    text = " ".join(CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).output.split())
    assert all(name in text for name in names())


def row(policy, case, score, **more):
    return {"task": "choice", "policy": policy, "case": case, "budget": "20%", "score": {"score": score}, **more}


def test_figures_stand_beside_ours():
    rows = [
        row("full", "copa,shots=5", 0.5, seed=0),
        row("full", "copa,shots=5", 0.7, seed=1),
        row("h2o", "piqa,shots=5", 0.8),
        row("h2o", "copa,shots=5", 0.1, setup="positions=slot"),
        row("h2o", "piqa,shots=5", 0.3, task="ruler"),
    ]
    found = find("h2o-table2").table(rows)
    assert found.columns == ["copa", "openbookqa", "piqa", "winogrande"]
    assert found.rows["full"] == ["85.0 | 60.0 | -25.0", "43.2 | –", "78.5 | –", "70.2 | –"]
    assert found.rows["h2o"][0] == "84.0 | –"
    assert found.rows["h2o"][2] == "78.5 | 80.0 | +1.5"


def test_columns_average_parts():
    rows = [
        {**row("ahakv", name, score), "task": "longbench"}
        for name, score in (("lcc,ask=later", 0.5), ("repobench-p,ask=later", 0.7), ("trec,ask=later", 0.2))
    ]
    found = find("ahakv-longbench").table(rows).rows["ahakv"]
    assert found[0] == "57.1 | 60.0 | +2.9"
    assert found[1] == "57.1 | 20.0 | -37.1"


def test_lines_with_bits_and_budgets_find_their_rows():
    rows = [
        row("h2o", "copa,shots=5", 0.5, setup="kv-bits=4"),
        row("h2o", "copa,shots=5", 0.7, setup="kv-bits=8"),
        row("h2o", "copa,shots=5", 0.9),
    ]
    found = find("h2o-table6").table(rows).rows
    assert found["h2o@4bit"][0] == "84.0 | 50.0 | -34.0"
    assert found["h2o@8bit"][0] == "– | 70.0"
    assert found["h2o"][0] == "84.0 | 90.0 | +6.0"
    other = find("h2o-fig4").table([*rows, {**row("h2o", "copa,shots=5", 0.3), "budget": "60%"}]).rows
    assert (other["h2o at 20%"][0], other["h2o at 60%"][0], other["h2o at 4%"][0]) == ("– | 90.0", "– | 30.0", "–")


def test_a_line_names_all_that_its_policy_is_run_with():
    """As `Setup.differences` does."""
    assert read_line("tova@global:0.1@4 at 20%") == ("tova", "head-budget=global:0.1,kv-bits=4", "20%")
    assert read_line("tova@16") == ("tova", "", None)


def test_an_unknown_recipe_and_a_quick_run_of_none():
    with pytest.raises(InputError, match=r"Did you mean 'h2o-table[26]'"):
        find("h2o-table3")
    for arguments in (("--recipe", "x", "-o", "none"), ("--quick", "-o", "none"), ("--recipe", "../x", "-o", "none")):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def test_a_recipe_without_its_data_names_the_file(tmp_path):
    result = invoke(model_folders.folder(), "--recipe", "ahakv-ablation", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "multifieldqa_en.jsonl" in result.stderr
    assert "--data" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def data(tmp_path):
    return public_files.write(tmp_path, questions=8, articles=1, sentences=5)


@pytest.mark.slow
def test_a_recipe_runs_and_options_of_the_user_go_first(data, tmp_path):
    arguments = ("--recipe", "h2o-table2", "--quick", "--data", data, "--parts", "copa", "--shots", 1, "--limit", 3)
    result = invoke(model_folders.folder(), *arguments, "--no-plots", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "paper | ours | difference" in result.stdout
    assert "OPT-30B" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    assert {row["case"] for row in rows} == {"copa,shots=1"}
    assert {row["score"]["n"] for row in rows} == {3}
    again = invoke("--report", tmp_path / "out", "--recipe", "h2o-table2", "--no-plots")
    assert again.exit_code == 0
    assert again.stdout == result.stdout


@pytest.mark.slow
def test_a_dry_run_needs_no_weights_and_writes_nothing(data, tmp_path):
    model = model_folders.copy(tmp_path / "model", "*.safetensors")
    arguments = ("--recipe", "h2o-table2", "--quick", "--data", data, "--parts", "copa")
    result = invoke(model, *arguments, "--dry-run", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "copa,shots=3" in result.stdout
    assert "peak memory" in result.stdout
    assert "OPT-30B" in result.stdout
    assert not (tmp_path / "out").exists()
    assert invoke(model, *arguments, "--dry-run").exit_code == 0
    refused = invoke(model, *arguments, "--output", tmp_path / "out")
    assert refused.exit_code == 2
    assert "no weights" in refused.stderr


OPT_13B, OPT_30B = (
    OPTConfig(
        hidden_size=size,
        word_embed_proj_dim=size,
        ffn_dim=4 * size,
        num_hidden_layers=layers,
        num_attention_heads=size // 128,
        dtype="float16",
    )
    for size, layers in ((5120, 40), (7168, 48))
)
LLAMA_7B = LlamaConfig(max_position_embeddings=4096, dtype="float16")
LLAMA_8B = LlamaConfig(
    vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16"
)
STATED = {
    "h2o-table2": (OPT_30B, 60),
    "h2o-table6": (OPT_30B, 60),
    "h2o-fig4": (OPT_30B, 60),
    "scissorhands-fig": (OPT_13B, 25.7),
    "scissorhands-table4": (OPT_13B, 25.7),
    "ahakv-longbench": (LLAMA_8B, 16.1),
    "ahakv-ablation": (LLAMA_7B, 13.5),
    "kvpress-ruler4k": (LLAMA_8B, 16.1),
}
"""Recipes with the shape of a model of their paper, and the size of its weights in GB."""


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_whole_recipe_on_the_papers_model_is_planned(name, tmp_path):
    config, weights = STATED[name]
    for folder in ("model", "data"):
        (tmp_path / folder).mkdir()
    config.save_pretrained(tmp_path / "model")
    model_folders.tokenizer().save_pretrained(tmp_path / "model")
    data = public_files.write(tmp_path / "data")
    result = invoke(tmp_path / "model", "--recipe", name, "--data", data, "--dry-run")
    assert result.exit_code == 0, result.output
    facts = dict(re.split(r" {2,}", line, maxsplit=1) for line in result.stdout.split("\n\n")[-1].splitlines() if line)
    assert find(name).model.split()[0] in facts["the paper's model"]
    assert re.fullmatch(r"\S+ (s|min|h)( \d+ (s|min))? at \S+ GB/s *", facts["decoding"])
    peak = float(facts["peak memory"].split(" GB")[0])
    assert weights < peak < 3 * weights


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_recipe_runs_on_the_embedded_model(name, tmp_path):
    (tmp_path / "data").mkdir()
    folder, out = public_files.write(tmp_path / "data"), tmp_path / "out"
    result = invoke("--recipe", name, "--quick", "--data", folder, "--no-plots", "-o", out)
    assert result.exit_code == 0, result.output
    recipe = find(name)
    assert recipe.source.split(":")[0] in " ".join(result.stdout.split())
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    quick = recipe.options(quick=True)
    arms, budgets = split_arms(quick["policies"]), quick["budgets"].split(",")
    cells = sum(len(budgets) if arm.policy.evicts else 1 for arm in arms)
    assert len(rows) == cells * len({row["case"] for row in rows})
    assert {row["case"].partition(",")[0] for row in rows} == set(quick["parts"].split(","))
    ours = recipe.table(rows).rows
    asked = {(spec(policy), f"kv-bits={bits}" if bits else "") for policy, bits, _ in arms}
    for line, shown in ours.items():
        policy, setup, budget = read_line(line)
        if (policy, setup) in asked and (budget is None or budget in budgets):
            ran = [parts == ("*",) or set(parts) & set(quick["parts"].split(",")) for parts in recipe.columns.values()]
            assert any(ran)
            assert all(not cell.endswith("–") for cell, there in zip(shown, ran, strict=True) if there)


@pytest.mark.real
def test_the_order_of_policies_is_that_of_kvpress_scripts(tmp_path):
    """At 20 % a model of this size finds nothing under the others either; half of the text tells them apart."""
    told = ("--recipe", "kvpress-ruler4k", "--parts", "niah_single_1", "--context", "1024", "--budgets", "50%")
    folder = real_folders.folder("smollm2")
    result = invoke(folder, *told, "--limit", "6", "--dtype", "float32", "--no-plots", "--json", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    ours = {row["policy"].partition(":")[0]: row["score"]["score"] for row in rows}
    published = {name: figures[0] for name, figures in find("kvpress-ruler4k").figures.items()}
    assert ours.keys() == published.keys()
    for better, worse in itertools.pairwise(sorted(published, key=published.get, reverse=True)):
        assert ours[better] >= ours[worse], (better, worse)
    assert ours["defensivekv"] > ours["adakv"]

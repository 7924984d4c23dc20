"""``--kv-bits`` on every command with a budget, ``kvkeep.toml``, and cells such as ``h2o@4bit``."""

import json

import model_folders
import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.config import Config
from kvkeep.errors import InputError, PolicyError
from kvkeep.evals.arms import split_arms
from kvkeep.evals.forward import Setup
from kvkeep.evals.grid import GridArguments, RequestedBudget
from kvkeep.planning.plan import plan
from kvkeep.policies.registry import parse, spec

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 12


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def kv(*words, code=0):
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def as_json(*words):
    return json.loads(kv(*words, "--json").stdout)


def test_generate_holds_fewer_bytes_and_its_comparison_a_full_cache():
    words = ("generate", model_folders.folder(), "-p", TEXT, "--policy", "h2o", "--budget", "40", "-n", 4, "--compare")
    plain, coded = as_json(*words), as_json(*words, "--kv-bits", "4")
    assert coded["kv_bits"] == "4"
    assert coded["memory"]["allocated_bytes"] < 0.7 * plain["memory"]["allocated_bytes"]
    assert coded["memory"]["full_bytes"] == plain["memory"]["full_bytes"]
    assert coded["full"]["token_ids"] == plain["full"]["token_ids"]


@pytest.mark.parametrize("bits", ["3", "k4v8", "", "8bit"])
@pytest.mark.parametrize("command", ["generate", "remember", "chat", "serve", "plan", "eval"])
def test_bits_that_do_not_exist(command, bits, tmp_path):
    more = {"eval": ("-o", tmp_path / "out"), "generate": ("-p", "a"), "remember": ("-f", "a", "-o", tmp_path / "a")}
    done = kv(command, model_folders.folder(), *more.get(command, ()), "--kv-bits", bits, code=2)
    assert done.stderr.count("\n") == 1
    assert f"--kv-bits {bits!r} is no number of bits that slots can have: give 8, 4, k8v4" in done.stderr


@pytest.mark.slow
def test_a_remembered_text_brings_its_bits(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    file, model = tmp_path / "text.kvkeep", model_folders.folder()
    kv("remember", model, "-f", tmp_path / "text.txt", "-o", file, "--kv-bits", "k8v4", "--raw")
    assert "(kv_bits k8v4)" in kv("memory", file).stdout
    found = as_json("generate", model, "--memory", file, "-p", "what", "-n", 3)
    assert found["kv_bits"] == "k8v4"
    kv("generate", model, "--memory", file, "-p", "what", "-n", 3, "--kv-bits", "k8v4")
    for bits in ("8", "16"):
        done = kv("generate", model, "--memory", file, "-p", "what", "--kv-bits", bits, code=2)
        assert f"--kv-bits {bits} is not that of {file}, k8v4" in done.stderr


def test_a_batch_job_is_begun_and_continued_with_the_same_bits(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": TEXT}) + "\n")
    words = ("generate", model_folders.folder(), "-i", source, "-o", target, "-n", 3)
    kv(*words, "--kv-bits", "8")
    kv(*words, "--kv-bits", "8")
    assert "kv_bits" in kv(*words, code=2).stderr


@pytest.mark.parametrize("bits", [8, "8", "k8v4", 16])
def test_a_file_of_settings(bits, tmp_path):
    file = tmp_path / "kvkeep.toml"
    file.write_text(Config(policy="h2o", budget=40, kv_bits=bits).text())
    assert Config.read(file).kv_bits == bits
    found = as_json("generate", model_folders.folder(), "-p", TEXT, "-n", 3, "--config", file)
    assert str(found["kv_bits"]) == str(bits)


@pytest.mark.parametrize("wrong", [5, "k4", True, 8.5])
def test_a_file_with_bits_that_do_not_exist(wrong):
    with pytest.raises(InputError, match="is no number of bits"):
        Config.of({"kv_bits": wrong})


def test_a_plan_counts_codes_and_scales():
    words = ("plan", model_folders.folder(), "--budget", 16, "--context", 50, "--policy", "h2o")
    made = plan(model_folders.folder(), "h2o", 16, context=50, kv_bits=4)
    found = as_json(*words, "--kv-bits", "4")
    assert found["kv_bits"] == "4"
    assert found["bounded"]["row_bytes"] == made.bounded.row_bytes < as_json(*words)["bounded"]["row_bytes"]
    assert "budget 16, kv_bits 4" in " ".join(kv(*words, "--kv-bits", "4").stdout.split())


@pytest.mark.parametrize("rule", ["ada:0.1", "global"])
def test_a_plan_of_heads_that_share_a_budget_is_what_a_cache_holds(rule):
    shared = ("--policy", "h2o", "--budget", 16, "--head-budget", rule, "--kv-bits", "4")
    planned = as_json("plan", model_folders.folder(), "--context", 50, *shared)["bounded"]["row_bytes"]
    held = as_json("generate", model_folders.folder(), "-p", TEXT, "-n", 2, *shared)["memory"]
    assert held["allocated_bytes"] == planned


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h2o@4bit,h2o", [("h2o", "4"), ("h2o", None)]),
        ("h2o:recent=32,sinks=4@k8v4,local@16", [("h2o:recent=32,sinks=4", "k8v4"), ("local", "16")]),
        ("h2o@8, h2o@8bit ,full@4", [("h2o", "8"), ("full", "4")]),
    ],
)
def test_lists_of_policies_with_bits(text, found):
    assert [(spec(arm.policy), arm.kv_bits) for arm in split_arms(text)] == [
        (spec(parse(name)), bits) for name, bits in found
    ]


@pytest.mark.parametrize("text", ["h2o@3", "h2o@", "h2o@bit", "@4", "h2o@4@8", "h2o@ada@global", "h2o@globe:0.2"])
def test_a_wrong_list_of_policies_with_bits(text):
    with pytest.raises((InputError, PolicyError)):
        split_arms(text)


def test_a_rule_for_heads_that_does_not_exist_is_told_the_rules():
    with pytest.raises(
        InputError, match=r"'globe:0.2' after @ is neither .* \(8, .* \(uniform, ada, global or profile"
    ):
        split_arms("h2o@globe:0.2")


def test_lists_of_policies_with_rules_for_heads():
    found = [(spec(arm.policy), arm.head_budget, arm.kv_bits) for arm in split_arms("tova@global:0.1,h2o@ada@4,local")]
    assert found == [("tova", "global:0.1", None), (spec(parse("h2o")), "ada", "4"), ("local", None, None)]
    grid = GridArguments(
        arms=split_arms("tova@global:0.1,local"), budgets=[RequestedBudget(tokens=12)], setup=Setup(head_budget="ada")
    )
    assert [setup.head_budget for _, _, setup in grid.pairs()] == ["global:0.1", "ada"]


def test_a_policy_that_never_evicts_is_measured_at_its_bits():
    found = GridArguments(arms=split_arms("full,full@4,local@8"), budgets=[RequestedBudget(tokens=12)]).pairs()
    assert [(spec(policy), str(asked), setup.kv_bits) for policy, asked, setup in found] == [
        ("full", "100%", None),
        ("full", "100%", "4"),
        ("local", "12", "8"),
    ]


def test_cells_of_bits_are_rows_of_their_own(tmp_path):
    words = ("--tasks", "perplexity", "--limit", 2, "--window", 40, "--budgets", "12", "--no-plots")
    policies = ("--policies", "full,local,local@4bit,adakv:window=4,adakv:window=4@4bit")
    found = as_json("eval", model_folders.folder(), *words, *policies, "-o", tmp_path / "out")
    assert [(row["policy"], row["setup"]) for row in found["rows"]] == [
        ("full", ""),
        ("local", ""),
        ("local", "kv-bits=4"),
        ("adakv:window=4", ""),
        ("adakv:window=4", "kv-bits=4"),
    ]
    assert len({str(row["score"]) for row in found["rows"]}) == 5
    assert "local (kv-bits=4)" in kv("eval", "--report", tmp_path / "out", "--no-plots").stdout


@pytest.mark.slow
def test_a_search_over_bits_writes_them_down(tmp_path):
    (tmp_path / "text.txt").write_text(8 * TEXT)
    words = ("tune", model_folders.folder(), "--case", "stream", "--context", 64, "--text", tmp_path / "text.txt")
    policies = ("--policies", "local,local@4", "--budgets", "8,16,40", "--target", "0.5", "--no-plots")
    found = as_json(*words, *policies, "-o", tmp_path / "out")
    assert {one.get("kv_bits") for one in found["searched"]} == {None, "4"}
    assert Config.read(found["config"]).kv_bits == found["chosen"].get("kv_bits") == "4"

"""``kvkeep eval``: what it prints and writes, how it goes on, and every bad input as one line and exit code 2."""

import io
import json
import re

import model_folders
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import plots
from kvkeep.cli import eval_run, progress
from kvkeep.cli.main import app
from kvkeep.cli.options import parse_budget
from kvkeep.errors import BudgetError, InputError, pip_install
from kvkeep.evals.forward import PLAIN
from kvkeep.evals.grid import Cell, Planned
from kvkeep.models import tiny
from kvkeep.policies.registry import parse

QUICK = ("--tasks", "perplexity", "--policies", "full,local", "--limit", 2, "--window", 40, "--budgets", "20%,12")
TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 10


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments, model=None):
    where = [] if model is None else [str(model)]
    return CliRunner().invoke(app, ["eval", *where, *map(str, arguments)], env={"COLUMNS": "160"})


def evaluate(*arguments, model=None):
    result = invoke(*arguments, model=model or model_folders.folder())
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, model=None):
    """The one line that a bad input gets."""
    result = invoke(*arguments, model=model)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_table_rows_and_plots(tmp_path):
    result = evaluate(*QUICK, "--output", tmp_path / "out")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["policy", "20%", "12", "100%"] in lines
    assert [line[0] for line in lines if line and line[0] in ("full", "local")] == ["full", "local"] * 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(row["policy"], row["budget"]) for row in rows] == [("full", "100%"), ("local", "20%"), ("local", "12")]
    assert f"{rows[0]['score']['perplexity']:.3g}" in result.stdout
    assert rows[0]["model"] == str(model_folders.folder())
    assert (tmp_path / "out" / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "own plain sentences" in result.stderr


def test_json_is_one_object_with_every_row(tmp_path):
    found = json.loads(evaluate(*QUICK, "-o", tmp_path, "--json", "--no-plots").stdout)
    assert len(found["rows"]) == 3
    assert found["plots"] == []
    assert found["output"] == str(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "run.json"}


def test_the_same_command_again_runs_nothing(tmp_path, monkeypatch):
    first = evaluate(*QUICK, "-o", tmp_path, "--no-plots")
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr("kvkeep.evals.tasks.perplexity.Perplexity.run", None)
    assert evaluate(*QUICK, "-o", tmp_path, "--no-plots").stdout == first.stdout
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_report_draws_the_same_again_without_a_model(tmp_path, monkeypatch):
    first = evaluate(*QUICK, "-o", tmp_path)
    picture = (tmp_path / "quality.png").read_bytes()
    (tmp_path / "quality.png").unlink()
    (tmp_path / "run.json").unlink()
    monkeypatch.setattr(eval_run, "find", None)
    assert invoke("--report", tmp_path).stdout == first.stdout
    assert (tmp_path / "quality.png").read_bytes() == picture


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_run, "run", stop)
    result = invoke(*QUICK, "-o", tmp_path, model=model_folders.folder())
    assert result.exit_code == 130
    assert "run the same command again to go on" in result.stderr


def test_a_bar_shows_cells_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.console.err", lambda: screen)
    screen = Console(stderr=True, force_terminal=True, width=120)
    stderr = evaluate(*QUICK, "-o", tmp_path, "--no-plots").stderr
    assert [f"{n}/3" in stderr for n in range(5)] == [True, True, True, False, False]
    assert "perplexity" in stderr
    assert "left" in stderr


@pytest.mark.parametrize("width", [80, 100])
def test_a_bar_keeps_its_numbers_beside_a_long_name(monkeypatch, width):
    file = io.StringIO()
    monkeypatch.setattr("kvkeep.cli.console.err", lambda: Console(file=file, force_terminal=True, width=width))
    name = "scissorhands_release:quantile=0.95,window=200,recent=20"
    cell = Cell("agreement", "context=1024", name, "20%", 0)
    with progress.eval_progress(1234) as drawn:
        drawn.begin(Planned(cell, parse(name), PLAIN, (1,), (1,)))
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).splitlines()
    frame = next(text for text in reversed(frames) if "agreement 20%" in text)
    assert "…" in frame
    assert "0/1234" in frame
    assert "0:00:00 time left -:--:--" in frame
    assert len(frame) <= width


def test_without_matplotlib_there_is_a_table_and_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    result = evaluate(*QUICK, "-o", tmp_path)
    assert pip_install("plots") in result.stderr
    assert "perplexity" in result.stdout


def test_embedded_model_is_the_default_and_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "path", model_folders.folder)
    result = invoke(*QUICK, "-o", tmp_path, "--json", "--no-plots")
    assert result.exit_code == 0, result.output
    assert {row["model"] for row in json.loads(result.stdout)["rows"]} == {"embedded"}


@pytest.mark.slow
def test_all_tasks_with_a_text_of_the_user(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ("--text", text, "--context", "300", "--facts", 2, "--stride", 8)
    quick = ("--policies", "full,h2o:recent=2,sinks=1,tova", "--limit", 2, "--budgets", "20%")
    result = evaluate(*quick, *options, "-o", tmp_path / "out", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["task"] for row in rows] == [t for t in ("recall", "perplexity", "agreement", "mass") for _ in range(3)]
    assert {row["policy"] for row in rows} == {"full", "h2o:recent=2,sinks=1", "tova"}
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == ["depth.png", "kept.png", "quality.png"]
    assert "own plain sentences" not in result.stderr


def test_a_text_shorter_than_the_budget_is_noted(tmp_path):
    result = evaluate(*QUICK[:-1], "40", "-o", tmp_path, "--no-plots")
    assert "nothing is evicted at 40" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_seeds_and_setups_stand_beside_each_other_in_one_folder(tmp_path):
    evaluate(*QUICK, "-o", tmp_path, "--no-plots", "--seed", "0,1")
    result = evaluate(*QUICK, "-o", tmp_path, "--positions", "slot", "--prefill-chunk", 4, "--layer-budget", "ramp")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    other = "positions=slot,layer-budget=ramp:0.2,prefill-chunk=4"
    assert [(row["policy"], row["seed"], row["setup"]) for row in rows] == [
        *(key for seed in (0, 1) for key in (("full", seed, ""), ("local", seed, ""), ("local", seed, ""))),
        ("local", 0, other),
        ("local", 0, other),
    ]
    assert "mean ± half of the range over 1 to 2 seeds" in result.stdout
    assert f"local ({other})" in result.stdout
    assert "±" in next(line for line in result.stdout.splitlines() if line.startswith("full"))


@pytest.mark.slow
def test_questions_in_the_prompt_and_later_stand_beside_each_other(tmp_path):
    quick = ("--tasks", "recall", "--policies", "local", "--limit", 2, "--context", 300, "--facts", 2, "-o", tmp_path)
    evaluate(*quick, "--budgets", "20%", "--no-plots")
    result = evaluate(*quick, "--budgets", "20%", "--ask", "later")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["context=300", "context=300,ask=later"]
    assert "recall, % right (context=300, inside)" in result.stdout
    assert "recall, % right (context=300, later)" in result.stdout
    assert "answers of the full cache that stay" not in result.stdout  # full was not run
    again = evaluate(*quick, "--budgets", "20%", "--ask", "inside,later")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2  # inside is another word for prompt
    assert "(context=300, inside)" in again.stdout


def test_weights_of_layers_from_a_file(tmp_path):
    file = tmp_path / "persistence.json"
    file.write_text("[0.0, 1.0]")
    found = evaluate(*QUICK, "-o", tmp_path / "out", "--layer-budget", f"calibrated:{file}", "--json", "--no-plots")
    setups = [row["setup"] for row in json.loads(found.stdout)["rows"]]
    assert setups[0] == ""
    assert setups[1] == setups[2] != ""
    assert setups[1].startswith("layer-budget=calibrated:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "There is no folder for results. Give --output DIR"),
        (["--output", "OUT", "--report", "OUT"], "were both given"),
        (["--report", "OUT"], "has no results"),
        (["-o", "OUT", "--policies", ""], "list of policies is empty"),
        (["-o", "OUT", "--policies", "h20"], "Did you mean 'h2o'"),
        (["-o", "OUT", "--budgets", ""], "--budgets is an empty list"),
        (["-o", "OUT", "--budgets", "0%"], "--budgets 0% is outside 0 … 100%"),
        (["-o", "OUT", "--budgets", "120%"], "--budgets 120% is outside 0 … 100%"),
        (["-o", "OUT", "--budgets", "x%"], "--budgets: 'x' is not a number"),
        (["-o", "OUT", "--budgets", "0.2"], "not a whole number of tokens"),
        (["-o", "OUT", "--budgets", "0"], "the smallest budget is 1"),
        (["-o", "OUT", "--tasks", "recal"], "Did you mean 'recall'"),
        (["-o", "OUT", "--tasks", ","], "list of tasks is empty"),
        (["-o", "OUT", "--limit", "0"], "--limit 0 leaves nothing to measure"),
        (["-o", "OUT", "--seed", "-1"], "--seed -1 is outside"),
        (["-o", "OUT", "--seed", "0,1,-1"], "--seed -1 is outside"),
        (["-o", "OUT", "--seed", "one"], "--seed: 'one' is not a whole number"),
        (["-o", "OUT", "--seed", ","], "--seed is an empty list"),
        (["-o", "OUT", "--ask", "never"], "--ask 'never' is no way to ask; use prompt, inside or later"),
        (["-o", "OUT", "--documents", "poem"], "--documents 'poem' is no look of texts; use one of prose, facts"),
        (["-o", "OUT", "--positions", "slots"], "--positions 'slots' is not a mode"),
        (["-o", "OUT", "--layer-budget", "slope"], "calibrated:FILE"),
        (["-o", "OUT", "--prefill-chunk", "0"], "--prefill-chunk 0 takes no token"),
        (["-o", "OUT", "--facts", "900"], "--facts 900 is more than there are names and things for"),
        (["-o", "OUT", "--text", "missing.txt"], "The text file missing.txt cannot be read: No such file"),
        (["-o", "OUT", "--dtype", "float"], "Unknown dtype"),
        (["-o", "OUT", "--device", "cuda:99"], "cannot be used here"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments, model=model_folders.folder())
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "streaming_llm", "--tasks", "perplexity", "--budgets", "5%"], "cannot run at 5% of 40 tokens"),
        (["--tasks", "recall", "--context", "64"], "more than the context of 64. Give fewer --facts"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(eval_run, "read_weights", None)
    assert words in refused("-o", tmp_path / "out", *arguments, model=model_folders.folder())


@pytest.mark.parametrize(("data", "words"), [(b"", "is empty"), (b"\xff\xfe", "not UTF-8"), (b"the", "only 1 tokens")])
def test_a_text_that_cannot_be_used(tmp_path, data, words):
    text = tmp_path / "text.txt"
    text.write_bytes(data)
    assert words in refused(*QUICK, "-o", tmp_path / "out", "--text", text, model=model_folders.folder())


def test_a_folder_of_another_run_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    evaluate(*QUICK, "-o", tmp_path, "--no-plots")
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(eval_run, "read_weights", None)
    line = refused(*QUICK, "-o", tmp_path, "--limit", 3, model=model_folders.folder())
    assert "results of another run: 'windows' of perplexity was 2 and is 3 now" in line
    other = model_folders.copy(tmp_path / "other")
    assert f"the model was {model_folders.folder()} and is {other} now" in refused(*QUICK, "-o", tmp_path, model=other)
    assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(("text", "budget"), [("20%", 0.2), ("12.5%", 0.125), ("512", 512), ("4K", 4096), ("4k", 4000)])
def test_budgets(text, budget):
    found = parse_budget(text, "--budgets")
    assert found == budget
    assert type(found) is type(budget)


@pytest.mark.parametrize(("text", "error"), [("nan%", BudgetError), ("-1%", BudgetError), ("%", InputError)])
def test_wrong_budgets(text, error):
    with pytest.raises(error):
        parse_budget(text, "--budgets")

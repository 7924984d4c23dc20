"""``kvkeep analyze``: what it prints and writes, how it goes on, and every bad input as one line and exit code 2."""

import io
import json

import model_folders
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import plots
from kvkeep.cli import console, progress
from kvkeep.cli.main import app
from kvkeep.errors import pip_install
from kvkeep_lab.analysis import run as running

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 20
QUICK = ("--only", "sparsity,budgets", "--max-tokens", 80)


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text(TEXT)
    return path


def invoke(*arguments, model=None):
    where = [] if model is None else [str(model)]
    return CliRunner().invoke(app, ["analyze", *where, *map(str, arguments)], env={"COLUMNS": "160"})


def analyze(*arguments):
    result = invoke(*arguments, model=model_folders.folder())
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


def test_a_page_a_table_and_files(novel, tmp_path):
    out = tmp_path / "out"
    result = analyze("--text", novel, "-o", out, *QUICK)
    names = {path.name for path in out.iterdir()}
    assert names == {"run.json", "sparsity.json", "budgets.json", "sparsity.png", "index.html", "analysis.json"}
    found = json.loads((out / "sparsity.json").read_text())["result"]
    assert f"{found['sparsity']:.0%} on average" in result.stdout
    assert "skipped" in result.stdout
    assert "The text has 80 tokens; this needs 512." in result.stdout
    assert "kvkeep tune finds" in result.stdout
    assert "made for 40 tokens" in result.stderr
    assert str(tmp_path) not in (out / "index.html").read_text()


@pytest.mark.long
def test_the_page_is_written_after_each_measurement(novel, tmp_path, monkeypatch):
    def stop(self, subject, progress):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr("kvkeep_lab.analysis.groups.diversity.WrittenDiversity.runs", stop)
    monkeypatch.setattr("kvkeep_lab.analysis.groups.diversity.WrittenDiversity.least_tokens", 16)
    words = ("--text", novel, "-o", out, "--max-tokens", 80, "--only", "sparsity,diversity")
    result = invoke(*words, model=model_folders.folder())
    assert result.exit_code == 130 or isinstance(result.exception, KeyboardInterrupt)
    page = (out / "index.html").read_text()
    assert "This page is not finished: 1 measurement to make" in page
    assert "on average" in page
    monkeypatch.undo()
    analyze(*words)
    assert "not finished" not in (out / "index.html").read_text()


def test_json_is_one_object_with_everything(novel, tmp_path):
    found = json.loads(analyze("--text", novel, "-o", tmp_path / "out", *QUICK, "--json").stdout)
    assert found["run"]["text_name"] == "novel.txt"
    assert found["run"]["n_tokens"] == 80
    assert set(found["measurements"]) == {"sparsity", "budgets"}
    assert found["recommendation"]["command"].startswith("kvkeep tune ")
    assert found["claims"]


@pytest.mark.long
def test_the_same_command_again_measures_nothing(novel, tmp_path, monkeypatch):
    command = ("--text", novel, "-o", tmp_path / "out", *QUICK)
    first = analyze(*command)
    monkeypatch.setattr(running, "walk", None)
    assert analyze(*command).stdout == first.stdout


@pytest.mark.long
def test_more_measurements_join_the_same_page(novel, tmp_path):
    out = tmp_path / "out"
    analyze("--text", novel, "-o", out, "--only", "sparsity", "--max-tokens", 80)
    analyze("--text", novel, "-o", out, "--only", "budgets", "--max-tokens", 80)
    assert set(json.loads((out / "analysis.json").read_text())["measurements"]) == {"sparsity", "budgets"}


def test_without_matplotlib_there_are_no_pictures(novel, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    result = analyze("--text", novel, "-o", tmp_path / "out", *QUICK)
    assert pip_install("plots") in result.stderr
    assert not list((tmp_path / "out").glob("*.png"))
    assert "on average" in (tmp_path / "out" / "index.html").read_text()


def test_standard_input_is_a_text(tmp_path):
    where = [str(model_folders.folder()), "--text", "-", "-o", str(tmp_path / "out"), "--only", "sparsity", "--json"]
    result = CliRunner().invoke(app, ["analyze", *where], input=TEXT)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run"]["text_name"] == "standard input"


def test_bad_input_is_one_line(novel, tmp_path):
    out = tmp_path / "out"
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\xe9 ".encode("latin-1") * 50)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "is not UTF-8" in refused("--text", latin, "-o", out)
    assert "is empty" in refused("--text", empty, "-o", out)
    assert "cannot be read" in refused("--text", tmp_path / "none.txt", "-o", out)
    assert "no measurement 'sparse'. Known: sparsity," in refused("--text", novel, "-o", out, "--only", "sparse")
    assert "is a file" in refused("--text", novel, "-o", novel)
    assert "whole number of tokens" in refused("--text", novel, "-o", out, "--max-tokens", "many")
    assert "does not exist" in refused("--text", novel, "-o", out, model="./nowhere")
    assert not out.exists()


def test_a_text_that_is_too_short_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("the cat")
    assert "less than 16" in refused("--text", short, "-o", tmp_path / "out", model=model_folders.folder())


def test_a_folder_of_another_run_is_refused_before_weights_are_read(novel, tmp_path, monkeypatch):
    out = tmp_path / "out"
    analyze("--text", novel, "-o", out, *QUICK)
    monkeypatch.setattr("kvkeep.models.load.read_weights", None)
    other = refused("--text", novel, "-o", out, "--max-tokens", 70, model=model_folders.folder())
    assert "another run: the number of tokens was 80 and is 70 now" in other


def test_options_that_are_missing_are_named(novel, tmp_path):
    result = invoke("--output", tmp_path)
    assert result.exit_code == 2
    assert "--text" in result.stderr


def test_the_bar_of_a_terminal_names_the_stage_that_runs(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(console, "err", lambda: screen)
    with progress.staged() as on_stage:
        on_stage("reading the text", 1.0)
        shown = screen.file.getvalue()
        on_stage("budgets", 0.5)
        later = screen.file.getvalue()[len(shown) :]
    assert "reading the text" in shown
    assert "budgets" in later
    assert "reading the text" not in later


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    with pytest.raises(KeyboardInterrupt), progress.resumable():
        raise KeyboardInterrupt
    said = " ".join(capsys.readouterr().err.split())
    assert said == "note: stopped. What is finished is on the disk; run the same command again to go on."

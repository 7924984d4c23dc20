"""``kvkeep explain``: the page, the terminal, JSON, and errors in one line."""

import errno
import json
import os
import shlex

import pytest
from typer.testing import CliRunner

from kvkeep.cli.explain import ExplainOptions, as_typed
from kvkeep.cli.main import app
from kvkeep.cli.options import parse_budget
from kvkeep.errors import pip_install

TEXT = "The meadow was quiet, and the lantern by the gate was crimson. " * 6


@pytest.fixture
def kv(tmp_path, monkeypatch):
    """Runs the command in a folder with a text; the output is one text without line breaks in ``said``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text(TEXT)
    (tmp_path / "binary").write_bytes(b"\x00\xff\xfe\x80" * 9)
    (tmp_path / "zero.txt").write_bytes(b"some\0text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "folder").mkdir()

    def run(*words, width=80, stdin=None):
        env = {"COLUMNS": str(width)}
        result = CliRunner().invoke(app, ["explain", *map(str, words)], env=env, input=stdin)
        result.said = " ".join(result.output.split())
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.mark.long
def test_a_page_is_written_and_made_again_by_its_command(kv, tmp_path):
    words = ["-f", "report.txt", "-p", "What colour is it?", "--policies", "h2o:recent=8,sinks=2,local", "-n", "40"]
    done = kv(*words, "--budget", "30%", "-o", "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "kvkeep explain --text report.txt --prompt 'What colour is it?'" in page
    assert all(word in page for word in ("--policies h2o:recent=8,sinks=2,local", "--budget 30%", "--output"))
    assert "page.html" in done.output
    assert "full cache" in done.output
    assert "<|end|>" not in done.output
    assert "--overwrite to replace it" in kv(*words, "-o", "page.html").said
    assert kv(*words, "-o", "page.html", "--overwrite").exit_code == 0


@pytest.mark.slow
def test_plots_are_pictures_in_a_folder(kv, tmp_path):
    words = ["-f", "report.txt", "--policies", "local", "-b", "20", "-n", "2", "--plots", "new/pictures"]
    done = kv(*words)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "new/pictures").iterdir()) == [
        "lost.png",
        "strips.png",
        "times.png",
    ]
    assert "new/pictures/times.png" in done.said
    again = kv(*words)
    assert again.exit_code == 2
    assert "strips.png exists. Give another folder, or --overwrite" in again.said
    assert kv(*words, "--overwrite").exit_code == 0


def test_without_matplotlib_nothing_is_run(kv, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.explain.explanation.available", lambda: False)
    done = kv("-f", "report.txt", "-o", "page.html", "--plots", "pictures", width=200)
    assert done.exit_code == 2
    assert pip_install("plots") in done.said
    assert not {"page.html", "pictures"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("width", [30, 80, 120])
def test_the_terminal_shows_the_text_under_each_policy(kv, width):
    done = kv("-f", "report.txt", "--policies", "h2o,local", "-b", "40", "-n", "2", "--terminal", width=width)
    assert done.exit_code == 0, done.output
    assert all(len(line) <= width for line in done.output.splitlines())
    lines = done.output.splitlines()
    assert ("h2o" in lines[0] and "local" in lines[0]) == (width > 40)
    assert "·" in done.output
    assert "crimson" in done.said


def test_json_is_the_record_and_nothing_else(kv):
    done = kv("-f", "-", "--policies", "local", "-b", "20", "-n", "2", "--json", stdin=TEXT)
    found = json.loads(done.stdout)
    assert found["budget"] == 20
    assert found["runs"][0]["policy"] == "local"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-o page.html", "needs --text FILE"),
        ("-f report.txt", "There is no place for the page"),
        ("-f report.txt --case later -o page.html", "no question that could come later. Give one with --prompt"),
        ("-f binary -o page.html", "is not UTF-8 text: byte 1 is 0xff"),
        ("-f zero.txt -o page.html", "a binary file"),
        ("-f empty.txt -o page.html", "is empty"),
        ("-f nothing.txt -o page.html", "nothing.txt cannot be read"),
        ("-f report.txt -o folder", "is a folder"),
        ("-f report.txt -o no/page.html", "Make it first"),
        ("-f report.txt -o -", "give a name such as page.html"),
        ("-f report.txt -o /proc/page.html", "/proc"),
        ("-f report.txt -o page.html --plots report.txt", "is no folder"),
        ("-f report.txt -o page.html --plots report.txt/a/b", "is no folder"),
        ("-f report.txt -o page.html --plots /proc/pictures", "/proc"),
        ("-f report.txt -o page.html --policies h3o", "Did you mean 'h2o'?"),
        ("-f report.txt -o page.html --policies ,", "The list of policies is empty"),
        ("-f report.txt -o page.html --policies local@4", "names 4"),
        ("-f report.txt -o page.html --policies tova,topk,h2o,local,knorm,keydiff,ahakv", "up to 6"),
        ("-f report.txt -o page.html --budget 200%", "outside 0 … 100%"),
        ("-f report.txt -o page.html --budget 0", "budget"),
        ("-f report.txt -o page.html --policies h2o:recent=60 --budget 9", "at least 60"),
        ("-f report.txt -o page.html -n 99", "outside 1 … 54"),
        ("-f report.txt -o page.html --prefill-chunk 0", "--prefill-chunk"),
    ],
)
def test_mistakes_are_one_line(kv, tmp_path, line, said):
    done = kv(*line.split(), width=300)
    assert done.exit_code == 2
    assert said in done.said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "name",
    ["päge 'x' \"y\".html", "line\nbreak.html", "-o", "x" * 250 + ".html", "\u202eevil.html", "[red]x[bold].html"],
)
def test_odd_names_are_names(kv, tmp_path, name):
    words = ["-f", "report.txt", "--policies", "local", "-b", "20", "-n", "1", f"--output={name}"]
    done = kv(*words, width=400)
    assert done.exit_code == 0, done.output
    assert (tmp_path / name).read_text().startswith("<!doctype html>")
    assert not any(sign in done.output for sign in "\u202e\x1b")
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300 + ".html", "cannot be written"),
        ("report.txt/page.html", "There is no folder report.txt"),
        ("a\0b", "cannot be written"),
    ],
)
def test_names_that_no_file_can_have_are_refused_before_anything_runs(kv, monkeypatch, name, reason):
    monkeypatch.setattr("kvkeep.cli.explain_run.explain", None)
    done = kv("-f", "report.txt", f"--output={name}", width=400)
    assert done.exit_code == 2
    assert reason in done.said


def test_ctrl_c_writes_nothing(kv, tmp_path, monkeypatch):
    def pressed(*_, progress, **__):
        progress(0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeep.cli.explain_run.explain", pressed)
    before = sorted(tmp_path.iterdir())
    done = kv("-f", "report.txt", "-o", "page.html")
    assert done.exit_code == 130
    assert "no page was written" in done.said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
@pytest.mark.parametrize(("at", "written"), [("_drawn", False), ("_sum", True)])
def test_ctrl_c_says_whether_the_page_was_written(kv, tmp_path, monkeypatch, at, written):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"kvkeep.cli.explain_run.{at}", pressed)
    done = kv("-f", "report.txt", "-o", "page.html")
    assert done.exit_code == 130
    assert (tmp_path / "page.html").exists() == written
    assert ("no page was written" in done.said) != written


def test_a_full_disk_leaves_the_old_page(kv, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "page.html").write_text("old")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("kvkeep.result_files.sync", full)
    words = ["-f", "report.txt", "--policies", "local", "-b", "20", "-n", "1", "-o", "page.html", "--overwrite"]
    done = kv(*words)
    assert done.exit_code == 2
    assert "page.html cannot be written: No space left on device." in done.said
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("budget", "shown"),
    [(0.2, "20%"), (0.07 / 100, "0.07%"), (1.0, "100%"), (0.125, "12.5%"), (30, "30"), (0.1, "10%")],
)
def test_the_command_has_the_budget_as_it_was_typed(budget, shown):
    assert as_typed(budget) == shown


def test_the_line_has_every_option_that_was_given(monkeypatch):
    seen = []
    monkeypatch.setattr("kvkeep.cli.explain_run.serve", seen.append)
    monkeypatch.setattr(ExplainOptions, "check_values", lambda self: None)
    line = (
        "kvkeep explain folder --text auto --prompt auto --case later --policies h2o --budget 30% --prefill-chunk 8 "
        "--max-new-tokens 4 --dtype float32 --device cpu --load-in 8bit --threads 1 --output a.html --plots pictures "
        "--raw --allow-pickle --terminal --json"
    )
    done = CliRunner().invoke(app, line.split()[1:])
    assert done.exit_code == 0, done.output
    assert [options.line() for options in seen] == [line]


def test_a_question_that_looks_like_an_option_stays_a_question(monkeypatch):
    seen = []
    monkeypatch.setattr("kvkeep.cli.explain_run.serve", seen.append)
    monkeypatch.setattr(ExplainOptions, "check_values", lambda self: None)
    words = ["explain", "--text", "a.txt", "--prompt=--help", "--budget", "24", "--json"]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        words = shlex.split(seen[-1].line())[1:]
    assert [options.question for options in seen] == ["--help"] * 2


@pytest.mark.parametrize("typed", ["0.000000000001%", "33.333333333333%", "0.07%", "99.99%", "100%", "1e-9%"])
def test_the_budget_of_the_line_is_the_same_number(typed):
    budget = parse_budget(typed, "--budget")
    assert parse_budget(as_typed(budget), "--budget") == pytest.approx(budget, rel=1e-15)

"""Work above ten seconds says every so often what it does, also where standard error is no terminal."""

import io
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import model_folders
import pytest
from rich.console import Console

import kvkeep
from kvkeep.cli import console, generate_run, progress


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(console, "BEATS_S", (0.05, 0.05))


def beats(capsys, seconds=0.4):
    """The lines on standard error after some seconds of work."""
    time.sleep(seconds)
    return capsys.readouterr().err.splitlines()


@pytest.mark.long
def test_a_bar_without_a_terminal_is_a_line_every_so_often(capsys):
    with console.Heartbeat():
        with progress.ProgressBar("text", "bar", "percent", "left", text="reading", total=10) as bar:
            bar.show(5)
            lines = beats(capsys)
            assert len(lines) >= 2
            assert all(line.startswith("reading: 50%, about ") and line.endswith(" s left") for line in lines)
            bar.begin("writing")
            assert "writing: just begun" in beats(capsys)
        capsys.readouterr()
        assert beats(capsys) == []  # nothing is under way


def test_cells_are_counted(capsys):
    with console.Heartbeat(), progress.counted(4) as show:
        show("recall 20% h2o", 1)
        assert beats(capsys)[-1].startswith("recall 20% h2o: 1 of 4, about ")


@pytest.mark.long
def test_the_innermost_work_is_told(capsys):
    with console.Heartbeat(), console.Heartbeat.working(lambda: "outer"):
        with console.Heartbeat.working(lambda: "inner"):
            assert set(beats(capsys)) == {"inner"}
        assert "outer" in beats(capsys)


def test_nothing_is_printed_outside_of_a_command_and_after_one(capsys):
    with console.Heartbeat.working(lambda: "library"):
        assert beats(capsys, 0.15) == []
    with console.Heartbeat(), console.Heartbeat.working(lambda: "command"):
        pass
    capsys.readouterr()
    assert beats(capsys, 0.15) == []


@pytest.mark.long
def test_reading_says_how_far_it_is(capsys, monkeypatch):
    found = []

    @contextmanager
    def watched(model, on_read):
        found.append(on_read)
        yield

    monkeypatch.setattr(progress, "watched", watched)
    model, _ = kvkeep.load(model_folders.folder())
    with console.Heartbeat(), progress.reading(model, 10):
        found[0](5.0)
        assert beats(capsys)[-1].startswith("reading: 10 tokens, 50%, about ")
        found[0](7.0)  # with the chat template's tokens
        assert beats(capsys)[-1] == "reading: 10 tokens, 100%"
    with console.Heartbeat(), progress.reading(model, 0):
        assert beats(capsys)[-1].startswith("reading: ")


def test_a_bar_of_short_work_is_never_drawn(monkeypatch):
    drawn = io.StringIO()
    screen = Console(file=drawn, force_terminal=True, width=80)
    monkeypatch.setattr(console, "err", lambda: screen)
    with progress.ProgressBar("text", "bar", text="short", after_s=60):
        pass
    assert "short" not in drawn.getvalue()
    with progress.ProgressBar("text", "bar", text="long", after_s=0.01):
        time.sleep(0.3)
    assert "long" in drawn.getvalue()


def test_a_long_stage_leaves_the_time_left_whole_in_80_columns(monkeypatch):
    drawn = io.StringIO()
    screen = Console(file=drawn, force_terminal=True, width=80)
    monkeypatch.setattr(console, "err", lambda: screen)
    with progress.staged() as show:
        show("2 measurements to make, about 5 min left: where in a text a model finds facts after eviction", 0.25)
        time.sleep(0.1)
        show("2 measurements to make, about 5 min left: where in a text a model finds facts after eviction", 0.5)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    last = [line for line in re.split("[\r\n]", plain) if line.strip()][-1]
    assert last.startswith("2 measurements to make, about 5 min left")
    assert re.search(r" 50% [0-9-]:[0-9-]{2}:[0-9-]{2}", last)
    assert len(last.rstrip()) <= 80


def test_text_and_progress_are_not_mixed_in_one_file(tmp_path, monkeypatch):
    with (
        (tmp_path / "a").open("w") as one,
        (tmp_path / "b").open("w") as other,
        open(one.fileno(), "w", closefd=False) as same,
    ):
        monkeypatch.setattr(sys, "stdout", one)
        monkeypatch.setattr(sys, "stderr", other)
        assert not generate_run._is_text_seen()
        monkeypatch.setattr(sys, "stderr", same)
        assert generate_run._is_text_seen()


@pytest.mark.long
def test_a_reader_that_is_gone_ends_nothing():
    code = (
        "import time\nfrom kvkeep.cli import console\nconsole.BEATS_S = (0.05,)\n"
        "with console.Heartbeat(), console.Heartbeat.working(lambda: 'work'):\n    time.sleep(0.5)\nprint('done')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.close()
        assert process.stdout.read() == b"done\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "about 1 s left"), (75.0, "about 75 s left"), (100.0, "about 2 min left"), (6000.0, "about 1.7 h left")],
)
def test_times_are_short(seconds, said):
    assert console.show_time_left(seconds) == said

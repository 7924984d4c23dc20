"""Arguments and surroundings of somebody who is careless or means harm: one line and exit code 2, or it works."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from types import SimpleNamespace

import model_folders
import pytest
import result_folders
from typer.testing import CliRunner

from kvkeep import plots
from kvkeep.batch.output import OutputFile
from kvkeep.batch.survey import Survey
from kvkeep.cli import console, files, generate_batch, main
from kvkeep.cli.generate import GenerateOptions
from kvkeep.cli.options import parse_layer_budget
from kvkeep.errors import InputError
from kvkeep.models.load import load
from kvkeep.policies.registry import parse
from kvkeep.result_files import as_text, in_full, read_object
from kvkeep_lab.analysis import report
from kvkeep_lab.analysis.report import AnalysisFolder

NINES = "9" * 400
HOME = "~nosuchuser/x"


def invoke(*words):
    return CliRunner().invoke(main.app, [*map(str, words)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--memory", f"{NINES}GB"),
        ("plan", "--memory", f"{'9' * 20}GB"),
        ("plan", "--bandwidth", f"{NINES}GB/s"),
        ("generate", "-i", "in", "-o", "out", "--kv-memory", f"{NINES}GB"),
        ("generate", HOME, "-p", "Once"),
        ("plan", HOME),
        ("eval", "--report", HOME),
        ("generate", "-p", "Once", "--layer-budget", f"calibrated:{HOME}"),
        ("generate", "", "-p", "Once"),
        ("plan", ""),
        ("eval", "", "-o", "out"),
        ("analyze", "", "--text", "in", "-o", "out"),
        ("generate", "-i", "in", "-o", ""),
        ("eval", "-o", ""),
        ("eval", "--report", ""),
        ("analyze", "--text", "in", "-o", ""),
        ("calibrate", "", "-o", "out"),
        ("calibrate", "-o", ""),
        ("calibrate", "-o", "out", "--seed", 10**30),
        ("calibrate", "-o", "out", "--recent", 10**30),
        ("calibrate", "-o", "out", "--sinks", 10**30),
        ("calibrate", "-o", "out", "--documents", 10**30, "--text", "/dev/zero"),
        ("calibrate", HOME, "-o", "out", "--from-duo", HOME),
        ("analyze", "--text", "in", "-o", "out", "--seed", 10**30),
        ("analyze", "--text", "in", "-o", "out", "--seed", 2**31),
        ("generate", "-i", "/dev/full", "-o", "out"),
        ("generate", "-i", "/dev/zero", "-o", "out"),
        ("generate", "-p", "Once", "--layer-budget", "calibrated:/dev/zero"),
    ],
    ids=lambda words: " ".join(map(str, words))[:50],
)
def test_ends_with_exit_code_2_and_writes_nothing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "rror" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_home_folder_that_does_not_exist_is_a_name_like_any_other():
    assert str(in_full(HOME)) == HOME
    assert in_full("~") == in_full(os.path.expanduser("~"))


@pytest.mark.parametrize("content", ["[" * 100_000, "[1" + "0" * 400 + "]", "[NaN]", '"\\ud800"', "[null]", '{"a": 1}'])
def test_ratios_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "ratios").write_text(content)
    with pytest.raises(InputError, match="is no JSON list of persistence ratios"):
        parse_layer_budget(f"calibrated:{tmp_path / 'ratios'}")


@pytest.mark.parametrize("content", ["[0.5, 1.01]", '{"persistence": [-0.1]}'])
def test_ratios_out_of_range_are_refused(tmp_path, content):
    (tmp_path / "ratios").write_text(content)
    with pytest.raises(InputError, match="a persistence ratio is a share from 0 to 1"):
        parse_layer_budget(f"calibrated:{tmp_path / 'ratios'}")


def test_names_that_are_no_utf8_can_be_written_and_read_again(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    folder = AnalysisFolder(tmp_path)
    folder.write("run.json", {"model": as_text(name)})
    assert read_object(tmp_path / "run.json") == {"model": "caf\\udce9.txt"}
    assert as_text("café") == "café"


@pytest.mark.parametrize("budget", [10**30, 2**31, -1, True])
def test_a_budget_that_no_job_has_is_not_taken_from_an_output(tmp_path, budget):
    made_by = {"model": "embedded", "policy": "h2o:recent=32", "budget": budget}
    request = object.__new__(GenerateOptions)
    object.__setattr__(request, "budget", None)
    with OutputFile.open(tmp_path / "out") as output:
        output.made_by = made_by
        found = generate_batch._budget(request, parse("h2o"), Survey(), output)
    assert type(found) is int
    assert 0 <= found <= 1024


@pytest.mark.parametrize(
    ("file", "changes", "code"),
    [
        ("config.json", {"return_dict": False}, 0),
        ("config.json", {"num_labels": 10**9}, 2),
        ("generation_config.json", {"eos_token_id": 10**30}, 2),
        ("generation_config.json", {"eos_token_id": [0, -(10**30)]}, 2),
    ],
)
def test_a_model_folder_with_odd_values(tmp_path, file, changes, code):
    folder = model_folders.copy(tmp_path / "model")
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **changes}))
    with model_folders.one_thread():
        result = invoke("generate", folder, "-p", "Once", "-n", 2, "--budget", 40)
    assert result.exit_code == code, (result.output, result.exception)
    if not code:
        assert load(folder)[0].config.return_dict


@pytest.mark.parametrize("name", main._WIDTHS)
@pytest.mark.parametrize("value", ["²", "999999999", "-5", "x", "9" * 5000])
def test_sizes_that_no_terminal_has_are_dropped(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    main._forget_odd_widths()
    assert name not in os.environ
    monkeypatch.setenv(name, "120")
    main._forget_odd_widths()
    assert os.environ[name] == "120"


def no_folder(*_, **__):
    raise FileNotFoundError(2, "No usable temporary directory found")


def test_no_place_for_a_copy_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    with pytest.raises(InputError, match=r"No usable temporary directory found\. Set TMPDIR"):
        files.read_again("-", kind="input").__enter__()


def test_an_input_that_cannot_be_copied_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.shutil, "copyfileobj", full)
    with pytest.raises(
        InputError, match=r"^Standard input cannot be read, or copied to .*: No space left on device\.$"
    ):
        files.read_again("-", kind="input").__enter__()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR)  # opening a pipe waits for the other end
    try:
        with pytest.raises(InputError, match=rf"^The input {pipe} cannot be read, or copied to .*: No space left"):
            files.read_again(str(pipe), kind="input").__enter__()
    finally:
        os.close(holder)


def test_a_device_is_refused_although_standard_input_is_closed(monkeypatch):
    def closed(number):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(files, "os", SimpleNamespace(fstat=closed, devnull=os.devnull))
    with pytest.raises(InputError, match="/dev/zero is a device"):
        files.read_again("/dev/zero", kind="input").__enter__()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_text_is_not_read_from_a_device_until_memory_is_full(device):
    with pytest.raises(InputError, match=rf"^The text file {device} is a device, which may have no end"):
        files.read_text(device, kind="text file", purpose="")


def test_the_null_device_is_empty(monkeypatch):
    elsewhere = SimpleNamespace(st_rdev=0)  # standard input may be that device in tests
    monkeypatch.setattr(files, "os", SimpleNamespace(fstat=lambda number: elsewhere, devnull=os.devnull))
    with pytest.raises(InputError, match=r"^The text file /dev/null is empty\."):
        files.read_text(os.devnull, kind="text file", purpose="")


def test_standard_output_is_not_blamed_for_other_failures(monkeypatch, capsys):
    monkeypatch.setattr(main, "app", no_folder)
    monkeypatch.setattr(main, "_end_tidily", lambda: None)
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == 1
    assert "what this command needs: No usable temporary directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_process_removes_copies_first(monkeypatch, name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)
    left = []

    def work():
        with tempfile.TemporaryDirectory() as folder:
            left.append(folder)
            os.kill(os.getpid(), number)
            time.sleep(5)

    monkeypatch.setattr(main, "app", work)
    try:
        with pytest.raises(SystemExit) as stop:
            main.run()
    finally:
        signal.signal(number, before)
    assert stop.value.code == 128 + number
    assert not os.path.exists(left[0])


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        main._end_tidily()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_long_value_is_not_repeated_in_a_message(capsys):
    console.error(f"The model {'x' * 10**5} is not here. Give another.")
    said = capsys.readouterr().err
    assert len(said) < 500
    assert said.endswith("… is not here. Give another.\n".removeprefix("…")) or "Give another." in said


@pytest.mark.long
def test_tables_are_shown_where_pictures_cannot_be_written(tmp_path, monkeypatch):
    def read_only(path, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(plots, "write_whole", read_only)
    result = invoke("eval", "--report", result_folders.evaluation(tmp_path))
    assert result.exit_code == 0, result.output
    assert "12.5" in result.stdout
    assert "quality.png cannot be written: Permission denied" in " ".join(result.stderr.split())


@pytest.mark.long
def test_a_backend_that_matplotlib_does_not_know_is_no_matter():
    """In a process of its own, where matplotlib has not been imported yet."""
    import subprocess
    import sys

    script = "from kvkeep import plots; plots.check()"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "MPLBACKEND": "nonsense"}, check=True)


def test_numbers_are_not_blamed_where_nothing_can_be_drawn(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no font")

    monkeypatch.setattr("kvkeep.plots.charts.Figure", broken)
    folder = result_folders.analysis(tmp_path)
    with pytest.raises(InputError, match=r"matplotlib does not work here: no font"):
        report.write(AnalysisFolder(folder))

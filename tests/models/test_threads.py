"""The number of threads: asked for, from variables, or chosen by size and load; refusals; restored afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import model_folders
import pytest
import torch
from typer.testing import CliRunner

from kvkeep.cli import main
from kvkeep.errors import InputError
from kvkeep.models import threads

cores = threads.cores  # the tests replace it
SMALL, LARGE = threads.SMALL_BYTES, 100 * threads.SMALL_BYTES


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KVKEEP_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: seen.append(number))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    monkeypatch.setattr(threads, "_COUNTS", Path("/nothing"))
    seen.clear()


seen: list[int] = []


@pytest.mark.parametrize(
    ("size", "load", "number"),
    [(SMALL, 0.0, 1), (LARGE, 0.0, 8), (LARGE, 0.4, 8), (LARGE, 2.6, 5), (LARGE, 8.0, 4), (LARGE, 900.0, 4)],
)
def test_small_models_take_one_thread_and_others_what_is_free(size: int, load: float, number: int):
    assert threads.choose(size, 8, load) == number


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_there_is_always_a_thread_and_never_more_than_torch_would_take(most: int):
    for load in (0.0, 1.0, 1e9):
        assert 1 <= threads.choose(LARGE, most, load) <= most


def test_who_is_asked_first(monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(2, 2)
    assert threads.use(model) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.use(model) == 8
    monkeypatch.setenv("KVKEEP_THREADS", "3")
    assert threads.use(model) == 3
    assert threads.use(model, 5) == 5
    assert seen == [1, 8, 3, 5]


def test_a_model_elsewhere_keeps_torchs_choice():
    assert threads.advised(torch.nn.Linear(2, 2, device="meta")) == 8


def counted(path: Path, ticks: tuple[int, ...]) -> None:
    path.write_text(f"cpu  {' '.join(map(str, ticks))} 0 0 0\ncpu0 1 2 3\n")


@pytest.mark.parametrize(
    ("busy", "number"),
    [((0, 9000, 0), 8), ((200, 0, 0), 6), ((200, 0, 300), 4)],
    ids=["nice", "two cores", "more than half"],
)
def test_other_programs_count_since_the_start_and_the_last_minute_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy: tuple[int, int, int], number: int
):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: (50.0, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(threads, "SMALL_BYTES", 0)
    monkeypatch.setattr(threads, "_COUNTS", tmp_path / "stat")
    counted(tmp_path / "stat", (1000, 10, 20, 10**6, 0, 0, 0))
    begun = threads._busy()
    assert begun is not None
    monkeypatch.setattr(threads, "_BEGUN", begun._replace(time=begun.time - 1.0))
    counted(tmp_path / "stat", (1000 + busy[0], 10 + busy[1], 20 + busy[2], 10**6, 0, 0, 0))
    assert threads.advised(torch.nn.Linear(2, 2)) == number


def test_too_little_time_is_no_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(threads, "SMALL_BYTES", 0)
    monkeypatch.setattr(threads, "_COUNTS", tmp_path / "stat")
    counted(tmp_path / "stat", (1, 2, 3, 4, 5, 6, 7))
    monkeypatch.setattr(threads, "_BEGUN", threads._busy())
    assert threads.advised(torch.nn.Linear(2, 2)) == 5


def test_a_system_without_a_load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "getloadavg")
    monkeypatch.setattr(threads, "SMALL_BYTES", 0)
    assert threads.advised(torch.nn.Linear(2, 2)) == 8


@pytest.mark.parametrize("number", [0, -1, 9, 10**12])
def test_impossible_numbers(number: int):
    with pytest.raises(InputError, match=f"^`threads={number}` is out of range: this process may use 8"):
        threads.check(number)


@pytest.mark.parametrize("text", ["0", "9", "-3", "many", "1.5", "1e3", "9" * 5000, "²", " ", "+-5", "--5"])
def test_impossible_variables(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("KVKEEP_THREADS", text)
    with pytest.raises(InputError, match=r"^KVKEEP_THREADS="):
        threads.check(None)
    assert threads.check(2) == 2  # the option is stronger


def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    for text in ("many", "1.5", "9" * 5000):
        monkeypatch.setenv("KVKEEP_THREADS", text)
        with pytest.raises(InputError, match=r"^KVKEEP_THREADS='\S+ is not a number of threads; give 1 to 8"):
            threads.check(None)
    monkeypatch.setenv("KVKEEP_THREADS", " +5 ")
    assert threads.check(None) == 5


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVKEEP_THREADS", "")
    assert threads.check(None) is None


@pytest.mark.parametrize("command", ["generate -p hi", "eval -o out", "analyze --text x -o out", "calibrate -o out"])
def test_commands_refuse_impossible_numbers_before_they_load_anything(command: str):
    for number in (0, 9):
        result = CliRunner().invoke(main.app, [*command.split(), "--threads", str(number)])
        assert result.exit_code == 2
        assert f"--threads {number} is out of range" in " ".join(result.stderr.split())
        assert result.stdout == ""


def test_generate_uses_the_number_and_gives_torch_its_own_back():
    folder = str(model_folders.folder())
    result = CliRunner().invoke(main.app, ["generate", folder, "-p", "the quick", "-n", "2", "--threads", "3"])
    assert result.exit_code == 0, result.stderr
    assert seen == [3, 8]


def test_cores_are_those_of_the_process_or_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS and Windows have none
    assert cores() == 16
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1

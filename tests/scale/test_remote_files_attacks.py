"""Jobs with outputs elsewhere that are killed, and outputs, lines and users of a hostile kind."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import model_folders
import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow")
from pyarrow import parquet

from kvkeep.cli import files
from kvkeep.cli.main import app
from kvkeep.engine import Engine
from kvkeep.errors import InputError
from kvkeep.scale import remote_files
from kvkeep.scale.remote_files import Destination, as_parquet, is_within


@pytest.fixture(autouse=True)
def _fast(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with model_folders.one_thread():
        yield


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three four")))
    return path


def run(source, target):
    words = ["generate", str(model_folders.folder()), "-i", str(source), "-o", str(target), "-n", "3"]
    result = CliRunner().invoke(app, words)
    assert "Traceback" not in result.output
    return result


def table(*rows):
    path = Path(os.environ["XDG_DATA_HOME"]).with_name("rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parquet.read_table(io.BytesIO(as_parquet(path))).to_pylist()


# lines


def test_objects_that_become_empty_are_left_out():
    assert table({"a": {"b": {"c": {}}}, "n": 1}, {"a": {"b": {}}}) == [{"n": 1}, {"n": None}]
    assert table({"a": [{}, {"b": {}}, {"c": 0}]}) == [{"a": [None, None, {"c": 0}]}]
    assert table({"a": [{}]}, {"a": [[], None]}) == [{"a": [None]}, {"a": [[], None]}]
    assert table({"a": [[0], []], "b": "", "c": 0, "d": False}) == [{"a": [[0], []], "b": "", "c": 0, "d": False}]


@pytest.mark.parametrize("value", ["\ud800", 2**64, [1, "one"]])
def test_a_field_that_is_no_column_is_named(value):
    with pytest.raises(ValueError, match="one column cannot hold all values of the field 'odd'"):
        table({"prompt": "a", "odd": value})


def test_options_may_be_given_in_several_kinds(source, tmp_path):
    options = [{"stop": "x"}, {"stop": ["x", "y"]}]
    source.write_text("".join(json.dumps({"prompt": "a", "options": one}) + "\n" for one in options))
    assert run(source, tmp_path / "answers.parquet").exit_code == 0
    rows = parquet.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [
        json.loads(row["completion"]["options"]) for row in sorted(rows, key=lambda row: row["completion"]["line"])
    ] == (options)


# places


def test_an_output_among_the_inputs_is_refused_before_a_stop_makes_it_an_input(source, tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    source.rename(folder / "in.jsonl")
    for place in ("out.parquet", "deeper/out.jsonl"):
        for target in (folder / place, f"file://{folder}/{place}"):
            result = run(folder, target)
            assert result.exit_code == 2
            assert "Give an output elsewhere" in " ".join(result.stderr.split())
    assert run(folder, tmp_path / "inputs.parquet").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def test_what_lies_among_the_inputs(tmp_path):
    (tmp_path / "in puts").mkdir()
    (tmp_path / "link").symlink_to("in puts")
    assert is_within(f"file://{tmp_path}/in%20puts/a.jsonl", str(tmp_path / "link"))
    assert is_within(str(tmp_path / "link" / "a.PQ"), str(tmp_path / "in puts"))
    assert is_within(str(tmp_path / "x" / ".." / "in puts" / "a.pq"), str(tmp_path / "in puts"))
    assert is_within("s3://b/in/a.jsonl", "s3://b/in")
    assert not is_within("s3://b/inside/a.jsonl", "s3://b/in")
    assert not is_within("-", ".")
    assert not is_within(str(tmp_path / "in puts" / "answers"), str(tmp_path / "in puts"))  # which is not read


def test_a_users_files_beside_the_output_stay(source, tmp_path):
    beside = [tmp_path / f"answers.jsonl{ending}" for ending in (".part", ".check", ".collected", ".bad")]
    for path in beside:
        path.write_text("mine")
    assert run(source, f"file://{tmp_path}/answers.jsonl").exit_code == 0
    assert [path.read_text() for path in beside] == ["mine"] * len(beside)


def test_a_user_without_a_home_is_told(source, tmp_path, monkeypatch):
    def none(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", none)
    if sys.platform not in ("win32", "darwin"):
        assert files.data_folder() == tmp_path / "data"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    with pytest.raises(InputError, match="Set HOME"):
        files.data_folder()


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the data folder does not follow XDG_DATA_HOME there")
def test_a_data_folder_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "data").write_text("a file")
    result = run(source, f"file://{tmp_path}/answers.jsonl")
    assert result.exit_code == 2
    assert f"needs the folder {tmp_path}/data/kvkeep/jobs" in result.stderr


# stops


def test_a_job_whose_lines_have_all_failed_publishes_nothing_and_runs_again(source, tmp_path, monkeypatch):
    target = tmp_path / "answers.parquet"

    def refuse(self, request):
        raise InputError("no.")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add", refuse)
        assert run(source, target).exit_code == 1
    assert not target.exists()
    assert run(source, target).exit_code == 0
    assert len(parquet.read_table(target)) == 2


def test_an_output_that_is_read_by_half_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n")

    def full(source, file):
        if not isinstance(source, io.BytesIO):
            file.write(b"{")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_files.shutil, "copyfileobj", full)
    with (
        pytest.raises(InputError, match=r"cannot be read, or copied to .*home.*No space left"),
        Destination(f"file://{tmp_path}/a.jsonl", tmp_path / "home").held(),
    ):
        pass
    assert not list((tmp_path / "home").iterdir())


def test_a_power_cut_finds_an_output_on_the_disk_before_the_local_file_goes(tmp_path, monkeypatch):
    done, target = [], tmp_path / "a.parquet"
    for name in ("sync", "sync_folder"):
        monkeypatch.setattr(remote_files, name, lambda one, name=name: done.append((name, target.exists())))
    found = Destination(str(target), tmp_path)
    with found.held():
        found.path.write_text('{"n": 1}\n')
        done.clear()
        found.publish(complete=True)
        assert done == [("sync", False), ("sync_folder", True)]
        assert found.path.exists()
    assert not found.path.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_kill_at_any_operation_loses_nothing_and_the_next_run_leaves_nothing(tmp_path, ending):
    """The process is killed before each operation on a file in turn, until a run gets to its end."""
    home = tmp_path / "home"
    for nth in range(100):
        place = tmp_path / f"bucket{nth}" / f"a.{ending}"
        place.parent.mkdir()
        target = f"file://{place}" if ending == "jsonl" else str(place)
        if ending == "jsonl":
            place.write_text(LINES[0])
        ended = killed_before(nth, lambda target=target: job(target, home))
        whole = place.exists() and numbers(place) == [0, 1, 2]
        with suppress(InputError) if whole else nullcontext():  # a table that is finished
            job(target, home)
        assert numbers(place) == [0, 1, 2]
        assert os.listdir(place.parent) == [place.name]
        assert not list(home.glob("*"))
        if not ended:
            assert nth > 10
            return
        assert ended == -signal.SIGKILL
    raise AssertionError("no run gets to its end")


LINES = [json.dumps({"n": n}) + "\n" for n in range(3)]


def job(target, home):
    """A job that goes on from what is there, and publishes it."""
    found = Destination(target, home)
    found._system = Watched(found._system)
    with found.held():
        with found.path.open("ab") as file:
            for line in LINES[len(found.path.read_text().splitlines()) :]:
                file.write(line.encode())
        found.publish(complete=True)


def numbers(place):
    if place.suffix == ".parquet":
        return [row["n"] for row in parquet.read_table(place).to_pylist()]
    return [json.loads(line)["n"] for line in place.read_text().splitlines()]


def killed_before(nth, work):
    """The exit code of a process that does some work, and is killed before its nth operation on a file."""
    if not (child := os.fork()):
        signal.alarm(30)
        operations = itertools.count()

        def look(event, arguments):
            if event in AUDITED and next(operations) == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


AUDITED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "remote")


class Watched:
    """A file system whose operations are events as Python's own are."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        sys.audit("remote", name)
        return getattr(self._real, name)


def test_two_spellings_of_an_address_have_one_local_folder(tmp_path):
    (tmp_path / "there").symlink_to(tmp_path)
    spellings = ("a.jsonl", "b/../a.jsonl", "./a.jsonl", "there/a.jsonl")
    (tmp_path / "b").mkdir()
    found = {Destination(f"file://{tmp_path}/{one}", tmp_path / "home").path for one in spellings}
    assert len(found) == 1
    assert Destination(f"file://{tmp_path}/c.jsonl", tmp_path / "home").path not in found

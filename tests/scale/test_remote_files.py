"""Outputs that are no local JSONL file. An address of a local folder stands for a remote one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import model_folders
import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow")
from pyarrow import parquet

from kvkeep.batch.output import OutputFile
from kvkeep.cli.main import app
from kvkeep.errors import InputError, ModelFileError
from kvkeep.scale import remote_files
from kvkeep.scale.remote_files import Destination, as_parquet, is_foreign_output

PROMPTS = ["the quick brown fox", "over the lazy dog", "and the cat"]


@pytest.fixture(autouse=True)
def _fast(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with model_folders.one_thread():
        yield


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "tag": i}) + "\n" for i, text in enumerate(PROMPTS)))
    return path


@pytest.fixture
def bucket(tmp_path):
    path = tmp_path / "bucket"
    path.mkdir()
    return path


def run(source, target, *more):
    words = ["generate", str(model_folders.folder()), "-i", str(source), "-o", str(target), "-n", "3", *more]
    return CliRunner().invoke(app, words)


def done(source, target, *more):
    result = run(source, target, *more)
    assert result.exit_code == 0, result.output
    return result


def flat(text):
    """A text without spaces and breaks, since long lines are wrapped."""
    return "".join(text.split())


def refused(source, target, *words):
    result = run(source, target)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    said = result.stderr.partition("error: ")[2]
    assert said
    assert not [word for word in words if flat(word) not in flat(said)], said
    return said


def collected(tmp_path):
    return list((tmp_path / "data" / "kvkeep" / "jobs").iterdir())


def texts(path):
    return sorted((row["tag"], row["completion"]["text"]) for row in map(json.loads, path.read_text().splitlines()))


@pytest.fixture
def plain(source, tmp_path):
    """What a job writes to a local file."""
    done(source, tmp_path / "plain.jsonl")
    return texts(tmp_path / "plain.jsonl")


def test_completions_go_to_an_address_whole_and_nothing_else_stays(source, plain, bucket, tmp_path):
    target = f"file://{bucket}/answers.jsonl"
    said = done(source, target).stderr
    assert flat(f"completions are in {target}") in flat(said)
    assert texts(bucket / "answers.jsonl") == plain
    assert os.listdir(bucket) == ["answers.jsonl"]
    assert collected(tmp_path) == []


def test_a_published_job_is_taken_up_and_goes_on(source, plain, bucket, tmp_path):
    target = f"file://{bucket}/answers.jsonl"
    done(source, target)
    whole = (bucket / "answers.jsonl").read_bytes()
    (bucket / "answers.jsonl").write_bytes(whole[: whole.index(b"\n") + 1])
    assert "1 of 3 lines were done before" in done(source, target).stderr
    assert texts(bucket / "answers.jsonl") == plain
    source.write_text('{"prompt": "another"}\n')
    refused(source, target, "Give another output file")
    assert texts(bucket / "answers.jsonl") == plain
    assert collected(tmp_path) == []


def test_what_is_no_output_of_a_job_is_left_alone_and_forgotten(source, plain, bucket, tmp_path):
    target = f"file://{bucket}/answers.jsonl"
    (bucket / "answers.jsonl").write_bytes(source.read_bytes())
    refused(source, target, "another output")
    assert (bucket / "answers.jsonl").read_bytes() == source.read_bytes()
    (bucket / "answers.jsonl").unlink()
    done(source, target)
    assert texts(bucket / "answers.jsonl") == plain


def test_a_table_has_a_row_for_each_line(source, plain, tmp_path):
    target = tmp_path / "answers.parquet"
    done(source, target)
    rows = parquet.read_table(target).to_pylist()
    assert sorted((row["tag"], row["completion"]["text"]) for row in rows) == plain
    assert not [name for name in os.listdir(tmp_path) if "answers.parquet" in name and name != "answers.parquet"]
    refused(source, target, "exists", "another name")
    assert len(parquet.read_table(target).to_pylist()) == 3


@pytest.mark.parametrize("operation", ["move", "open_output_stream"])
def test_completions_stay_when_they_cannot_be_published(source, plain, bucket, tmp_path, monkeypatch, operation):
    target = f"file://{bucket}/answers.jsonl"
    real = Destination.publish
    with monkeypatch.context() as patch:
        patch.setattr(
            Destination, "publish", lambda self, **more: (broken_system(self, operation), real(self, **more))[1]
        )
        refused(source, target, "the network is gone", str(collected_path(target)), "writes them again")
    assert not (bucket / "answers.jsonl").exists()
    assert texts(collected_path(target)) == plain
    result = done(source, target)
    assert "3 of 3 lines were done before" in result.stderr
    assert texts(bucket / "answers.jsonl") == plain
    assert collected(tmp_path) == []
    assert os.listdir(bucket) == ["answers.jsonl"]


def broken_system(destination, operation):
    """Let an operation of a destination's file system fail from now on."""

    def fail(*arguments):
        raise OSError("the network is gone")

    class Broken:
        def __getattr__(self, name, real=destination._system):
            return fail if name == operation else getattr(real, name)

    destination._system = Broken()


def collected_path(target):
    return Destination(target, Path(os.environ["XDG_DATA_HOME"]) / "kvkeep" / "jobs").path


def test_a_job_that_ends_early_publishes_nothing_and_goes_on(source, plain, bucket, tmp_path, monkeypatch):
    target = f"file://{bucket}/answers.jsonl"
    put = OutputFile.put

    def full(self, number, *rest):
        if self.done:
            raise InputError("The disk is full.")
        put(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "put", full)
        refused(source, target, "The disk is full")
    assert os.listdir(bucket) == []
    assert len(collected(tmp_path)) == 1
    assert "1 of 3 lines were done before" in done(source, target).stderr
    assert texts(bucket / "answers.jsonl") == plain


def test_lines_that_cannot_be_run_are_set_aside_beside_the_collected_ones(source, plain, bucket, tmp_path):
    with source.open("a") as file:
        file.write("no json\n")
    target = f"file://{bucket}/answers.jsonl"
    result = run(source, target, "--skip-bad")
    assert result.exit_code == 0, result.output
    assert texts(bucket / "answers.jsonl") == plain
    ((aside,),) = [list(folder.iterdir()) for folder in collected(tmp_path)]
    assert str(aside) in flat(result.stderr)
    assert aside.name.endswith(".bad")


def test_what_cannot_be_written_is_refused_before_anything_runs(source, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.generate_batch.find", None)  # nobody gets as far as the model
    (bucket / "folder.jsonl").mkdir()
    for target, word in (
        ("ftq://a/b.jsonl", "cannot be written"),
        ("s3://", "names no file"),
        (f"file://{bucket}/folder.jsonl", "is a folder"),
        (f"file://{bucket}/no/such/a.jsonl", "cannot be written"),
        (tmp_path / "no" / "a.parquet" / "b.parquet", "cannot be written"),
        ("file:///", ""),
    ):
        refused(source, target, word)
    assert os.listdir(bucket) == ["folder.jsonl"]


def test_values_of_several_kinds_are_no_table_and_are_kept(source, tmp_path):
    source.write_text('{"prompt": "a", "tag": 1}\n{"prompt": "b", "tag": "one"}\n')
    refused(
        source,
        tmp_path / "a.parquet",
        "is no table",
        "the field 'tag'",
        "a.parquet.collected/completions.jsonl, as JSONL",
    )
    assert len((tmp_path / "a.parquet.collected" / "completions.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "a.parquet").exists()


def test_tables_hold_what_lines_hold(tmp_path):
    rows = [
        {"a": 1, "b": {}, "c": [{"d": None, "e": {"f": "ü"}}], "day": "2024-01-01", "at": "2024-01-01T10:00:00Z"},
        {"a": None, "g": [1.5], "day": "2024-01-02"},
        {"a": 3, "c": []},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.parquet").write_bytes(as_parquet(tmp_path / "a.jsonl"))
    found = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["a"] for row in found] == [1, None, 3]
    assert found[0]["c"] == [{"d": None, "e": {"f": "ü"}}]
    assert [row["day"] for row in found] == ["2024-01-01", "2024-01-02", None]  # texts, not dates
    assert found[0]["at"] == "2024-01-01T10:00:00Z"
    assert found[1]["g"] == [1.5]
    assert "b" not in found[0]


def test_two_jobs_for_one_output_are_not_mixed_and_the_second_disturbs_nothing(source, plain, bucket, tmp_path):
    target = f"file://{bucket}/answers.jsonl"
    first = Destination(target, tmp_path / "data" / "kvkeep" / "jobs")
    with first.held():
        first.path.touch()
        refused(source, target, "Another run is writing")
        assert first.path.exists()
        first.path.write_text("{}\n")
        refused(source, target, "Another run is writing")
        assert first.path.read_text() == "{}\n"
        first.path.unlink()
    done(source, target)
    assert texts(bucket / "answers.jsonl") == plain


def test_a_folder_that_goes_away_while_it_is_locked_is_made_again(bucket, tmp_path, monkeypatch):
    """The job before removes it at its end."""
    target, real, times = Destination(f"file://{bucket}/a.jsonl", tmp_path), remote_files.Lock, iter([1, 2, 3])

    def lock(folder, name):
        nth = next(times)
        if nth == 1:
            folder.rmdir()
        found = real(folder, name)
        if nth == 2:
            folder.rmdir()
        return found

    monkeypatch.setattr(remote_files, "Lock", lock)
    with target.held():
        assert target.path.parent.is_dir()
    assert next(times, None) is None
    assert not target.path.parent.exists()


@pytest.mark.parametrize(
    "error", [ModelFileError("There is no model."), OSError(28, "No space left on device")], ids=str
)
def test_errors_while_an_input_is_in_use_are_not_those_of_its_copy(error, source):
    with pytest.raises(type(error)) as found, remote_files.as_lines(f"file://{source}"):
        raise error
    assert found.value is error


def test_a_copy_of_an_input_needs_a_folder(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(InputError, match="There is no folder for a copy"), remote_files.as_lines(f"file://{source}"):
        pass


def test_which_outputs_are_foreign():
    assert all(map(is_foreign_output, ("s3://a/b", "file:///a.jsonl", "a.parquet", "A.PQ")))
    assert not any(map(is_foreign_output, ("a.jsonl", "-", "/dev/null", "parquet")))

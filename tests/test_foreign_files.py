"""Files that are somebody else's, where evaluations and analyses would write theirs: refused, and left as they are."""

import json
import os

import model_folders
import pytest
import result_folders
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.errors import InputError
from kvkeep.evals.curves import PICTURES
from kvkeep.evals.records import Records
from kvkeep.result_files import Lock
from kvkeep_lab.analysis.report import AnalysisFolder

MINE = b'{"mine": "precious"}'
OF_EVALS = {
    "results.jsonl": (MINE, b"", b"{", b'{"task": "mine"}\n', b"\0\0binary"),
    **dict.fromkeys(PICTURES, (b"photo",)),
}
RUNS = (
    {"tasks": {}, "mine": 1},
    {"tasks": {}, "model": "m", "weights": "abc", "mine": 1},
    {"kind": "kvkeep analyze", "model": "m", "weights": "abc", "dtype": "float32"},
)


def begin(folder, manifest=result_folders.RUN):
    records = Records(folder)
    with records.locked():
        records.open(manifest)


def untouched(folder, name, content, start):
    """See that a run is refused which would overwrite a file."""
    (folder / name).write_bytes(content)
    with pytest.raises(InputError):
        start()
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(name, content)]


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, all_ in OF_EVALS.items() for one in all_])
def test_an_evaluation_overwrites_nothing_where_no_run_json_is(tmp_path, name, content):
    untouched(tmp_path, name, content, lambda: begin(tmp_path))


@pytest.mark.parametrize("name", ["index.html", "analysis.json", "sparsity.json", "sparsity.png", "budgets.png"])
def test_an_analysis_overwrites_nothing_where_no_run_json_is(tmp_path, name):
    untouched(tmp_path, name, b"my page", lambda: AnalysisFolder(tmp_path).open(result_folders.FINISHED["run.json"]))


@pytest.mark.parametrize("content", RUNS, ids=str)
def test_a_run_json_of_something_else_is_not_overwritten(tmp_path, content):
    untouched(tmp_path, "run.json", json.dumps(content).encode(), lambda: begin(tmp_path))


@pytest.mark.parametrize("torn", [b"", b"{", b'{"task": "perpl', b'{"task": "perpl\0\0', b"\0\0\0"])
def test_a_folder_of_a_run_that_was_killed_at_once_is_gone_on_with(tmp_path, torn):
    begin(tmp_path)
    (tmp_path / "results.jsonl").write_bytes(torn)
    begin(tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == b""


@pytest.mark.parametrize("torn", [MINE, b'{"mine', b"\0text"])
def test_a_last_line_that_no_evaluation_began_is_not_cut_off(tmp_path, torn):
    begin(tmp_path)
    (tmp_path / "results.jsonl").write_bytes(torn)
    with pytest.raises(InputError, match="Line 1 of"):
        begin(tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == torn


@pytest.mark.parametrize(
    "start",
    [begin, lambda folder: AnalysisFolder(folder).open(result_folders.FINISHED["run.json"])],
    ids=["evaluation", "analysis"],
)
def test_what_a_killed_run_left_beside_its_run_json_keeps_nobody_out(tmp_path, start):
    (tmp_path / ".run.json.abcd1234.new").write_bytes(b"{")
    os.utime(tmp_path / ".run.json.abcd1234.new", (0, 0))
    with AnalysisFolder(tmp_path).locked():
        pass
    start(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_evaluation_and_a_batch_job_do_not_write_to_the_same_file(tmp_path):
    begin(tmp_path)
    path = tmp_path / "results.jsonl"
    with path.open("ab") as file:
        Lock(file, "a job's output")
        with pytest.raises(InputError, match=r"Another run is writing to .*results\.jsonl"):
            begin(tmp_path)
    records = Records(tmp_path)
    with records.locked(), path.open("ab") as file:
        records.open(result_folders.RUN)
        with pytest.raises(InputError, match="Another run is writing to my output"):
            Lock(file, "my output")
    with path.open("ab") as file:
        Lock(file, "my output")


def test_the_command_refuses_before_it_reads_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.eval_run.read_weights", None)
    (tmp_path / "results.jsonl").write_bytes(MINE)
    words = ["eval", str(model_folders.folder()), "--tasks", "perplexity", "--limit", "2", "--window", "40"]
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert (tmp_path / "results.jsonl").read_bytes() == MINE

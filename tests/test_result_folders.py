"""A folder of results: one writer, another run told from the same one, rows with a torn end, and what is said."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from kvkeep.errors import InputError
from kvkeep.result_files import Results, check_same, command, read_rows

BEGINNING = b'{"a": '
NAMES = {"model": "the model", "seed": "the seed"}


def no_fault(row):
    return None if "a" in row else "it has no 'a'"


@pytest.mark.parametrize("torn", [b"", b"{", b'{"a": 1', b'{"a": 1}', b'{"a": 1, "b"}\n', b"\0\0\0", b"\0\0\n"])
def test_a_torn_last_line_is_no_row(tmp_path, torn):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\r\n' + torn)
    assert read_rows(path, BEGINNING, no_fault) == (19, [{"a": 1}, {"a": 2}])


@pytest.mark.parametrize(
    "wrong",
    [
        b"x",
        b"[1]\n",
        b'{"mine": 1}',
        b'{"mine"',
        b"\0\0text",
        b"\n",
        b'{"b": 1}\n',
        b'{"a": NaN}\n',
        b'{"a":' * 200 + b"1" + b"}" * 200 + b"\n",
        b"\xff",
    ],
)
def test_a_last_line_that_no_run_began_is_refused(tmp_path, wrong):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}\n' + wrong)
    with pytest.raises(InputError, match=rf"Line 2 of {path} is no row of results: .*remove that line"):
        read_rows(path, BEGINNING, no_fault)


def test_a_torn_line_is_refused_where_others_follow(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": \n{"a": 2}\n')
    with pytest.raises(InputError, match="Line 1 of"):
        read_rows(path, BEGINNING, no_fault)


def test_the_same_run_is_told_from_another(tmp_path):
    found = {"model": "m", "seed": 0, "more": 1}
    check_same(tmp_path, found, {"model": "m", "other": 2}, NAMES)
    with pytest.raises(
        InputError, match=r"another run: the model was m and is n now. .*choose another `output` folder"
    ):
        check_same(tmp_path, found, {"model": "n"}, NAMES)
    with pytest.raises(InputError, match="the seed was '0' and is 0 now"):
        check_same(tmp_path, {"seed": "0"}, {"seed": 0}, NAMES)
    with pytest.raises(InputError, match="the seed was 'unknown' and is 0 now"):
        check_same(tmp_path, {}, {"seed": 0}, NAMES)
    with pytest.raises(InputError) as error:
        check_same(tmp_path, {"model": ["m"] * 10**5}, {"model": "n"}, NAMES)
    assert len(str(error.value)) < 1000


def test_one_run_at_a_time_and_none_after_it_ended(tmp_path):
    one, other = Results(tmp_path / "out"), Results(tmp_path / "out")
    other.check_free()  # there is no folder yet
    assert not (tmp_path / "out").exists()
    with one.locked(), one.locked():
        for refused in (other.check_free, other.locked().__enter__):
            with pytest.raises(InputError, match="Another run is writing to"):
                refused()
    other.check_free()
    with other.locked():
        assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_run_keeps_nobody_out(tmp_path):
    code = f"""
import os, pathlib
from kvkeep.result_files import Results
with Results(pathlib.Path({str(tmp_path)!r})).locked():
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with Results(tmp_path).locked():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_what_is_no_folder_is_refused(tmp_path, make):
    make(tmp_path / "out")
    with pytest.raises(InputError, match="needs a folder"):
        Results(tmp_path / "out")


def test_a_name_that_no_file_system_takes(tmp_path):
    with pytest.raises(InputError, match="File name too long"):
        Results(tmp_path / ("a" * 300))


def test_a_folder_that_vanished_is_a_clear_error(tmp_path):
    folder = Results(tmp_path / "out")
    with folder.locked():
        (tmp_path / "out").rmdir()
        with pytest.raises(InputError, match=re.escape(f"cannot be written to {tmp_path / 'out'}: No such file")):
            folder.write_bytes("a", b"")


def test_a_command_is_quoted_for_the_shell():
    arguments = ["plain", "two words", "$(id)", "it's", 20]
    assert shlex.split(command("kvkeep eval", *arguments)) == ["kvkeep", "eval", *map(str, arguments)]
    assert command("kvkeep eval --output", "results") == "kvkeep eval --output results"


def test_rows_are_json(tmp_path):
    path = tmp_path / "rows"
    path.write_text(json.dumps({"a": [1.5, None, "é"]}) + "\n", encoding="utf-8")
    assert read_rows(path, BEGINNING, no_fault)[1] == [{"a": [1.5, None, "é"]}]
    assert read_rows(tmp_path / "none", BEGINNING, no_fault) == (0, [])


def test_what_a_killed_run_left_beside_its_files_is_removed_and_nothing_else(tmp_path):
    others = (".run.json.new", ".mine.abcd1234.new", ".run.json.abcd.new", "run.json.abcd1234.new", "notes")
    for name in (".run.json.ab_d1234.new", *others):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".run.json.00000000.new").symlink_to("notes")
    (tmp_path / ".run.json.11111111.new").touch()
    os.utime(tmp_path / ".run.json.11111111.new", (2**32, 2**32))  # of somebody who is writing now
    with Results(tmp_path).locked():
        left = {path.name for path in tmp_path.iterdir()}
    assert left - {".run.json.00000000.new"} == {*others, ".run.json.11111111.new"}

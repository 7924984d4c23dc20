import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from kvkeep.errors import InputError
from kvkeep.result_files import (
    Lock,
    finite,
    parse,
    read_object,
    read_whole,
    real_number,
    tuple_of,
    whole_number,
    write_whole,
)


def test_one_writer_at_a_time(tmp_path):
    with Lock(tmp_path, "results"), pytest.raises(InputError, match="Another run is writing to results"):
        Lock(tmp_path, "results")
    Lock(tmp_path, "results").release()


def test_a_file_is_free_again_when_it_is_closed(tmp_path):
    path = tmp_path / "out"
    with path.open("ab") as one, path.open("ab") as other:
        Lock(one, "out")
        with pytest.raises(InputError):
            Lock(other, "out")
    with path.open("ab") as later:
        Lock(later, "out")


def test_file_systems_without_locks_keep_nobody_out(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for lock in [Lock(tmp_path, "results"), Lock(tmp_path, "results")]:
        lock.release()


def test_a_killed_writer_holds_nothing(tmp_path):
    code = f"""
import os, pathlib
from kvkeep.result_files import Lock
lock = Lock(pathlib.Path({str(tmp_path)!r}), "results")
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    Lock(tmp_path, "results").release()


def test_a_link_beside_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".index.html.new").symlink_to(victim)
    write_whole(tmp_path / "index.html", b"page")
    assert victim.read_text() == "precious"
    assert (tmp_path / "index.html").read_bytes() == b"page"


def test_what_is_written_can_be_read_by_others_as_usual(tmp_path):
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


@pytest.mark.whole
@pytest.mark.parametrize("content", [b"\xff", b"[", b"[]", b"1", b"", b"[" * 100_000, b"1" * 10_000])
def test_a_file_that_holds_no_object_is_refused(tmp_path, content):
    path = tmp_path / "run.json"
    assert read_object(path) is None
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"run\.json"):
        read_object(path)


@pytest.mark.parametrize(
    "content", ["NaN", "-Infinity", "1e999", "1" * 30, '"\\ud800"', '{"\\udfff": 1}', "[" * 100 + "]" * 100, "{} {}"]
)
def test_a_value_that_could_not_be_written_again_is_not_read(content):
    with pytest.raises(ValueError, match=r"\w"):
        parse(b'{"a": [' + content.encode() + b"]}")


def test_plain_values_are_read():
    value = {"a": [1, -2.5, None, True, "é\u202e", {"b": []}], "c": 2**63}
    assert parse(json.dumps(value).encode()) == parse(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "is a folder, where"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nothing, where"),
        (os.mkfifo, "is no file, where"),
    ],
)
def test_what_is_no_file_is_not_read(tmp_path, make, words):
    make(tmp_path / "run.json")
    with pytest.raises(InputError, match=words):
        read_whole(tmp_path / "run.json")


def test_numbers_that_json_cannot_hold_become_null():
    found = finite({1: [float("nan"), (float("inf"), 2.0)], "b": {"c": -float("inf")}})
    assert json.dumps(found, allow_nan=False) == '{"1": [null, [null, 2.0]], "b": {"c": null}}'


def test_kinds_of_values():
    share = real_number(0, 1)
    assert [share.fits(value) for value in (0, 1, 0.5, True, "0.5", -0.1, 2, float("nan"))] == [True] * 3 + [False] * 5
    pair = tuple_of(whole_number(), share)
    assert pair.name == "a list of a whole number, a number"
    values = ([3, 0.5], [3, 5], [3], [3, 0.5, 1], "ab", {3: 0.5})
    assert [pair.fits(value) for value in values] == [True] + [False] * 5

"""The line editor of ``kvkeep chat``: pastes, messages of several lines, keys, and the file of earlier messages."""

import os
import pty
import stat
import sys
import termios

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvkeep.cli import chat_input
from kvkeep.cli.chat_input import TypedMessages, history_file

ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D, BACKSPACE = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04", "\x7f"
LONG = "\n".join(f"line {number}" for number in range(24))


def paste(text):
    return f"\x1b[200~{text}\x1b[201~"


def read(*keys, history=None, messages=1):
    """The messages that a user has typed with these keys."""
    with create_pipe_input() as pipe:
        typed = TypedMessages(history, keys=pipe, screen=DummyOutput())
        pipe.send_text("".join(keys))
        found = [typed.read() for _ in range(messages)]
    return found[0] if messages == 1 else found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["hello", ENTER], "hello"),
        ([ENTER], ""),
        (["one", ALT_ENTER, "two", ENTER], "one\ntwo"),
        (['"""', ENTER, "one", ENTER, ENTER, "two", ENTER, '"""', ENTER], "one\n\ntwo"),
        (['"""', ENTER, '"""', ENTER], ""),
        (['say """', ENTER], 'say """'),
        (['"""hi"""', ENTER], '"""hi"""'),
        ([paste("a\r\nb\rc\nd"), ENTER], "a\nb\nc\nd"),
        ([paste(LONG), ENTER], LONG),
        (["see ", paste(LONG), " and ", paste("x" * 500), ENTER], f"see {LONG} and {'x' * 500}"),
        ([paste(LONG), BACKSPACE, "short", ENTER], "short"),
        (["gone", CTRL_C, "kept", ENTER], "kept"),
        ([paste(LONG), CTRL_C, "kept", ENTER], "kept"),
        (["日本語 👩‍🔬", ENTER], "日本語 👩‍🔬"),
        ([CTRL_D], None),
        (["no end", CTRL_D, ENTER], "no end"),
    ],
)
def test_keys_make_one_message(keys, message):
    assert read(*keys) == message


def test_lines_that_are_typed_ahead_are_messages_in_order():
    assert read("one", ENTER, "two", ENTER, messages=2) == ["one", "two"]


def test_ctrl_c_on_an_empty_line_says_how_to_end(capsys):
    assert read(CTRL_C) == ""
    assert "Ctrl-D or /quit ends" in capsys.readouterr().err


def test_half_a_character_is_not_sent(capsys):
    with create_pipe_input() as pipe:
        typed = TypedMessages(None, keys=pipe, screen=DummyOutput())
        pipe.send_bytes(b"\xff\xfe\r")
        assert typed.read() == ""
    assert "not UTF-8 text; it was not sent" in capsys.readouterr().err


def test_a_long_paste_is_shown_as_a_label():
    pastes = chat_input._FoldedPastes()
    assert pastes.folded("a\nb") == "a\nb"
    assert pastes.label(pastes.folded(f"{LONG}\n")) == "[pasted: 24 lines]"
    assert pastes.label(pastes.folded("x" * 500)) == "[pasted: 500 characters]"
    assert pastes.label("x") == "x"


# ------------------------------------------------------------------ earlier messages


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / "cache" / "kvkeep" / "chat_history"


def test_earlier_messages_come_back_in_full(file):
    assert history_file() == file
    read("see ", paste(LONG), ENTER, "two", ENTER, history=file, messages=2)
    assert read(UP, UP, ENTER, history=file) == f"see {LONG}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_file_is_taken_from_others_and_stays_small(file):
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"\n# date\n+message {number}\n" for number in range(60000)))
    file.chmod(0o644)
    assert history_file() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size < chat_input._MOST_HISTORY_BYTES
    assert read(UP, ENTER, history=file) == "message 59999"


@pytest.mark.parametrize("obstacle", ["folder", "pipe", "file in place of the folder", "no home"])
def test_a_chat_goes_without_a_file_where_there_can_be_none(obstacle, file, monkeypatch):
    if obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("pathlib.Path.expanduser", lambda path: (_ for _ in ()).throw(RuntimeError))
    elif obstacle == "file in place of the folder":
        file.parents[1].write_text("")
    else:
        file.parent.mkdir(parents=True)
        file.mkdir() if obstacle == "folder" else os.mkfifo(file)
    assert history_file() is None
    with create_pipe_input() as pipe:
        typed = TypedMessages(None, keys=pipe, screen=DummyOutput())
        for keys in (f"one{ENTER}", f"{UP}{ENTER}"):
            pipe.send_text(keys)
            assert typed.read() == "one"


def test_a_file_that_has_gone_or_is_broken_harms_nothing(file):
    history_file()
    file.write_bytes(b"\xff\x00\n+\xfe\n# \n+two")
    assert read("one", ENTER, history=file) == "one"
    assert read(UP, ENTER, history=file) == "one"
    assert read("two", ENTER, history=file.parent / "none" / "x") == "two"


# ------------------------------------------------------------------ keys during an answer


class Recorder(DummyOutput):
    """Notes whether the terminal marks pastes."""

    marks = False

    def enable_bracketed_paste(self):
        self.marks = True

    def disable_bracketed_paste(self):
        self.marks = False


def test_keys_are_neither_shown_nor_lost_during_an_answer(monkeypatch):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "r") as terminal, create_pipe_input() as pipe:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(follower)
        typed = TypedMessages(None, keys=pipe, screen=(screen := Recorder()))
        with typed.keys_held_back():
            pipe.send_text("hello\r")
            assert typed.read() == "hello"
            assert screen.marks
            os.write(leader, b"next\r")
            assert os.read(follower, 100) == b"next\r"  # as prompt_toolkit reads it
        assert termios.tcgetattr(follower) == before
        assert not screen.marks
        os.set_blocking(leader, False)
        with pytest.raises(BlockingIOError):
            os.read(leader, 100)  # no echo
    os.close(leader)

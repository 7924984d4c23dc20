"""``kvkeep chat`` on a terminal: Ctrl-C stops an answer, a paste is one message, keys wait for an answer's end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import model_folders
import pytest

import kvkeep

LONG, SHORT = "20000", "3"
STEERING = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")
"""What tells a terminal where to write."""
PROMPT = "> "


class Terminal:
    """A chat on a terminal of 80 columns."""

    def __init__(self, model, folder, *words):
        self._leader, follower = pty.openpty()
        env = {**os.environ, "KVKEEP_SESSIONS": str(folder), "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path), "KVKEEP_BACKEND": "torch"}
        env |= {"XDG_CACHE_HOME": str(folder.parent / "cache")}
        command = [sys.executable, "-m", "kvkeep", "chat", str(model), *words]
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would stay ignored
        )
        os.close(follower)
        self.said = self._rest = ""

    def see(self, text, timeout_s=120):
        """Read until a text is there, and return what was read with it."""
        end, before = time.monotonic() + timeout_s, ""
        while text not in self.said:
            assert time.monotonic() < end, (text, self.said)
            if select.select([self._leader], [], [], 1.0)[0]:
                self._take(os.read(self._leader, 4096).decode(errors="replace"))
        before, _, self.said = self.said.partition(text)
        return before + text

    def _take(self, text):
        """Add what was read, as it looks. The prompt is written in two parts."""
        text = self._rest + text
        end = text.rfind("\x1b")
        end = len(text) if end < 0 or STEERING.match(text, end) else end
        self.said += STEERING.sub("", text[:end].replace(">\x08\x1b[2C", PROMPT)).replace("\x08", "")
        self._rest = text[end:]

    def type(self, text):
        os.write(self._leader, text.encode())

    def interrupt(self):
        """Press Ctrl-C, which a terminal passes on to all processes of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_until(self, text):
        """Press Ctrl-C, and read until a text is there. A signal between the prompt and the wait for keys is taken up
        with the next key, here one that changes nothing."""
        self.interrupt()
        for _ in range(24):
            with suppress(AssertionError):
                return self.see(text, 5)
            self.type("\x7f")
        raise AssertionError((text, self.said))

    def ended_by(self, number):
        """Send a signal. One between the prompt and the wait for keys is taken up with the next key."""
        time.sleep(0.5)
        self.process.send_signal(number)
        for _ in range(12):
            try:
                return self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.type(" ")
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"{number!r} did not end the chat: {self.said}")

    def take_back_the_turn(self):
        self.see("> ")
        self.type("/rewind\r")
        self.see("took back 1 turn")
        self.type("/memory\r")
        self.see("none yet")
        self.see("> ")

    def end(self):
        self.type("\x04")
        code = self.process.wait(timeout=60)
        os.close(self._leader)
        return code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = model_folders.copy(tmp_path_factory.mktemp("models") / "chat")
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    return folder


@pytest.mark.slow
def test_keys(model, tmp_path):
    terminal = Terminal(model, tmp_path, "-n", LONG, "-s", "one")
    greeting = terminal.see("Ctrl-D ends")
    assert "one, new" in greeting
    assert "temperature   0: the likeliest token, always" in greeting
    terminal.see("> ")
    terminal.interrupt_until("Ctrl-D or /quit ends the conversation")
    terminal.see("> ")
    terminal.type("the quick fox\r")
    terminal.see("the quick fox\r")
    terminal.see("brown")
    terminal.type("/memory\r")  # waits for the answer's end
    terminal.interrupt()
    said = terminal.see("stopped; the conversation keeps the answer so far")
    assert "/memory" not in said
    terminal.see("1 turn")
    terminal.take_back_the_turn()
    terminal.type("the quick fox\r")
    terminal.see("brown")  # answered as before
    terminal.interrupt()
    terminal.take_back_the_turn()
    terminal.type("\x1b[A\r")  # the line before
    terminal.see("none yet")
    terminal.see("> ")
    time.sleep(1)
    assert terminal.end() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_paste_is_one_message(model, tmp_path):
    terminal = Terminal(model, tmp_path, "-n", SHORT, "-s", "one")
    terminal.see("> ")
    lines = [f"line {number}" for number in range(24)]
    terminal.type(f"\x1b[200~{os.linesep.join(lines)}\x1b[201~ why\r")
    terminal.see("[pasted: 24 lines] why")
    terminal.see("stopped after 3 tokens")
    assert terminal.end() == 0
    found = kvkeep.Snapshot.load(tmp_path / "one" / "memory.kvkeep")
    assert [one["role"] for one in found.note["messages"]] == ["user", "assistant"]
    assert found.note["messages"][0]["content"] == "\n".join([*lines[:-1], f"{lines[-1]} why"])


@pytest.mark.slow
def test_a_terminal_that_is_closed_and_a_process_that_is_ended_lose_nothing(model, tmp_path):
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        terminal = Terminal(model, tmp_path, "-n", SHORT, "-s", number.name)
        terminal.see("> ")
        terminal.type("the quick fox\r")
        terminal.see("stopped after 3 tokens")
        terminal.see("> ")
        assert terminal.ended_by(number) != 0
        found = kvkeep.Snapshot.load(tmp_path / number.name / "memory.kvkeep")
        assert len(found.note["messages"]) == 2
        again = Terminal(model, tmp_path, "-s", number.name, "-n", SHORT)
        assert "1 turn" in again.see("Ctrl-D ends")
        again.see("> ")
        again.type("\x1b[A\r")  # the message of the earlier run
        again.see("the quick fox")
        again.see("stopped after 3 tokens")
        again.see("> ")
        assert again.end() == 0
    assert Terminal(model, tmp_path, "--list").process.wait(timeout=60) == 0


@pytest.mark.slow
def test_ctrl_c_at_any_moment_keeps_the_conversation_whole(model, tmp_path):
    terminal = Terminal(model, tmp_path, "-n", "40", "-s", "one")
    terminal.see("> ")
    for i in range(12):
        terminal.type(f"turn {i}\r")
        terminal.see(f"turn {i}\r")
        time.sleep(0.03 * i)
        terminal.interrupt()
        terminal.see("> ")
    time.sleep(0.5)
    terminal.type("/quit\r")
    assert terminal.process.wait(timeout=60) == 0
    file = tmp_path / "one" / "memory.kvkeep"
    if file.exists():
        found = kvkeep.Snapshot.load(file)
        assert [one["role"] for one in found.note["messages"]] == ["user", "assistant"] * (
            len(found.note["messages"]) // 2
        )

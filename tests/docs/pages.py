"""Pages that are run from top to bottom: files that they show are written, commands and Python run, in this order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import model_folders
from typer.testing import CliRunner

from kvkeep.cli.main import app

ELSEWHERE = ("pip ", "git ", "cd ", "make ", "curl ", "kvkeep serve --budget")
"""Commands that other tests run, or that need a network."""


def fences(text: str) -> list[tuple[str, str | None, str]]:
    """The language, the title and the content of each block of a page."""
    found = re.findall(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [(language, title or None, content) for language, title, content in found]


def run(text: str, folder: Path, names: dict[str, object]) -> None:
    """Run a page in a folder that is the current one."""
    for language, title, content in fences(text):
        if title is not None:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(content)
        elif language == "sh":
            for line in content.replace("\\\n", " ").splitlines():
                command(line.partition(" # ")[0].strip(), folder)
        elif language == "python":
            exec(content, names)


def command(line: str, folder: Path) -> None:
    """Run a line as a shell would that knows `kvkeep`, ``echo ... |`` and ``$(cat FILE)``."""
    if not line or line.startswith(ELSEWHERE):
        return
    first, _, last = line.rpartition(" | ")
    words = shlex.split(re.sub(r"\$\(cat (\S+)\)", lambda file: (folder / file[1]).read_text(), last))
    assert words[0] == "kvkeep", line
    assert not first or first.startswith("echo "), line
    with model_folders.one_thread():
        done = CliRunner().invoke(app, words[1:], input=" ".join(shlex.split(first)[1:]) + "\n" if first else None)
    assert done.exit_code == 0, (line, done.output)

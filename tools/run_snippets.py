"""Run what the README and the tutorials show, from top to bottom, on a real model, and keep what it prints.

python tools/run_snippets.py [PAGE ...] [--model FOLDER] [--output FOLDER]

Each page runs in an empty folder: files with a title are written, lines for a shell and Python run in their order. The
model is by default the SmolLM2 of `make real`; it stands for models of the hub, and for the embedded one where a page
names none. Standard output and error go to this program's output and to a file for each page. Read them: that a snippet
ends well does not make the sentence beside it true.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.real_models import HOME

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/tutorials/{path.name}" for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))))

HUB_NAMES = ("Qwen/Qwen3-0.6B", "MODEL")
"""Models of the pages, for which the real one stands."""

WITHOUT_MODEL = ("generate", "remember", "chat", "serve", "eval", "explain", "tune", "calibrate", "analyze")
"""Commands that take a model, and run the embedded one where none is named."""

KNOW_THEIR_MODEL = ("--memory", "--report", "--config", "--list")
"""Options of commands whose files name the model."""

MORE = {
    "generate": "--max-new-tokens 16",
    "chat": "--max-new-tokens 24",
    "eval": "--limit 2 --tasks recall --context 256 --facts 4 --no-plots",
    "tune": "--quick",
    "analyze": "--max-tokens 256 --only sparsity,persistence",
    "serve": "--check",
}
"""Options that make a command short, by its name; those that a line has already are left out."""

SHORTER = {"2 * 2**30": "64 * 2**20"}
"""Parts of the pages' Python, and what stands for them."""

BEFORE = "prompts = ['The capital of France is', 'Name three colours.']\n"
"""Python that runs before that of a page."""

TYPED = "What is a lighthouse?\n/quit\n"
"""What commands find on standard input."""

SKIPPED = ("git ", "cd ", "pip ", "make ", "curl ")
"""Beginnings of lines that need a network, or an environment of their own."""

TIMEOUT_S = 900
PORT = 8000
_WORKER = """
import json, sys, traceback
names = {}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "snippet", "exec"), names)
        ended = "well"
    except BaseException:
        traceback.print_exc()
        ended = "badly"
    sys.stderr.flush()
    print("\\n" + sys.argv[1], ended, flush=True)
"""
"""Runs pieces of Python in one process, and prints a mark after each."""
_MARK = "=== end of a snippet:"

Write = Callable[[str], object]


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Return the language, the title and the content of each block of a page."""
    return re.findall(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def command(line: str, model: str) -> str:
    """Return a line for a shell with the model in the place of the page's, and with options that make it short."""
    before, bar, last = line.rpartition(" | ")
    if not last.startswith("kvkeep "):
        return line
    name, rest = [*last.split(maxsplit=2)[1:], ""][:2]
    for hub_name in HUB_NAMES:
        rest = re.sub(rf"(?<!\S){re.escape(hub_name)}(?!\S)", lambda found: shlex.quote(model), rest)
    named = bool(rest) and not rest.startswith("-")
    known = any(re.search(rf"(?<!\S){flag}\b", rest) for flag in KNOW_THEIR_MODEL)
    continued = name == "chat" and "--session" in rest and not named
    if name in WITHOUT_MODEL and not named and not known and not continued:
        rest = f"{shlex.quote(model)} {rest}"
    for flag, value in re.findall(r"(--\S+)((?: [^-\s]\S*)?)", MORE.get(name, "")):
        if flag not in rest and not (name == "chat" and "--list" in rest) and "--report" not in rest:
            rest = f"{rest} {flag}{value}"
    return f"{before}{bar}kvkeep {name} {rest}".rstrip()


def python(code: str, model: str) -> str:
    """Return a piece of a page's Python with the model in the place of the page's, and with small numbers."""
    for hub_name in HUB_NAMES:
        code = code.replace(f'"{hub_name}"', repr(model))
    code = code.replace("kvkeep.load()", f"kvkeep.load({model!r})").replace('model="embedded"', f"model={model!r}")
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


@dataclass
class PageRun:
    """A page while it runs.

    Attributes:
        folder: where it runs.
        model: the model.
        environment: variables of its processes.
        write: gets everything that is shown.
        failed: snippets that have ended badly.
    """

    folder: Path
    model: str
    environment: Mapping[str, str]
    write: Write
    failed: list[str] = field(default_factory=list)

    def run(self, text: str) -> list[str]:
        """Run a page, and return the snippets that have ended badly."""
        with ExitStack() as held:
            worker = held.enter_context(self._worker())
            held.callback(worker.stdin.close if worker.stdin else lambda: None)
            self._python(worker, BEFORE, shown=False)
            for language, title, content in blocks(text):
                if title:
                    (self.folder / title).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / title).write_text(content)
                elif language == "sh":
                    for line in content.replace("\\\n", " ").splitlines():
                        self._line(line.partition(" #")[0].strip(), held)
                elif language == "python":
                    self._python(worker, python(content, self.model))
                elif language == "text":
                    self.write("the page shows:\n" + _indented(content))
        return self.failed

    @contextmanager
    def _worker(self) -> Iterator[subprocess.Popen[str]]:
        words = ["python", "-u", "-c", _WORKER, _MARK]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(self._found(words), cwd=self.folder, env=dict(self.environment), **pipes) as worker:
            yield worker

    def _found(self, words: list[str]) -> list[str]:
        """Return a command with the program's path, looked for in the environment of the page."""
        for folder in self.environment["PATH"].split(os.pathsep):
            if (Path(folder) / words[0]).exists():
                return [str(Path(folder) / words[0]), *words[1:]]
        raise SystemExit(f"There is no {words[0]} on PATH.")

    def _python(self, worker: subprocess.Popen[str], code: str, *, shown: bool = True) -> None:
        if shown:
            self.write(">>> " + code.rstrip().replace("\n", "\n... "))
        assert worker.stdin is not None
        assert worker.stdout is not None
        start = time.perf_counter()
        worker.stdin.write(json.dumps(code) + "\n")
        worker.stdin.flush()
        said: list[str] = []
        for line in worker.stdout:
            if line.startswith(_MARK):
                break
            said.append(line)
        else:
            line = "the process has ended"
        if shown:
            self.write(_indented("".join(said).rstrip("\n")))
        self._end(code.splitlines()[0], line.rstrip().endswith(" well"), time.perf_counter() - start, shown=shown)

    def _line(self, line: str, held: ExitStack) -> None:
        if not line or line.startswith(SKIPPED):
            return
        if line.startswith("kvkeep serve") and "--check" not in line and "serving" in self.folder.name:
            self._serve(command(line + " --check", self.model).replace(" --check", ""), held)
            return
        changed = command(line, self.model)
        self.write(f"$ {changed}")
        start = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "input": TYPED}
        try:
            done = subprocess.run(
                ["bash", "-c", changed],
                cwd=self.folder,
                env=dict(self.environment),
                timeout=TIMEOUT_S,
                check=False,
                **pipes,
            )
        except subprocess.TimeoutExpired as late:
            said, well = (late.stdout or b"").decode(errors="replace"), False
        else:
            said, well = done.stdout, done.returncode == 0 and "Traceback" not in done.stdout
        self.write(_indented(said.rstrip("\n")))
        self._end(changed, well, time.perf_counter() - start)

    def _serve(self, line: str, held: ExitStack) -> None:
        """Start a server that runs until the page ends, and wait until it answers."""
        self.write(f"$ {line} &")
        log = held.enter_context((self.folder / "server.log").open("w"))
        words = self._found(shlex.split(line))
        server = subprocess.Popen(words, cwd=self.folder, env=dict(self.environment), stdout=log, stderr=log)
        held.callback(lambda: (server.terminate(), server.wait(60)))
        for _ in range(120):
            time.sleep(1)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5).close()
            except OSError:
                continue
            self.write(_indented((self.folder / "server.log").read_text()))
            return
        self._end(line, False, 120)

    def _end(self, snippet: str, well: bool, seconds: float, *, shown: bool = True) -> None:
        if shown:
            self.write(f"[{'ok' if well else 'FAILED'}, {seconds:.1f} s]\n")
        if not well:
            self.failed.append(snippet)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def prepare(folder: Path) -> None:
    """Write the files that the README's commands read."""
    report = (ROOT / "docs" / "streaming.md").read_text()
    (folder / "report.txt").write_text(re.sub(r"^```.*?^```\n", "", report, flags=re.DOTALL | re.MULTILINE))
    (folder / "prompts.jsonl").write_text('{"prompt": "The capital of France is"}\n{"prompt": "Name three colours."}\n')


def main() -> int:
    """Run pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: the README and all tutorials")
    parser.add_argument("--model", default=str(HOME / "smollm2"), help="default: the SmolLM2 of `make real`")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "snippets", help="folder of the outputs")
    options = parser.parse_args()
    if not Path(options.model).exists():
        parser.error(f"{options.model} does not exist. `make real` makes it; or give --model FOLDER.")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.pages or PAGES:
        page = ROOT / name
        with tempfile.TemporaryDirectory() as temporary, (options.output / f"{page.stem}.txt").open("w") as file:
            folder = Path(temporary) / page.stem
            folder.mkdir()
            prepare(folder)
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "PATH": path, "KVKEEP_SESSIONS": str(folder / "sessions"), "COLUMNS": "100"}

            def write(text: str, file: TextIO = file) -> None:
                print(text, flush=True)
                print(text, file=file, flush=True)

            write(f"======== {name}\n")
            failed += [
                (name, snippet) for snippet in PageRun(folder, options.model, environment, write).run(page.read_text())
            ]
    for name, snippet in failed:
        print(f"FAILED {name}: {snippet}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

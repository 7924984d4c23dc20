"""Every snippet of every page is run by a test, or stands in a list here with the reason why it is not."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[2]
GENERATED = "docs/reference/command-line.md"
"""Its commands are those of `kvkeep.cli.help`, which ``tests/first_contact/test_snippets.py`` runs."""

RUNNERS = {
    "README.md": "tests/docs/test_docs.py",
    "CONTRIBUTING.md": "tests/docs/test_contributing.py",
    "docs/engine.md": "tests/docs/test_docs.py",
    "docs/index.md": "tests/docs/test_docs.py",
    "docs/sessions.md": "tests/docs/test_docs.py",
    "docs/server.md": "tests/server/test_page.py",
    "docs/scale.md": "tests/scale/test_ray_data.py",
    "docs/tensor-parallel.md": "tests/tensor_parallel/test_torchrun.py",
    "docs/tutorials/": "tests/docs/test_tutorials.py",
    "docs/": "tests/first_contact/test_snippets.py",
}
"""The test that runs a page's Python; the first entry that fits."""

SKIPPED = {
    "make ": "needs an environment of its own; the first step of every job of the workflow",
    "pip install": "needs the package index; `make package` and `make newcomer` install the package with its extras",
    "git clone": "needs the network",
    "cd ": "changes the folder for the next line only",
    "curl ": "the same request as in tests/server/test_routes.py, by a program that may be missing",
    'python3 -c "import secrets': "makes a random key for the next line only",
    "KVKEEP_MODEL=": "needs docker; tests/server/test_deploy.py reads the files that docker would",
    "torchrun ": "starts several processes; tests/tensor_parallel/test_torchrun.py does it with a tiny model",
    "ray start": "starts a node of a cluster; tests/scale/test_ray_data.py starts one of its own",
    "python examples/": "tests/docs/test_examples.py runs each of them on the embedded model",
    "python bench/": "measures for minutes to hours; its options are checked below, a small run is in tests/bench",
}
"""Beginnings of lines that no test runs, and why."""

SHORTENED = {
    "demo": "tests/cli/test_cli_demo.py",
    "tune": "tests/cli/test_cli_tune.py",
    "bench-server": "lab/tests/loadtest/test_bench_server.py",
    "lm-eval": "tests/evals/test_lm_eval_model.py",
}
"""Commands of which the pages' lines only show their help in the test of snippets → the test that runs them."""

UNRUN = ("", "text", "bibtex", "json", "jsonl", "toml", "sh", "bash")
"""Languages other than Python: drawings, output and files; lines for a shell are looked at one by one."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


LOG = ROOT / "lab" / "log"
PAGES = [
    page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *LOG.glob("*.md")) if name(page) != GENERATED
]


def fences(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```", text, flags=re.DOTALL | re.MULTILINE)


def lines(page: Path) -> list[str]:
    """The lines of a page that are for a shell, without comments."""
    found = []
    for language, content in fences(page.read_text()):
        if language in ("sh", "bash") or re.match(r"(python|kvkeep) ", content):
            joined = re.sub(r"\\\n\s*", " ", content)
            found += [line.partition(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in found if line]


def bench_commands() -> list[str]:
    """Every command of a benchmark that the pages show, in blocks or within a sentence."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        found |= {line for line in lines(page) if line.startswith("python bench/")}
        if page.parent != LOG:  # which tells what was run then
            found |= {" ".join(one.split()) for one in re.findall(r"`(python bench/[^`]+)`", text)}
    return sorted(found)


def test_every_block_has_a_language_that_a_test_knows():
    found = {(name(page), language) for page in PAGES for language, _ in fences(page.read_text())}
    assert [one for one in sorted(found) if one[1] not in ("python", *UNRUN)] == []


def test_the_python_of_every_page_has_a_test():
    for page in PAGES:
        if "```python" in page.read_text():
            runner = next(test for start, test in RUNNERS.items() if name(page).startswith(start))
            text = (ROOT / runner).read_text()
            assert page.name in text or page.stem in text or "glob" in text, page


def test_every_line_for_a_shell_is_run_or_has_a_reason():
    unknown = []
    for page in PAGES:
        for line in lines(page):
            command = line.rpartition(" | ")[2] if line.startswith(("cat ", "echo ")) else line
            if not command.startswith(("kvkeep ", *SKIPPED)):
                unknown.append((name(page), line))
    assert unknown == []


def test_every_reason_is_needed():
    shown = [line for page in PAGES for line in lines(page)]
    for start in SKIPPED:
        assert any(line.startswith(start) for line in shown), start


def test_commands_that_only_show_their_help_are_run_elsewhere():
    said = (ROOT / "tests/first_contact/test_snippets.py").read_text()
    assert set(re.findall(r'"([\w-]+)": \["--help"\]', said)) == set(SHORTENED)
    for command, test in SHORTENED.items():
        assert command.replace("-", "") in (ROOT / test).read_text().replace("-", "").replace("_", ""), command


def test_tutorials_skip_only_what_has_a_reason():
    """The server of a tutorial runs in its test, with its own command line left out."""
    for start in pages.ELSEWHERE:
        assert start == "kvkeep serve --budget" or any(known.startswith(start) for known in SKIPPED), start


class StopError(Exception):
    """A benchmark has read its options, and would begin to work."""


@pytest.mark.slow
@pytest.mark.parametrize("command", bench_commands())
def test_a_benchmark_has_the_options_that_a_page_shows(command, monkeypatch):
    """The script reads the options of the command, and is stopped before it measures anything."""
    whole = argparse.ArgumentParser.parse_args

    def read(parser, *arguments):
        whole(parser, *arguments)
        raise StopError

    words = shlex.split(re.sub(r"\[(.*?)\]", r"\1", command.partition(" > ")[0]))[1:]
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(StopError):
        runpy.run_path(words[0], run_name="__main__")

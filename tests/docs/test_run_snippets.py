"""The script that runs pages on a real model takes every line, puts the model in its place, and shows what failed."""

import os
import sys

import pytest

from tools import run_snippets
from tools.run_snippets import PAGES, ROOT, PageRun, blocks, command, python


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kvkeep generate -p Why", "kvkeep generate M -p Why --max-new-tokens 16"),
        ("kvkeep generate Qwen/Qwen3-0.6B -f a.txt -b 64", "kvkeep generate M -f a.txt -b 64 --max-new-tokens 16"),
        ("kvkeep generate --memory a -p Why", "kvkeep generate --memory a -p Why --max-new-tokens 16"),
        ("echo Why | kvkeep chat --session a", "echo Why | kvkeep chat --session a --max-new-tokens 24"),
        ("kvkeep chat --list", "kvkeep chat --list"),
        ("kvkeep eval --report later", "kvkeep eval --report later"),
        ("kvkeep serve MODEL --check", "kvkeep serve M --check"),
        ("kvkeep plan MODEL --memory 24GiB", "kvkeep plan M --memory 24GiB"),
        ("kvkeep policies", "kvkeep policies"),
        ("make test", "make test"),
    ],
)
def test_the_model_stands_in_every_line(line, wanted):
    assert command(line, "M") == wanted


def test_the_python_of_the_readme_compiles_with_the_model_in_it():
    codes = [
        python(content, "M")
        for language, _, content in blocks((ROOT / "README.md").read_text())
        if language == "python"
    ]
    assert "'M'" in codes[0]
    for code in codes:
        assert not any(part in code for part in (*run_snippets.HUB_NAMES[:1], *run_snippets.SHORTER))
        compile(code, "README.md", "exec")


def test_all_tutorials_are_run():
    assert len(PAGES) == 1 + len(list((ROOT / "docs" / "tutorials").glob("*.md")))


def test_a_page_runs_in_order_and_failures_are_named(tmp_path):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "kvkeep").write_text('#!/bin/sh\necho "kvkeep got $*"; cat words.txt; test "$1" != memory\n')
    (bin_ / "kvkeep").chmod(0o755)
    (bin_ / "python").symlink_to(sys.executable)
    page = """
```text title="words.txt"
of the page
```
```sh
git clone nothing
kvkeep policies   # all of them
kvkeep memory x
```
```python
number = 40
```
```python
print(number + 2)
open("words.txt").read()[99]
```
```text
what the page shows
```
"""
    said: list[str] = []
    environment = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    failed = PageRun(tmp_path, "M", environment, said.append).run(page)
    shown = "\n".join(said)
    assert failed == ["kvkeep memory x", "print(number + 2)"]
    assert "kvkeep got policies" in shown
    assert "    of the page" in shown
    assert "    42" in shown
    assert "IndexError" in shown
    assert "    what the page shows" in shown
    assert shown.count("[ok, ") == shown.count("[FAILED, ") == 2


@pytest.mark.long
def test_a_line_that_takes_too_long_has_failed_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_snippets, "TIMEOUT_S", 1)
    said: list[str] = []
    failed = PageRun(tmp_path, "M", os.environ, said.append).run("```sh\necho early; exec sleep 60\necho later\n```\n")
    shown = "\n".join(said)
    assert failed == ["echo early; exec sleep 60"]
    assert "    early" in shown
    assert "    later" in shown

"""The site has every page, and its generated pages are those that the code would write."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import kvkeep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
ELSEWHERE = ("README", "changelog", "contributing", "releasing", "security", "code-of-conduct")


def test_the_navigation_names_every_page_once():
    named = re.findall(r"[\w/-]+\.md", NAV)
    exist = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    exist |= {f"{name}.md" for name in ELSEWHERE}
    exist |= {f"tutorials/{path.stem.replace('_', '-')}.md" for path in ROOT.glob("examples/notebooks/*.ipynb")}
    assert set(exist) - set(named) == set(), "add these pages to nav in mkdocs.yml"
    assert sorted(named) == sorted(exist)


def test_the_page_of_the_command_line_is_up_to_date():
    code = "import command_line_page as p; assert p.PAGE.read_text() == p.page(), 'run make docs'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_of_the_interface_has_every_public_name():
    page = (DOCS / "reference" / "api.md").read_text()
    for name in set(kvkeep.__all__) - {"__version__"}:
        home = kvkeep._HOME[name].replace(":", ".")
        assert f"::: kvkeep.{home}\n" in page or f"        - {name}\n" in page, name


def test_what_the_page_of_the_interface_names_exists():
    page = (DOCS / "reference" / "api.md").read_text()
    for target in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE):
        if target != "kvkeep.errors":
            module, _, name = target.rpartition(".")
            __import__(module)
            assert hasattr(sys.modules[module], name), target


def test_the_readmes_table_of_speeds_is_taken_from_the_benchmarks():
    readme, page = (ROOT / "README.md").read_text(), (DOCS / "benchmarks.md").read_text()
    table = readme.partition("## What it gains")[2].partition("## What it costs")[0]
    (command,) = re.findall(r"`(python bench/[^`]+)`", table)
    assert command in page
    columns = r" \| ([\d.]+) s \| ([\d.]+) ms" * 2
    rows = re.findall(rf"^\| \w.*?{columns} \| (\d+) MiB \|$", table, flags=re.MULTILINE)
    assert len(rows) == 6
    measured = page.partition(f"`{command}`")[2].partition("\n##")[0]
    for short_first, short_token, long_first, long_token, peak in rows:
        cells = rf"\| {short_first} \| {short_token} \| \d+ \| {long_first} \| {long_token} \| {peak} \|"
        assert re.search(cells, measured), long_first


def test_sentences_are_short(monkeypatch):
    """The median sentence of every page has under 20 words, and few have more than 35."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("sentences")
    assert len(tool.pages()) > 30
    for page in tool.pages():
        lengths = tool.lengths(page.read_text())
        assert lengths[len(lengths) // 2] < 20, page
        assert sum(length > tool.LONG for length in lengths) <= len(lengths) // 20 + 1, page


def test_every_page_begins_with_an_example():
    """A block of code or of a command comes before the first section, after a few words. The list of all commands has
    its examples below each command.
    """
    lists = {DOCS / "reference" / "command-line.md"}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *{*DOCS.rglob("*.md")} - lists]:
        before, fence, _ = page.read_text().partition("\n## ")[0].partition("```")
        assert fence, page
        assert len(before.split()) < 100, page


def test_the_page_of_compatibility_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "compatibility.md").read_text())
    assert len(named) > 20
    for path, name in named:
        assert f"def {name}" in (ROOT / path).read_text(), (path, name)


def test_pages_claim_no_gpu_as_long_as_the_page_of_gpus_has_none():
    if "Nothing on this page has run on a GPU yet" in (DOCS / "gpu.md").read_text():
        for name in ("docs/compatibility.md", "docs/reference/compared.md"):
            (line,) = re.findall(r"^\| (?:CUDA|devices) \|.*$", (ROOT / name).read_text(), flags=re.MULTILINE)
            assert "not run on a GPU yet" in line, name

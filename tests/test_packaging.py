"""What a stranger reads about the package agrees with itself, and every dependency has its line."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvkeep
from kvkeep import scale
from kvkeep.errors import pip_install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def test_the_version_is_the_same_everywhere():
    assert PROJECT["dynamic"] == ["version"]
    assert f"\nversion: {kvkeep.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_one_address_of_the_repository():
    site = PROJECT["urls"]["Documentation"]
    for name in ("CITATION.cff", "mkdocs.yml", "README.md"):
        text = (ROOT / name).read_text()
        assert REPOSITORY in text, name
        assert site in text, name
    for name in ("README.md", "mkdocs.yml", "CITATION.cff", *(str(path) for path in ROOT.glob(".github/**/*.yml"))):
        for address in re.findall(r"https://github\.com/kvkeep[\w/-]*", (ROOT / name).read_text()):
            assert address.startswith(REPOSITORY), (name, address)


def test_every_dependency_has_its_licence_written_down():
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    extras = PROJECT["optional-dependencies"]
    for requirement in (*PROJECT["dependencies"], *(one for names in extras.values() for one in names)):
        name, bounds = re.match(r"([\w-]+)(?:\[\w+\])?([^;]*)", requirement).groups()
        if name == "kvkeep":
            continue
        assert re.search(rf"\b{name.replace('_', '-')}\b", page), (
            f"{name} has no line in docs/reference/dependencies.md"
        )
        if requirement in PROJECT["dependencies"]:
            assert f"| {name} | {bounds.strip()} |" in page, requirement


def test_the_lower_ends_are_those_of_the_project():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "requirements.py"), "--lowest", "server"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.split()
    assert "torch==2.6" in lines
    assert {line.partition("==")[0] for line in lines} == {
        re.match(r"[\w-]+", one)[0] for one in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"])
    }


@pytest.mark.long
def test_every_extra_has_a_lower_end():
    for extra in PROJECT["optional-dependencies"]:
        command = [sys.executable, str(ROOT / "tools" / "requirements.py"), "--lowest", extra]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert all(re.fullmatch(r"[\w-]+(\[[\w,-]+\])?==[\d.]+", line) for line in lines), extra
        assert not any(line.startswith("kvkeep") for line in lines), extra  # which would come from the index


def test_the_help_of_make_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)[1].split())
    listed = set(re.findall(r"^([a-z-]+):.*##", makefile, flags=re.MULTILINE))
    assert listed == targets


def test_the_workflows_call_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in ROOT.glob(".github/workflows/*.yml"):
        for words in re.findall(r"run: make ([a-z -]+)$", path.read_text(), flags=re.MULTILINE):
            for word in words.split():
                assert re.search(rf"^{word}:", makefile, flags=re.MULTILINE), (path.name, word)


def test_a_message_about_a_missing_package_names_an_extra_that_pip_finds():
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"pip_install\(['\"]([\w-]+)['\"]\)", sources)) | {scale.EXTRA}
    assert {"server", "plots", "gpu", "ray"} <= named <= set(PROJECT["optional-dependencies"])
    for extra in named:
        requirement = Requirement(shlex.split(pip_install(extra))[2])
        assert (requirement.name, requirement.extras) == ("kvkeep", {extra})
        assert requirement.url == f"git+{REPOSITORY}"


def test_nothing_tells_to_install_from_an_index():
    """The package is on none, so a bare name would find nothing, or the package of somebody else."""
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.*"),
        *ROOT.glob("deploy/*"),
    ]
    for page in (*pages, *(ROOT / "src").rglob("*.py")):
        if page.suffix in (".md", ".py", ".ipynb", ".yml"):
            found = re.findall(r"pip install (?:-\w+ )?['\"]?kvkeep(?!-)(?!\[[^]]+\] @ )", page.read_text())
            assert not found, page


def test_make_package_resolves_every_extra():
    named = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    assert sorted(named) == sorted(PROJECT["optional-dependencies"])


def test_make_package_asks_for_every_python_that_is_named():
    named = re.search(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    assert named == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == named


@pytest.mark.parametrize("name", ["c++", "g++", "gcc-12", "x86_64-linux-gnu-g++", "clang++-18", "cc"])
def test_compilers_are_known_by_their_names(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("newcomer_check")
    assert tool.COMPILER.match(name)
    assert not any(map(tool.COMPILER.match, ("git", "bash", "python3", "ccache-swig", "make")))

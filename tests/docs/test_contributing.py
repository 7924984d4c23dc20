"""A policy and a command in packages of their own, written by CONTRIBUTING.md and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pages
import pytest
from typer.main import get_command

import kvkeep
from kvkeep.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The page's package, installed as pip would: its modules, and its entry points in a dist-info."""
    place = tmp_path_factory.mktemp("site")
    for _, title, content in pages.fences(PAGE):
        if title is not None:
            (place / title).parent.mkdir(exist_ok=True)
            (place / title).write_text(content)
    folder = place / "kvkeep-even"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / "kvkeep_even-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n{key} = {value}\n"
        for group, found in project["entry-points"].items()
        for key, value in found.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    return folder


SCRIPT = """
import shlex, sys
import pytest
from typer.testing import CliRunner
from kvkeep.cli.main import app

assert pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]) == 0
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    print(done.output)
"""


@pytest.mark.slow
def test_the_policy_passes_its_own_tests_and_works_by_its_name(package):
    (lines,) = [text for language, _, text in pages.fences(PAGE) if language == "sh" and "policies show" in text]
    paths = os.pathsep.join([str(package), str(Path(kvkeep.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package)],
        input=lines,
        cwd=package.parent,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "Keeps tokens at even positions" in done.stdout
    assert "policy     even:sinks=1, budget 16" in done.stdout


def test_the_command_runs_and_has_a_page(tmp_path, monkeypatch, capsys):
    (module,) = [text for _, title, text in pages.fences(PAGE) if title == "kvkeep-count/kvkeep_count.py"]
    (points,) = [text for language, _, text in pages.fences(PAGE) if language == "toml" and "kvkeep_count" in text]
    ((group, named),) = tomllib.loads(points)["project"]["entry-points"].items()
    assert group == main.ENTRY_POINT_GROUP
    (tmp_path / "kvkeep_count.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [EntryPoint(name, value, group) for name, value in named.items()]
    monkeypatch.setattr(main, "entry_points", lambda *, group: found)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        with pytest.raises(SystemExit):
            get_command(main.app).main([*words])  # a new application, since one looks entry points up once
        return capsys.readouterr().out

    assert run("count", "a b cc") == "3\n"
    assert run("count", "a b cc", "--shortest", "2") == "1\n"
    page = run("count", "--help")
    assert "--shortest N" in page
    assert "How many words it has" in page
    monkeypatch.delitem(sys.modules, "kvkeep_count")


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"`((?:src|tests|docs|bench|examples|lab|tools)/[\w/.-]+)`", PAGE)
    assert len(named) > 25
    for name in named:
        if "NAME" in name:
            assert (ROOT / name).parent.is_dir(), name
        else:
            assert (ROOT / name).exists(), name


def test_every_make_target_that_the_pages_name_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page in ("CONTRIBUTING.md", "RELEASING.md", "README.md", "docs/reference/dependencies.md"):
        for words in re.findall(r"`make ([a-z -]+)`", (ROOT / page).read_text()):
            for word in words.split():
                assert re.search(rf"^{word}:", makefile, flags=re.MULTILINE), (page, word)

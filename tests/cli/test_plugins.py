"""Commands of other packages: found, shown, completed and run like kvkeep's own, and harmless when they are broken."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import typer.main

from kvkeep.cli import main
from kvkeep.cli.main import app

SHORTEN = '''
from typing import Annotated

import typer

from kvkeep.cli.console import one_line_errors
from kvkeep.cli.help import Group
from kvkeep.cli.main import MEASURE, Plugin
from kvkeep.errors import InputError


@one_line_errors
def shorten(
    text: str, words: Annotated[int, typer.Option(metavar="N", help="Words that stay.")] = 3
):
    """Shorten a text."""
    if words < 1:
        raise InputError(f"`words={words}` is less than 1.")
    print(" ".join(text.split()[:words]))


PLUGIN = Plugin(command=shorten, panel=MEASURE, examples={"kvkeep shorten TEXT": "Its first words"})

colours = typer.Typer(cls=Group, help="Colours of words.")


@colours.command("list")
def list_colours():
    """List them."""
    print("red, green")


@colours.command("count")
def count_colours():
    """Count them."""
    print(2)


@colours.callback()
def about():
    """Colours of words."""
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package, as pip would: a module, and entry points in a dist-info."""

    def install(package, module, **points):
        (tmp_path / f"{package}.py").write_text(module)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{attribute}\n" for name, attribute in points.items()]
        (info / "entry_points.txt").write_text(f"[{main.ENTRY_POINT_GROUP}]\n" + "".join(lines))
        packages.append(package)

    packages = []
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for package in packages:
        sys.modules.pop(package, None)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line in a process that has just begun, as far as commands of other packages go."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            typer.main.get_command(app).main([*words])
        said = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=said.out, err=said.err)

    return call


def test_a_function_becomes_a_command_with_page_and_examples(installed, run):
    installed("shortening", SHORTEN, shorten="PLUGIN")
    assert run("shorten", "a b c d").out == "a b c\n"
    page = run("shorten", "--help").out
    assert "Its first words:\n    kvkeep shorten TEXT\n" in page
    assert "--words N" in page
    measure = run("--help").out.partition("\nMeasure\n")[2].partition("\n\n")[0]
    assert "shorten" in measure


def test_mistakes_are_explained_as_those_of_kvkeeps_own_commands(installed, run):
    installed("shortening", SHORTEN, shorten="PLUGIN")
    said = run("shorten", "a b", "--words", "0")
    assert (said.code, said.err) == (2, "error: --words 0 is less than 1.\n")
    assert run("shorten", "a b", "--wrods", "2").err == (
        "error: kvkeep shorten has no option --wrods. Did you mean --words?\n"
    )
    assert run("shoten").err == "error: kvkeep has no command 'shoten'. Did you mean kvkeep shorten?\n"
    assert "It belongs to kvkeep shorten" in run("env", "--words", "2").err


def test_an_application_becomes_a_group(installed, run):
    installed("shortening", SHORTEN, colours="colours")
    assert run("colours", "list").out == "red, green\n"
    assert run("colours", "blue").err == "error: kvkeep colours has no command 'blue'. See kvkeep colours --help.\n"
    assert "colours " in run("--help").out.partition("\nOf other packages\n")[2]


def test_a_bare_function_stands_with_other_packages(installed, run):
    installed("shortening", SHORTEN, shorten="shorten")
    assert run("shorten", "a b c d", "--words", "1").out == "a\n"
    assert "shorten " in run("--help").out.partition("\nOf other packages\n")[2]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('no [red]luck[/red]')", "RuntimeError: no [red]luck[/red]"),
        ("command = 3", "TypeError: broken_package:command is no function"),
        ("", "AttributeError: module 'broken_package' has no attribute 'command'"),
        ("def command(x: 'Unknown'): ...", "NameError: name 'Unknown' is not defined"),
    ],
)
def test_a_broken_package_gives_one_line_and_breaks_nothing_else(installed, run, module, why):
    installed("broken_package", module, broken="command")
    for words in (["broken"], ["broken", "--some", "word"], ["broken", "--help"]):
        said = run(*words)
        assert (said.code, said.out) == (2, "")
        assert said.err == f"error: kvkeep broken comes from broken_package and cannot be loaded: {why}\n"
    page = run("--help")
    assert page.code == 0
    assert f"cannot be loaded: {why}" in " ".join(page.out.split())
    assert run("memory").err.startswith("error: kvkeep memory needs")
    assert run("env", "--wrong").code == 2


def test_names_of_kvkeeps_own_commands_are_taken_and_never_looked_up(installed, run, monkeypatch):
    installed("shortening", SHORTEN, policies="shorten")
    assert "scissorhands" in run("policies").out
    monkeypatch.setattr(main, "entry_points", None)
    assert run("policies", "--json").code == 0


def test_only_the_package_whose_command_runs_is_imported(installed, run):
    installed("shortening", SHORTEN, shorten="PLUGIN")
    installed("broken_package", "raise SystemExit(9)", broken="command")
    assert run("shorten", "a b").out == "a b\n"
    assert "broken_package" not in sys.modules


def test_shells_complete_commands_and_options_of_other_packages(installed, monkeypatch, capsys):
    installed("shortening", SHORTEN, shorten="PLUGIN", colours="colours")
    offered = {}
    for line in ("kvkeep shor", "kvkeep shorten --wor", "kvkeep colours "):
        words = line.split(" ")
        for name, value in {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("_KVKEEP_COMPLETE", "complete_bash")
        with pytest.raises(SystemExit):
            typer.main.get_command(app).main([])
        offered[line] = capsys.readouterr().out.split()
    assert offered == {
        "kvkeep shor": ["shorten"],
        "kvkeep shorten --wor": ["--words"],
        "kvkeep colours ": ["list", "count"],
    }


@pytest.mark.parametrize("name", ["analyze", "bench-server", "fleet", "theory"])
def test_without_the_lab_its_commands_say_how_to_install_it(run, monkeypatch, name):
    monkeypatch.setattr(main, "entry_points", lambda group: [])
    said = run(name, "--help")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: kvkeep {name} is a command of kvkeep-lab, which is not installed: pip install ")
    assert said.err.count("\n") == 1
    assert run("--help").code == 0


def test_the_commands_that_are_told_apart_are_those_of_the_lab():
    points = metadata.distribution("kvkeep-lab").entry_points.select(group=main.ENTRY_POINT_GROUP)
    assert {point.name for point in points} == set(main.LAB_COMMANDS)

"""How a command begins: what it refuses or knows without a model imports neither torch nor transformers."""

import gc
import shutil
import subprocess
import sys

import memories
import model_folders
import pytest

from kvkeep.cli import startup

NO_MODEL = "./no-such-model"
LIGHT = [
    ["--help"],
    ["--version"],
    ["policies"],
    ["policies", "--json"],
    ["policies", "show", "h2o"],
    ["policies", "show", "snapkv:default"],
    ["policies", "show", "h20"],
    ["generate"],
    ["generate", NO_MODEL, "-p", "Hi"],
    ["generate", "no-such-model.gguf", "-p", "Hi"],
    ["generate", "--memory", "no-such.kvkeep", "-p", "Hi"],
    ["generate", "-p", "Hi", "-f", "no-such.txt"],
    ["generate", "-p", "Hi", "-b", "0"],
    ["generate", "-i", "no-such.jsonl", "-o", "out.jsonl"],
    ["serve", "--port", "99999"],
    ["chat", "-b", "0"],
    ["generate", "text.txt", "-p", "Hi"],
    ["generate", "empty", "-p", "Hi"],
    ["generate", "empty", "--gguf", "no-such.gguf", "-p", "Hi"],
    ["chat", NO_MODEL],
    ["chat", "--memory", "no-such.kvkeep"],
    ["remember", NO_MODEL, "-f", "text.txt", "-o", "text.kvkeep"],
    ["explain", NO_MODEL, "-f", "text.txt", "-p", "Hi", "--terminal"],
    ["remember", "-f", "no-such.txt", "-o", "text.kvkeep"],
    ["explain", "-f", "no-such.txt", "-p", "Hi", "--terminal"],
    ["calibrate", "--text", "no-such.txt", "-o", "heads.json"],
    ["tune", "--text", "no-such.txt"],
    ["eval", NO_MODEL, "--tasks", "recall", "--output", "results"],
    ["eval", "--tasks", "recal", "--output", "results"],
    ["eval", "--policies", "h20,local", "--output", "results"],
    ["tune", "--text", "text.txt", "--policies", "full,h2o:recent=4,sinks=2,h20@8"],
    ["explain", "-f", "text.txt", "-p", "Hi", "--policies", "h20", "--terminal"],
    ["generate", "-p", "Hi", "--policy", "h20"],
    ["generate", "-p", "Hi", "--dtype", "f32"],
    ["chat", "--policy", "h20"],
    ["plan", "--policy", "h20"],
    ["plan", "--dtype", "f32"],
    ["calibrate", NO_MODEL, "--text", "text.txt", "-o", "heads.json"],
    ["serve", NO_MODEL],
    ["plan", NO_MODEL],
    ["plan", "empty"],
    ["memory", "no-such.kvkeep"],
    ["env", NO_MODEL],
]
"""Commands that import neither torch nor transformers."""

WITH_NUMPY = [
    ["memory", "memory.kvkeep"],
    ["memory", "saved.kvkeep"],
    ["generate", "-p", "Hi", "--memory", "memory.kvkeep"],
    ["chat", "--memory", "memory.kvkeep"],
    ["chat", "--list", "--sessions", "sessions"],
]
"""Commands that import neither torch nor transformers, but NumPy for tables of positions."""

WITH_TORCH = [
    ["plan"],
    ["plan", "llama", "--policy", "h2o", "-b", "20%", "--kv-bits", "8", "--memory", "1GB", "--json"],
    ["env"],
    ["generate", "-p", "Hi", "--policy", "h2o:recnt=4"],
    ["generate", "-p", "Hi", "--config", "kvkeep.toml"],
    ["eval", "--policies", "h2o:recnt=4,local", "--output", "results"],
    ["serve", "--device", "gpu"],
]
"""Commands that import torch, and nothing of transformers."""

SCRIPT = """
import sys
from typer.testing import CliRunner
from kvkeep.cli.main import app
for words in {commands!r}:
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 2), (words, done.output, done.exception)
    assert not {packages!r} & set(sys.modules), words
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("commands", "packages"),
    [
        (LIGHT, {"torch", "transformers", "numpy"}),
        (WITH_NUMPY, {"torch", "transformers"}),
        (WITH_TORCH, {"transformers"}),
    ],
    ids=["without torch and numpy", "without torch", "without transformers"],
)
def test_commands_import_no_more_than_they_need(commands, packages, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(model_folders.folder(), tmp_path / "llama")
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "memory.kvkeep").write_text("no memory")
    (tmp_path / "kvkeep.toml").write_text("budgett = 3")
    memories.save(tmp_path / "saved.kvkeep")
    (tmp_path / "sessions" / "mine").mkdir(parents=True)
    memories.save(tmp_path / "sessions" / "mine" / "memory.kvkeep")
    script = SCRIPT.format(commands=commands, packages=packages)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


@pytest.fixture
def nothing_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the tests' garbage is not to stay
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_imported")
def test_imports_run_without_garbage_collection():
    with startup.fast_imports():
        assert not gc.isenabled()
        with startup.fast_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_imported")
def test_after_an_import_that_fails_garbage_is_collected_again():
    with pytest.raises(ModuleNotFoundError), startup.fast_imports():
        startup.imported("kvkeep.no_such_module:function")
    assert gc.isenabled()


def test_who_has_switched_collection_off_keeps_it_off():
    gc.disable()
    try:
        with startup.fast_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

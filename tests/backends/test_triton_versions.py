"""A Triton that is too old is left alone, with the reason; an unknown one is tried."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from kvkeep.backends.triton import launch


@pytest.fixture
def found(monkeypatch):
    """The kernels that would be found with a version of Triton."""

    def look(version):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) if callable(version) else version)
        monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
        launch.kernels.cache_clear()
        return launch.kernels()

    yield look
    launch.kernels.cache_clear()


@pytest.mark.parametrize("version", ["3.2.0", "3.5.1+git123", "2.3"])
def test_an_old_one_runs_nothing_and_is_named(version, found):
    kernels = found(version)
    assert kernels.devices == frozenset()
    assert kernels.detail.startswith(f"Triton {version} is older than 3.6;")


@pytest.mark.parametrize("version", ["3.6.0", "3.10", "4.0.0a1", "3.7.1+rocm"])
def test_a_new_one_runs(version, found):
    assert "cuda" in found(version).devices


def test_one_under_another_name_runs(found):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert "cuda" in found(unknown).devices


def test_the_extra_asks_for_the_same():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (bound,) = re.findall(r"triton>=(\d+)\.(\d+)", " ".join(project["optional-dependencies"]["gpu"]))
    assert tuple(map(int, bound)) == launch.OLDEST

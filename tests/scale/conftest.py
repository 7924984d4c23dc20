"""Ray itself is in an environment of its own, `make test-ray`; elsewhere the tests that start it are skipped."""

import builtins
import contextlib

import model_folders
import pytest
import rayanalyses
from raycells import CELLS, invoke, rows

from kvkeep import plots
from kvkeep.cli.analyze import analysis
from kvkeep.cli.analyze import far as far_of_measurements
from kvkeep.cli.eval import far as far_of_cells
from kvkeep.cli.eval import grid
from kvkeep.scale import crew
from kvkeep.scale.cluster import Need


@pytest.fixture(scope="session")
def ray():
    return pytest.importorskip("ray", reason="Ray is not installed: make test-ray")


@pytest.fixture
def no_ray(monkeypatch):
    """A machine without Ray, as far as imports show."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture
def one_thread():
    with model_folders.one_thread():
        yield


@pytest.fixture
def on(monkeypatch):
    """Put a cluster in the place of Ray."""
    for command, far in ((grid, far_of_cells), (analysis, far_of_measurements)):
        monkeypatch.setattr(command, "check_ray", lambda address: None)
        monkeypatch.setattr(far, "joined", lambda address, cpus: contextlib.nullcontext())
        monkeypatch.setattr(far, "room_for", lambda *args, **options: (Need(), "cpu"))
    monkeypatch.setattr(crew, "DEATHS", 10**6)

    def put(cluster):
        monkeypatch.setattr(crew, "need_ray", lambda: cluster)
        return cluster

    return put


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process makes of the grid, and what it prints."""
    folder = tmp_path_factory.mktemp("whole")
    with model_folders.one_thread():
        found = invoke(folder)
    assert found.exit_code == 0, found.output
    assert len(rows(folder)) == CELLS
    return folder, found.stdout


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text to analyse."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(rayanalyses.TEXT)
    return path


@pytest.fixture(scope="module")
def analysed(text, tmp_path_factory):
    """What one process makes of the analysis, and what it prints."""
    folder = tmp_path_factory.mktemp("analysed")
    with model_folders.one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "available", lambda: False)
        found = rayanalyses.invoke(text, folder)
    assert found.exit_code == 0, found.output
    made = rayanalyses.records(folder)
    assert set(made) == set(rayanalyses.NAMES)
    assert {name for name, record in made.items() if "skipped" in record} == rayanalyses.SKIPPED
    return folder, found.stdout

"""An analysis on a cluster that stands in for Ray, and what one process makes of it."""

import model_folders
import pytest
import rayanalyses
from ray_fixtures import no_ray, one_thread, put_cluster, ray  # noqa: F401  fixtures

from kvkeep import plots
from kvkeep_lab.cli.analyze import analysis


@pytest.fixture
def on(monkeypatch):
    """Put a cluster in the place of Ray."""
    return put_cluster(monkeypatch, analysis, analysis)


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

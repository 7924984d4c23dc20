"""An evaluation on a cluster that stands in for Ray, and what one process makes of it."""

import model_folders
import pytest
from ray_fixtures import no_ray, one_thread, put_cluster, ray  # noqa: F401  fixtures
from raycells import CELLS, invoke, rows

from kvkeep.cli import eval_run


@pytest.fixture
def on(monkeypatch):
    """Put a cluster in the place of Ray."""
    return put_cluster(monkeypatch, eval_run, eval_run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process makes of the grid, and what it prints."""
    folder = tmp_path_factory.mktemp("whole")
    with model_folders.one_thread():
        found = invoke(folder)
    assert found.exit_code == 0, found.output
    assert len(rows(folder)) == CELLS
    return folder, found.stdout

"""Evaluations on Ray: the rows are those of one process, whatever is killed. `make test-ray` runs these."""

import json
import os
import signal

import pytest
import rayjobs
from typer.testing import CliRunner

from kvkeep.cli import eval_run
from kvkeep.cli.main import app
from kvkeep.scale import cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours

GRID = (
    *("eval", "--tasks", "recall,agreement", "--policies", "full,local,h2o,tova", "--budgets", "10%,20%"),
    *("--context", 512, "--limit", 4, "--threads", 1, "--no-plots"),
)
CELLS = 2 * 7


def rows(folder):
    """The lines of a folder, without the time that they took."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in lines]


def count(folder):
    return rayjobs.count(folder / "results.jsonl")


@pytest.fixture(scope="module")
def whole(ray, tmp_path_factory):
    """What one process makes of the grid: the rows, and the tables."""
    folder = tmp_path_factory.mktemp("whole")
    job = rayjobs.command(*GRID, "-o", folder)
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert len(rows(folder)) == CELLS
    return rows(folder), out


def test_killed_workers_change_no_row(whole, tmp_path):
    job = rayjobs.command(*GRID, "-o", tmp_path, "--ray-workers", 2)
    for aim in (1, 5):
        rayjobs.wait_for(lambda: count(tmp_path) >= aim, job)  # noqa: B023  called before the next round
        assert rayjobs.kill(rayjobs.wait_for(lambda: rayjobs.workers(job), job)[0])
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert err.count("died and is replaced") == 2
    assert rows(tmp_path) == whole[0]
    assert out == whole[1]


def test_a_killed_command_and_a_stopped_one_are_resumed(whole, tmp_path):
    for end in (signal.SIGKILL, signal.SIGINT):
        before = count(tmp_path)
        job = rayjobs.command(*GRID, "-o", tmp_path, "--ray-workers", 2)
        rayjobs.wait_for(lambda: count(tmp_path) >= before + 3, job)  # noqa: B023
        others = rayjobs.family(job.pid)
        job.send_signal(end)
        code, said = rayjobs.finish(job)
        assert code == (-9 if end == signal.SIGKILL else 130), said
        rayjobs.wait_for(lambda: not rayjobs.alive(others))  # noqa: B023
    assert "run the same command again to go on" in " ".join(said.split())
    assert 6 <= count(tmp_path) < CELLS
    job = rayjobs.command(*GRID, "-o", tmp_path, "--ray-workers", 1, "--json")
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert json.loads(out)["workers"] == 1
    assert rows(tmp_path) == whole[0]


@pytest.fixture(scope="module")
def address(ray):
    """A cluster of one node with two cores."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    made = Cluster(initialize_head=True, head_node_args=node)
    yield made.address
    made.shutdown()


def refused(folder, *words):
    """What the command says that runs nothing, in this process."""
    found = CliRunner().invoke(app, [*map(str, (*GRID, "-o", folder, *words))])
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    assert not folder.exists()
    return " ".join(found.output.split())


def test_a_cluster_that_cannot_do_it_is_refused_with_the_reason(address, tmp_path, monkeypatch):
    folder, there = tmp_path / "out", ("--ray-address", address)
    said = refused(folder, *there, "--ray-workers", 9)
    assert "9 workers of 1 CPU" in said
    assert "Give --ray-workers 2" in said
    with monkeypatch.context() as patch:
        patch.setattr(eval_run, "PROCESS_BYTES", 10**14)
        said = refused(folder, *there, "--ray-workers", 2)
        assert "2 workers of 1 CPU and 100 TB each do not fit into the cluster, none would" in said
    assert "Nothing answers at --ray-address 127.0.0.1:9" in refused(
        folder, "--ray-workers", 2, "--ray-address", "127.0.0.1:9"
    )
    other = {**cluster.scout()["versions"], "kvkeep": "0.0.1"}
    monkeypatch.setattr("kvkeep.cli.cluster.check_versions", lambda found: cluster.check_versions(found, other))
    said = refused(folder, *there, "--ray-workers", 1)
    assert "has kvkeep" in said
    assert "0.0.1" in said


def test_a_running_cluster_gives_the_same_rows(address, whole, tmp_path):
    found = CliRunner().invoke(
        app, [*map(str, (*GRID, "-o", tmp_path, "--ray-workers", 2, "--ray-address", address))], env={"COLUMNS": "80"}
    )
    assert found.exit_code == 0, found.output
    assert rows(tmp_path) == whole[0]

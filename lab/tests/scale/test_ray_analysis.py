"""Analyses on Ray: the results are those of one process, whatever is killed. `make test-ray` runs these."""

import json
import os
import signal

import model_folders
import pytest
import rayjobs
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.scale import cluster
from kvkeep_lab.cli.analyze import analysis

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 80
NAMES = ("sparsity", "mlp_units", "removal", "local_global", "diversity", "position_bias", "score_change")


def records(folder):
    """The results in a folder by name, without the time that they took."""
    found = [json.loads(path.read_text()) for path in results(folder)]
    return {record["name"]: {key: value for key, value in record.items() if key != "seconds"} for record in found}


def results(folder):
    return [path for name in NAMES if (path := folder / f"{name}.json").exists()]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command without its folder."""
    text = tmp_path_factory.mktemp("text") / "fox.txt"
    text.write_text(TEXT)
    chosen = ("--max-tokens", 600, "--threads", 1, "--only", ",".join(NAMES))
    return ("analyze", model_folders.folder(), "--text", text, *chosen)


@pytest.fixture(scope="module")
def whole(ray, words, tmp_path_factory):
    """What one process makes of the analysis: its folder, and what it prints."""
    folder = tmp_path_factory.mktemp("whole")
    job = rayjobs.command(*words, "-o", folder)
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert len(results(folder)) == len(NAMES)
    return folder, out


def same(folder, whole):
    assert records(folder) == records(whole[0])
    for name in ("run.json", "index.html"):
        assert (folder / name).read_bytes() == (whole[0] / name).read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole[0].iterdir()}


def test_killed_workers_change_no_result(words, whole, tmp_path):
    job = rayjobs.command(*words, "-o", tmp_path, "--ray-workers", 2)
    for _ in range(2):
        before = len(results(tmp_path))
        rayjobs.wait_for(lambda: len(results(tmp_path)) > before, job)  # noqa: B023  called before the next round
        for pid in rayjobs.wait_for(lambda: rayjobs.workers(job), job):
            assert rayjobs.kill(pid)
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert err.count("died and is replaced") in (3, 4)  # one may have been without work
    assert "measurement groups run again" in err
    same(tmp_path, whole)
    assert out == whole[1]


def test_a_killed_command_and_a_stopped_one_are_resumed(words, whole, tmp_path):
    for end in (signal.SIGKILL, signal.SIGINT):
        before = len(results(tmp_path))
        job = rayjobs.command(*words, "-o", tmp_path, "--ray-workers", 2)
        rayjobs.wait_for(lambda: len(results(tmp_path)) > before, job)  # noqa: B023
        others = rayjobs.family(job.pid)
        job.send_signal(end)
        code, said = rayjobs.finish(job)
        assert code == (-9 if end == signal.SIGKILL else 130), said
        rayjobs.wait_for(lambda: not rayjobs.alive(others))  # noqa: B023
    assert "run the same command again to go on" in " ".join(said.split())
    assert 2 <= len(results(tmp_path)) < len(NAMES)
    job = rayjobs.command(*words, "-o", tmp_path, "--ray-workers", 1, "--json")
    out, err = job.communicate(timeout=rayjobs.STUCK_S)
    assert job.returncode == 0, err
    assert json.loads(out)["workers"] == 1
    same(tmp_path, whole)


@pytest.fixture(scope="module")
def address(ray):
    """A cluster of one node with two cores."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    made = Cluster(initialize_head=True, head_node_args=node)
    yield made.address
    made.shutdown()


def invoke(words, folder, *more):
    found = CliRunner().invoke(app, [*map(str, (*words, "-o", folder, *more))], env={"COLUMNS": "80"})
    assert "Traceback" not in found.output
    return found


def test_a_cluster_that_cannot_do_it_is_refused_with_the_reason(address, words, tmp_path, monkeypatch):
    folder, there = tmp_path / "out", ("--ray-address", address)

    def refused(*more):
        found = invoke(words, folder, *more)
        assert found.exit_code == 2, found.output
        assert not folder.exists()
        return " ".join(found.output.split())

    said = refused(*there, "--ray-workers", 7)
    assert "7 workers of 1 CPU" in said
    assert "Give --ray-workers 2, or less to each: lower --max-tokens or --threads" in said
    with monkeypatch.context() as patch:
        patch.setattr(analysis, "PROCESS_BYTES", 10**14)
        said = refused(*there, "--ray-workers", 2)
        assert "2 workers of 1 CPU and 100 TB each do not fit into the cluster, none would" in said
    assert "Nothing answers at --ray-address 127.0.0.1:9" in refused("--ray-workers", 2, "--ray-address", "127.0.0.1:9")
    other = {**cluster.scout()["versions"], "kvkeep": "0.0.1"}
    monkeypatch.setattr("kvkeep.cli.cluster.check_versions", lambda found: cluster.check_versions(found, other))
    said = refused(*there, "--ray-workers", 1)
    assert "has kvkeep" in said
    assert "0.0.1" in said


def test_a_running_cluster_gives_the_same_results(address, words, whole, tmp_path):
    found = invoke(words, tmp_path, "--ray-workers", 2, "--ray-address", address)
    assert found.exit_code == 0, found.output
    same(tmp_path, whole)

"""Servers of replicas that cannot be: each is refused on the driver, in a line that says what would work."""

import os
import subprocess
import sys
import time

import httpx
import pytest
import rayjobs
from serving import Served
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.scale import cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours


@pytest.fixture(scope="module")
def address(ray):
    """A cluster of one node with two cores."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    made = Cluster(initialize_head=True, head_node_args=node)
    yield made.address
    made.shutdown()


def refused(address, *words, replicas=2):
    """What the command says that refuses to serve, in this process."""
    asked = ["serve", "--ray-replicas", replicas, "--ray-address", address, "--port", 0, *words]
    found = CliRunner().invoke(app, [*map(str, asked)])
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    return " ".join(found.output.split())


def command(address, *words):
    """The command in a process of its own: exit code, and what it says."""
    asked = [sys.executable, "-m", "kvkeep", "serve", "--ray-address", address, "--port", "0", *map(str, words)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=rayjobs.STUCK_S, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_replicas_that_do_not_fit_are_refused_with_what_would(address):
    said = refused(address, "--threads", 1, replicas=3)
    assert "3 replicas of 1 CPU" in said
    assert "2 would" in said
    assert "Give --ray-replicas 2" in said
    assert "do not fit" in refused(address, "--budget", "4M", "--max-rows", 32)
    assert "do not fit" in refused(address, "--threads", 1, replicas="1-3")  # the most of them must


def test_another_version_on_a_node_is_refused(address, monkeypatch):

    other = {**cluster.scout()["versions"], "torch": "1.0"}
    monkeypatch.setattr("kvkeep.cli.cluster.check_versions", lambda found: cluster.check_versions(found, other))
    said = refused(address)
    assert "has torch" in said
    assert "this process has 1.0" in said


def test_replicas_that_cannot_start_say_why(address, tmp_path):
    network, tokenizer = kvkeep.load()
    with kvkeep.Engine(network, tokenizer, budget=96, rows=1, session_dir=tmp_path):
        code, said = command(address, "--ray-replicas", 1, "--session-dir", tmp_path)
    assert code == 2, said
    assert "The replicas cannot start: A server without replicas uses the session folder" in said


def test_a_killed_command_leaves_its_replicas_and_the_next_one_says_so(address, tmp_path):
    served = Served(tmp_path, "--ray-address", address, "--served-name", "left/behind", replicas="1")
    assert served.health()["rows"] == 16
    code, said = command(address, "--ray-replicas", 1, "--served-name", "left/behind")
    assert code == 2
    assert "The cluster runs an application kvkeep-left-behind already" in said
    served.process.kill()
    served.process.wait()
    code, said = command(address, "--ray-replicas", 1, "--served-name", "left/behind")
    assert code == 2
    assert "serve.delete('kvkeep-left-behind')" in said
    with cluster.joined(address, cpus=2):
        from ray import serve

        serve.delete("kvkeep-left-behind")
    again = Served(tmp_path, "--ray-address", address, "--served-name", "left/behind", replicas="1")
    assert httpx.get(f"{again.url}/v1/models", timeout=60).json()["data"][0]["id"] == "left/behind"
    again.process.terminate()
    assert again.process.wait(120) == 0, again.said
    end = time.monotonic() + 60
    with cluster.joined(address, cpus=2):
        while serve.status().applications:
            assert time.monotonic() < end
            time.sleep(0.2)
    assert not list((tmp_path / "sessions").glob("replica-*"))  # each has ended in order, and had no sessions

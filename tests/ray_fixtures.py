"""Fixtures of the tests of workers: Ray or a cluster in its place, and a machine without it.

Ray itself is in an environment of its own, `make test-ray`; elsewhere the tests that start it are skipped.
"""

import builtins
import contextlib

import model_folders
import pytest

from kvkeep.scale import driver, worker_pool
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


def put_cluster(monkeypatch, command, far):
    """Return a function that puts a cluster in the place of Ray, for a command and its work on Ray."""
    monkeypatch.setattr(command, "check_ray", lambda address: None)
    monkeypatch.setattr(driver, "joined", lambda address, cpus: contextlib.nullcontext())
    monkeypatch.setattr(far, "room_for", lambda *args, **options: (Need(), "cpu"))
    monkeypatch.setattr(worker_pool, "DEATHS", 10**6)

    def put(cluster):
        monkeypatch.setattr(worker_pool, "need_ray", lambda: cluster)
        return cluster

    return put

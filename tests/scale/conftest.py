"""Ray itself is in an environment of its own, `make test-ray`; elsewhere the tests that start it are skipped."""

import builtins

import pytest


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

"""Ray itself is in an environment of its own, `make test-ray`; elsewhere the tests that start it are skipped."""

import pytest


@pytest.fixture(scope="session")
def ray():
    return pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

"""The benchmarks' folder on the path of a test, whose modules are forgotten afterwards: others import them anew."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scripts(monkeypatch):
    """The folder of the scripts, from which they can be imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield BENCH
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(BENCH):
            del sys.modules[name]

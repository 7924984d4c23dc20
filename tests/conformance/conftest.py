"""What every question to a backend begins with."""

import pytest

from kvkeep.backends import torch as plain
from kvkeep.backends.triton import launch

from .cases import BACKENDS, backend_of


@pytest.fixture(params=BACKENDS)
def backend(request):
    return backend_of(request.param)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Torch meets its blocks in small tensors; Triton's interpreter pays for operations, whatever their size."""
    monkeypatch.setattr(plain, "BLOCK_BYTES", 2 * 4 * 4 * 17 * 3)
    monkeypatch.setattr(plain, "WIDEN_SLOTS", 8)
    if launch.interprets():
        monkeypatch.setitem(launch.DECODE, "", {1024: launch.Decode(128, 128, 4, 1)})

"""Whatever fails, a session is as after its last finished turn: random lives with faults in them."""

import pytest
from sweeps import sweep

from .session_faults import life


@pytest.mark.long
@pytest.mark.parametrize("seed", sweep(range(100), lambda seed: seed < 8))
def test_sessions_survive_faults(seed, monkeypatch):
    life(seed, monkeypatch)

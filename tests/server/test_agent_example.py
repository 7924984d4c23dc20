"""The example of an agent runs: what it leaves out is dropped, and each call reads what is new."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from .running import serve

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
ENGINE = {"conversation_memory": 2**28, "conversations": "continue", "positions": "slot"}


def test_the_memory_stays_constant_while_results_leave_it(monkeypatch, capsys):
    pytest.importorskip("agents", reason="needs openai-agents")
    with serve(budget=2048, engine=ENGINE) as server:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), server.url, "4"])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = [list(map(float, line.replace("ms", "").split())) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    prompts, cached, new, kept = ([row[place] for row in rows[2:]] for place in (1, 2, 3, 6))
    assert max(prompts) - min(prompts) < 8
    assert min(cached) > max(new)
    assert max(kept) - min(kept) < 2  # not one more conversation of this length

"""A step that fails harms nobody else, whatever fails and whenever."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import schedule, tally

TESTS = Path(__file__).parents[1]
FEW = 12


def run(first, last):
    """Schedules in a process of their own, where no annotation is checked."""
    command = [sys.executable, "-m", "engine.faults", str(first), str(last)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.long
def test_random_schedules_with_faults(no_checked_annotations):
    found = tally(schedule, 0, FEW, called="schedule")
    assert min(found["length"], found["error"], found["cancelled"], found["faults"]) > 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, FEW + 1000, 50))
def test_a_thousand_schedules(first, capsys):
    found = run(first, first + 50)
    with capsys.disabled():
        print(f"\n{found}")
    assert min(found["length"], found["error"], found["cancelled"], found["faults"]) > 5

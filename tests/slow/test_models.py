"""Every decoder of the installed transformers, tried again: minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

TOOLS = Path(__file__).parents[2] / "tools"
RECORD = TOOLS / "families" / "records" / f"{transformers.__version__}.json"

SWEEP = """
import json
from families.sweep import families, sweep
print(json.dumps([outcome.record() for outcome in sweep(families())]))
"""


def statuses(text):
    return {(one["family"], one["model"]): one["status"] for one in json.loads(text)}


@pytest.mark.slow
@pytest.mark.skipif(not RECORD.exists(), reason="this version of transformers is not recorded")
def test_every_family_does_what_the_page_says():
    done = subprocess.run([sys.executable, "-c", SWEEP], cwd=TOOLS, capture_output=True, text=True, check=True)
    assert statuses(done.stdout) == statuses(RECORD.read_text())

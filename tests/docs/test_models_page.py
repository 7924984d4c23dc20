"""The page of models agrees with its records, and the records with what a sample of families does here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

TOOLS = Path(__file__).parents[2] / "tools"
RECORD = TOOLS / "families" / "records" / f"{transformers.__version__}.json"
SAMPLE = [
    *("llama", "gemma3", "falcon_h1", "qwen2_5_vl", "deepseek_v3", "recurrent_gemma"),
    *("llama4_text", "falcon", "mamba", "pix2struct", "diffllama", "gemma3n_text"),
]


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=TOOLS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SWEEP = """
import json, sys
from families.sweep import families, sweep
pairs = [pair for pair in families() if pair[0] in sys.argv[1:] or len(sys.argv) == 1]
print(json.dumps([outcome.record() for outcome in sweep(pairs)]))
"""


def outcomes(text):
    return {(one["family"], one["model"]): one["status"] for one in json.loads(text)}


def test_the_page_is_up_to_date():
    run("import models_page as p; assert p.PAGE.read_text() == p.page(p.recorded()), 'run make docs'")


def test_the_readme_counts_the_model_types_that_run():
    page, readme = ((TOOLS.parent / name).read_text() for name in ("docs/models.md", "README.md"))
    runs = sum(map(int, re.findall(r"^(\d+) model types:$", page, flags=re.MULTILINE)))
    assert f"{runs} model types of transformers" in readme


def test_every_outcome_has_a_reason_of_the_page_and_none_is_wrong():
    code = "import models_page as p; print({p.meaning(r) for found in p.recorded().values() for r in found})"
    ends = eval(run(code))
    known = eval(run("import models_page as p; print(set(p.REASONS.values()))"))
    plain = {end for end in ends if not end.startswith(("refused: ", "not tried: "))}
    assert plain == {"runs", "generate only"}
    assert {end.removeprefix("refused: ") for end in ends if end.startswith("refused: ")} == known


@pytest.mark.skipif(not RECORD.exists(), reason="this version of transformers is not recorded")
@pytest.mark.slow
def test_a_sample_of_families_does_what_the_page_says():
    found, recorded = outcomes(run(SWEEP, *SAMPLE)), outcomes(RECORD.read_text())
    assert found == {pair: recorded[pair] for pair in found}
    assert len(found) >= len(SAMPLE) - 1

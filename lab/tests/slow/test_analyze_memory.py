"""The bound of ``kvkeep analyze``, measured on a process: memory follows the length of the text, not its square.

It takes minutes: `make test-all` runs it, `make test` does not.
"""

import resource
import subprocess
import sys

import pytest

from kvkeep.evals.task import own_sentences
from kvkeep_lab.analysis.groups import MEASUREMENTS

HEADS = 4
"""Query heads of a layer of the embedded model."""


def peak_bytes(text, tokens, output):
    """Peak resident memory of the largest process so far; call it with growing lengths."""
    walked = ",".join(kind.name for kind in MEASUREMENTS if "model" not in kind.reads)
    command = ["analyze", "--text", text, "--max-tokens", tokens, "--output", output, "--only", walked, "--json"]
    subprocess.run([sys.executable, "-m", "kvkeep", *map(str, command)], check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


@pytest.mark.slow
def test_8192_tokens_take_less_than_one_layers_matrix_more_than_1024(tmp_path):
    text = tmp_path / "text.txt"
    sentences = own_sentences(0)
    text.write_text(" ".join(next(sentences) for _ in range(2000)))
    short = peak_bytes(text, 1024, tmp_path / "short")
    long = peak_bytes(text, 8192, tmp_path / "long")
    matrix = 4 * HEADS * 8192**2
    print(f"peak resident bytes: {short} at 1024 tokens, {long} at 8192; one layer's matrix has {matrix}")
    assert long - short < matrix

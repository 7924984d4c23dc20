"""How long does loading the embedded model take, once torch and transformers are imported?

    python bench/load.py [--repeats 5]

Each repeat is a fresh process. The checksum of the weights is compared on the way.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from lib import report

CODE = """
import time, torch, transformers, transformers.models.llama.modeling_llama
start = time.perf_counter()
from kvkeep.models.load import load
from kvkeep.models import tiny
model, tokenizer = load(tiny.path())
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    seconds = [
        float(subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout)
        for _ in range(repeats)
    ]
    middle = statistics.median(seconds)
    row = [f"{middle:.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}"]
    report("Loading the embedded model", ["median s", "fastest", "slowest"], [row], {"bench": "load", "s": seconds})


if __name__ == "__main__":
    main()

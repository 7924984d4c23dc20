"""Two workers of Ray against two engines that know nothing of each other, on the same lines; medians, alternating.

python bench/workers.py                       # in the environment of make test-ray
python bench/workers.py --workers 4 --lines 2000 --repeats 5
python bench/workers.py --shape speed --lines 64       # random weights of a larger model, in place of the embedded one

Both sides have one thread per engine. Counted is the time from the first line to the last one: models are loaded, and
the cluster has been started. The engines on their own are as slow as the slower one of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib import SHAPES, config_of
from lib.cells import saved_model

from kvkeep.models import tiny

AIM = 0.9
"""The share of the engines' throughput that the workers shall reach."""


def lines(count: int, new: int) -> list[str]:
    """Prompts whose answers differ in length by a factor of two."""
    options = ({"max_new_tokens": new // 2 + n % (new // 2 + 1), "ignore_end": True} for n in range(count))
    return [
        json.dumps({"prompt": f"Once upon a time, number {n},", "options": one}) + "\n" for n, one in enumerate(options)
    ]


def start(model: str, source: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    """A job in a process of its own."""
    target.unlink(missing_ok=True)
    words = ["-m", "kvkeep", "generate", model, "--input", str(source), "--output", str(target)]
    options = ("--threads", "1", "--json", *options)
    return subprocess.Popen([sys.executable, *words, *options], stdout=subprocess.PIPE, text=True)


def tokens_per_s(jobs: list[subprocess.Popen[str]]) -> float:
    """New tokens of all jobs, by the time of the slowest."""
    found = [json.loads(job.communicate()[0]) for job in jobs]
    assert all(job.returncode == 0 for job in jobs)
    return sum(one["new_tokens"] for one in found) / max(one["seconds"] for one in found)


@contextmanager
def model_of(shape: str | None) -> Iterator[str]:
    """A folder with random weights of a shape and the embedded model's tokenizer; without one the embedded model."""
    if shape is None:
        yield str(tiny.path())
        return
    with saved_model(config_of(shape).num_hidden_layers, SHAPES[shape], shape) as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.path() / name, folder)
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--new", type=int, default=64, help="new tokens of the longest answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=[*SHAPES], help="of a random model; default: the embedded model")
    asked = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed here; make test-ray makes an environment with it.")
        return
    with model_of(asked.shape) as model, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = lines(asked.lines, asked.new)
        (folder / "all.jsonl").write_text("".join(whole))
        for part in range(asked.workers):
            (folder / f"{part}.jsonl").write_text("".join(whole[part :: asked.workers]))
        apart, together = [], []
        for _ in range(asked.repeats):
            jobs = [start(model, folder / f"{part}.jsonl", folder / f"{part}.out") for part in range(asked.workers)]
            apart.append(tokens_per_s(jobs))
            job = start(model, folder / "all.jsonl", folder / "all.out", "--ray-workers", str(asked.workers))
            together.append(tokens_per_s([job]))
            print(f"{apart[-1]:8.0f} tokens/s apart, {together[-1]:8.0f} on Ray", flush=True)
    ratio = statistics.median(together) / statistics.median(apart)
    verdict = "reached" if ratio >= AIM else "missed"
    print(f"{ratio:.3f} of {asked.workers} engines apart, by the medians; the aim of {AIM} is {verdict}")


if __name__ == "__main__":
    main()

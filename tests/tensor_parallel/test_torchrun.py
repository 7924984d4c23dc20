"""``torchrun -m kvkeep generate``: several processes give the answers of one; the first speaks; all end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import model_folders
import pytest

pytestmark = pytest.mark.slow

LIMIT_S = 240
TIMES = ("queued_s", "ttft_s", "tpot_s")


def kvkeep(*words, ranks=None):
    """The command line of one process, or of several under torchrun on a free port."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *launcher, "-m", "kvkeep", *map(str, words)]


def run(*words, ranks=None):
    hidden = {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        kvkeep(*words, ranks=ranks), capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    text = "the quick brown fox jumps over"
    lines = [
        {"prompt": text[: 5 + n], "options": {"max_new_tokens": 4 + n % 5, "temperature": n % 2}} for n in range(16)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path):
    """The lines of an output, without times."""
    found = [json.loads(line)["completion"] for line in Path(path).read_text().splitlines()]
    for one in found:
        for name in TIMES:
            del one[name]
        one["lost_mass"] = {name: value and round(value, 4) for name, value in one["lost_mass"].items()}
    return sorted(found, key=lambda one: one["line"])


def test_one_process_speaks_for_all():
    asked = ["generate", model_folders.folder(), "-p", "the quick brown fox", "--raw", "-b", "12", "--policy", "tova"]
    alone = run(*asked, "--json", "--max-new-tokens", "16")
    together = run(*asked, "--json", "--max-new-tokens", "16", ranks=2)
    assert together.returncode == 0, together.stderr
    one, two = (json.loads(done.stdout) for done in (alone, together))
    assert two["token_ids"] == one["token_ids"]
    assert two["memory"]["allocated_bytes"] < one["memory"]["allocated_bytes"]  # of the first process's heads


def test_the_pages_script_answers_once_for_all_processes(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
    (content,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(content.replace("path/to/model", str(model_folders.folder())).replace("1024", "12"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2


def test_a_batch_job_goes_on_where_it_was_killed(jsonl, tmp_path):
    """One of the processes is killed in the middle; torchrun ends the other, and the same command goes on."""
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    words = ["generate", model_folders.folder(), "-i", jsonl, "--raw", "-b", "12", "--max-rows", "1"]
    assert run(*words, "-o", alone).returncode == 0
    job = subprocess.Popen(kvkeep(*words, "-o", together, ranks=2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + LIMIT_S
    while not (together.exists() and together.stat().st_size) and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in _children(job.pid)[-1:]:
        os.kill(child, signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    assert not _children(job.pid)
    done = run(*words, "-o", together, ranks=2)
    assert done.returncode == 0, done.stderr
    for line in (*(there := answers(together)), *(expected := answers(alone))):
        line["made_by"].pop("weight_layout")  # only a model that is not split is fused
    assert there == expected


def test_refusals_are_said_once(tmp_path):
    asked = ["generate", model_folders.folder(), "-p", "the", "--raw"]
    for words, ranks, said in (
        (asked, 4, "4 processes cannot divide the 2 KV heads of LlamaConfig equally"),
        ([*asked, "-b", "-1"], 2, "--budget -1 keeps no token"),
        (["policies"], 2, "kvkeep policies runs in one"),
    ):
        done = run(*words, ranks=ranks)
        assert done.returncode != 0
        assert done.stderr.count(said) == 1, done.stderr
        assert "Error: " not in done.stderr.replace("ChildFailedError: ", "")


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]

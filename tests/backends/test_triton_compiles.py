"""The kernels compile for GPUs that are not there: Triton's interpreter accepts programs that its compiler refuses."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux alone")


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the assembler that comes with Triton may be for another one"
)

SHARED = {90: 227 * 1024}
"""Bytes of shared memory that a program may have."""


def run(script, *arguments, cache):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "half"), [(90, "bf16")])
def test_kernels_compile_without_spilling(arch, half, tmp_path):
    spilled = [(name, int(stack)) for name, _, stack in run("triton_sources.py", arch, half, cache=tmp_path)]
    names = [*2 * ["attend_split"], "merge", "merge_evict", "append", "evict", "append_codes"]
    names += ["forward", "columns"]
    assert [name for name, _ in spilled] == names
    assert max(stack for _, stack in spilled) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED)
def test_launches_fit_the_device(arch, tmp_path):
    """With the tiles of its table, for arguments of their real alignment: multiples of 16, and numbers that are 1."""
    found = run("triton_launches.py", arch, cache=tmp_path)
    assert [name for _, name, *_ in found] == [
        *3 * ["attend_split", "merge_evict", "attend_split", "merge", *3 * ["append_codes", "attend_split", "merge"]],
        *2 * ["forward", "columns"],
    ]
    for case, name, stack, shared in found:
        assert int(stack) <= 16, f"{case}: {name} spills"
        assert int(shared) <= SHARED[arch], f"{case}: {name} takes too much shared memory"

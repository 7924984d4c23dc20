"""Where the native kernel comes from: compiled once, found again, mended, and done without."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvkeep.backends.native import Native, NativeBackend, build, native, ops
from kvkeep.backends.torch import TorchBackend
from kvkeep.statistic import Nothing
from kvkeep.types import AttentionOptions, Slots

needs_the_kernel = pytest.mark.skipif(native().library is None, reason=native().detail)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvkeep"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that is quick: it hands out what a real one has made. Its runs stand in the file that is returned."""
    return fake_compiler(tmp_path, monkeypatch, f'cp "{native().detail}" "$2"')


def fake_compiler(folder, monkeypatch, work):
    log = folder / "compilations"
    log.touch()
    script = folder / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "g++ 1.0"; exit; fi\n'
        f'while [ "$1" != -o ]; do shift; done\necho once >> "{log}"\n{work}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return log


def load():
    """The kernel as a new process gets it."""
    return build.native.__wrapped__()


def libraries(cache):
    return list(cache.glob("*.so"))


@needs_the_kernel
def test_the_second_process_finds_what_the_first_compiled(cache, compiler):
    first, second = load(), load()
    assert first.library is not None
    assert second.library is not None
    assert first.detail == second.detail == str(*libraries(cache))
    assert compiler.read_text() == "once\n"
    assert [path.name for path in cache.iterdir()] == [Path(first.detail).name]  # nothing else is left behind


@needs_the_kernel
def test_another_compiler_or_processor_compiles_anew(cache, compiler, monkeypatch):
    load()
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    load()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    load()
    assert len(libraries(cache)) == 3


@needs_the_kernel
@pytest.mark.parametrize("left", [0, 1, 0.5], ids=["empty", "a byte", "half of it"])
def test_a_damaged_library_is_compiled_again(left, cache, compiler):
    load()
    (path,) = libraries(cache)
    sound = path.read_bytes()
    path.unlink()  # this process has it open: what it sees must not change
    path.write_bytes(sound[: left if isinstance(left, int) else int(left * len(sound))])
    assert load().library is not None
    assert [one.read_bytes() for one in libraries(cache)] == [sound]
    assert compiler.read_text() == "once\nonce\n"


@needs_the_kernel
def test_processes_that_compile_at_the_same_time(cache, compiler):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.detail for one in found}) == 1
    assert all(one.library is not None for one in found)
    assert len(libraries(cache)) == 1


def reason(caplog):
    """Why there is no kernel; it is logged once, at a level that nobody sees unless he asks."""
    with caplog.at_level(logging.INFO, logger="kvkeep"):
        found = load()
    assert found.library is None
    (record,) = (record for record in caplog.records if "torch does the work" in record.message)
    assert record.levelno == logging.INFO
    assert found.detail in record.message
    return found.detail


def test_no_compiler(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason(caplog) == "no C++ compiler was found (g++, clang++, c++)"


def test_a_compiler_that_fails(cache, tmp_path, monkeypatch, caplog):
    fake_compiler(tmp_path, monkeypatch, 'echo "note: x" >&2; echo "fatal error: no such machine" >&2; exit 1')
    assert reason(caplog).endswith("g++ failed: fatal error: no such machine")
    assert libraries(cache) == []


def test_a_compiler_that_makes_nonsense(cache, tmp_path, monkeypatch, caplog):
    fake_compiler(tmp_path, monkeypatch, 'echo nonsense > "$2"')
    assert reason(caplog).endswith("was compiled but cannot be loaded")


def test_a_directory_that_others_can_write_to(cache, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    assert "can be written by, somebody else" in reason(caplog)


def test_a_directory_that_cannot_be_made(cache, caplog):
    cache.write_text("a file stands where the directory should be")
    assert str(cache) in reason(caplog)


@needs_the_kernel
def test_a_kernel_that_goes_away_leaves_the_work_to_torch(monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, 16, generator=g) for T in (1, 9, 9))
    slots, now = Slots(k, v, torch.arange(9).view(1, 1, 9)), torch.tensor([[8]])

    def output(backend):
        return backend.attend(q, slots, now, statistic=Nothing(), options=AttentionOptions(scaling=0.5))[0]

    monkeypatch.setattr(ops, "native", lambda: Native(None, "not today"))
    assert torch.equal(output(NativeBackend()), output(TorchBackend()))


@needs_the_kernel
def test_the_threads_are_torchs_own(cache):
    """Two pools of threads would get in each other's way; the kernel's code must find torch's runtime."""
    code = (
        "import os, torch; from kvkeep.backends import choose; from kvkeep.statistic import Nothing\n"
        "from kvkeep.types import AttentionOptions, Slots\n"
        "torch.set_num_threads(3); torch.ones(10**7).add(1)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "q, k = torch.randn(4, 4, 1, 64), torch.randn(4, 4, 512, 64)\n"
        "slots, now = Slots(k, k, torch.arange(512).expand(4, 4, 512)), torch.full((4, 1), 511)\n"
        "backend = choose(q.device, q.dtype)\n"
        "assert backend.name == 'native'\n"
        "backend.attend(q, slots, now, statistic=Nothing(), options=AttentionOptions(scaling=0.1))\n"
        "print(before, len(os.listdir('/proc/self/task')))"
    )
    if not Path("/proc/self/task").exists():
        pytest.skip("threads are counted in /proc")
    environment = {**os.environ, "XDG_CACHE_HOME": str(Path(native().detail).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    before, after = done.stdout.split()
    assert before == after
    assert int(before) > 2

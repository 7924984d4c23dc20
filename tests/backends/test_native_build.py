"""Where the native kernel comes from: compiled once, found again, mended, and done without."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvkeep
from kvkeep import backends
from kvkeep.attention_stats import Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends.native import Native, NativeBackend, bindings, build, levels, native
from kvkeep.backends.torch import TorchBackend
from kvkeep.types import AttentionOptions, Phase, Slots

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


@pytest.fixture(autouse=True)
def no_wheel(monkeypatch):
    """Without libraries of a wheel, which would take the place of a compiled one."""
    monkeypatch.setattr(build, "_packaged", lambda: None)


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
    monkeypatch.setattr(levels, "processor", lambda: "another one")
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


def test_a_library_that_another_process_has_just_removed_is_none(cache):
    assert build._opened(cache / "kernel-gone.so") is None


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


def test_a_compiler_whose_complaint_is_no_utf8(cache, tmp_path, monkeypatch, caplog):
    fake_compiler(tmp_path, monkeypatch, "printf 'fatal error: \\377\\376 caf\\351\\n' >&2; exit 1")
    assert reason(caplog).endswith("g++ failed: fatal error: \ufffd\ufffd caf\ufffd")


COMPLAINTS = {
    "an old compiler": "g++: error: unrecognized command line option '-std=c++17'",
    "a compiler without OpenMP": "clang: error: unsupported option '-fopenmp'",
    "an ARM processor that it does not know": "error: unknown value 'native' for '-march'",
}


@pytest.mark.parametrize("complaint", COMPLAINTS.values(), ids=COMPLAINTS.keys())
def test_without_a_kernel_a_line_says_so_and_the_same_tokens_stay(cache, tmp_path, monkeypatch, caplog, complaint):
    fake_compiler(tmp_path, monkeypatch, f'echo "{complaint}" >&2; exit 1')
    monkeypatch.setattr(levels, "processor", lambda: "aarch64\nFeatures : fp asimd\nCPU part : 0xd0c")
    held = {"kernel": kept()}
    assert reason(caplog).endswith(complaint)
    found = load()  # the failure is remembered
    for module in (bindings, backends):
        monkeypatch.setattr(module, "native", lambda: found)
    assert backends.choose(torch.device("cpu"), torch.float32).name == "torch"
    assert complaint in backends.why(torch.device("cpu"), torch.float32)
    held["torch"] = kept()
    for policy, positions in held["torch"].items():
        assert torch.equal(positions, held["kernel"][policy])


def kept():
    """The positions that stay under several policies after a prompt and some tokens, in order."""
    found = {}
    for policy in ("h2o", "scissorhands", "ahakv:recent=3", "snapkv:window=4", "tova"):
        g = torch.Generator().manual_seed(7)
        layer = kvkeep.Layer(kvkeep.parse(policy), 16)
        for T in (33, *(1,) * 20):
            new = (torch.randn(2, heads, T, 16, generator=g) for heads in (4, 2, 2))
            phase = Phase.PREFILL if T > 1 else Phase.DECODE
            layer.step(*new, options=AttentionOptions(scaling=0.3), phase=phase)
        found[policy] = layer.store.positions.sort(dim=-1).values
    return found


HANGS = {"compiling": "sleep 60", "with a child that hangs": "sleep 60 & wait", "mute": "exec sleep 60 >/dev/null 2>&1"}


@pytest.fixture
def short(monkeypatch):
    """Little patience."""
    monkeypatch.setattr(build, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.2)


@pytest.mark.parametrize("work", HANGS.values(), ids=HANGS.keys())
def test_a_compiler_that_hangs_is_ended_and_the_user_learns_what_is_waited_for(
    work, cache, tmp_path, monkeypatch, caplog, short
):
    alive = tmp_path / "alive"
    log = fake_compiler(tmp_path, monkeypatch, f'(while echo >> "{alive}"; do sleep 0.02; done) & {work}')
    assert "did not end within 0.2 s" in reason(caplog)
    assert log.read_text() == "once\n"
    assert any(one.levelno == logging.WARNING and "compile the native kernel" in one.message for one in caplog.records)
    assert alive.exists()
    before = alive.stat().st_size
    time.sleep(0.1)
    assert alive.stat().st_size == before  # its whole group of processes is gone


def test_a_compiler_that_hangs_when_it_is_asked_for_its_version(cache, tmp_path, monkeypatch, caplog, short):
    log = fake_compiler(tmp_path, monkeypatch, "")
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(f'#!/bin/sh\necho once >> "{log}"; sleep 60')
    assert "did not end within" in reason(caplog)
    caplog.clear()
    assert "did not end within" in reason(caplog)
    assert log.read_text() == "once\n"


@pytest.mark.parametrize("work", ["echo 'an error' >&2; exit 1", 'echo nonsense > "$2"'], ids=["fails", "nonsense"])
def test_what_failed_is_not_tried_again_by_another_process_for_an_hour(work, cache, tmp_path, monkeypatch, caplog):
    log = fake_compiler(tmp_path, monkeypatch, work)
    first = reason(caplog)
    caplog.clear()
    again = reason(caplog)
    assert again.startswith(first)
    (failure,) = cache.glob("failed-*.txt")
    assert f"remove {failure} to try again" in again
    assert log.read_text() == "once\n"
    os.utime(failure, (0, failure.stat().st_mtime - 3601))
    caplog.clear()
    reason(caplog)
    assert log.read_text() == "once\nonce\n"


@needs_the_kernel
def test_another_compiler_is_tried_after_one_that_failed(cache, tmp_path, monkeypatch, caplog):
    fake_compiler(tmp_path, monkeypatch, "exit 1")
    reason(caplog)
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(compiler.read_text().replace("exit 1", f'cp "{native().detail}" "$2"'))
    assert load().library is not None


def test_a_compiler_that_makes_nonsense(cache, tmp_path, monkeypatch, caplog):
    fake_compiler(tmp_path, monkeypatch, 'echo nonsense > "$2"')
    assert reason(caplog).endswith("was compiled but cannot be loaded")


def test_a_system_that_does_not_say_who_can_write_to_a_directory(monkeypatch):
    monkeypatch.setattr(build, "os", SimpleNamespace(name="nt"))
    with pytest.raises(build._UnavailableError, match="only POSIX systems"):
        build._folder()


def test_a_directory_that_others_can_write_to(cache, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    assert "can be written by, somebody else" in reason(caplog)


def as_somebody_else(monkeypatch, *paths):
    """Files and folders that seem to belong to somebody else, as far as `stat` tells."""
    for name in ("stat", "lstat"):
        honest = getattr(Path, name)

        def seen(path, *args, honest=honest, **kwargs):
            status = honest(path, *args, **kwargs)
            if path not in paths:
                return status
            return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))

        monkeypatch.setattr(Path, name, seen)


def test_a_directory_of_somebody_else(cache, monkeypatch, caplog):
    cache.mkdir(mode=0o700)
    as_somebody_else(monkeypatch, cache)
    assert "belongs to" in reason(caplog)


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_directory_above_that_others_can_write_to(mode, tmp_path, monkeypatch, caplog):
    """Whoever can write there can exchange what stands in it."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    monkeypatch.delenv(backends.SWITCH, raising=False)
    assert reason(caplog) == f"{above} belongs to, or can be written by, somebody else"


def test_a_directory_above_of_somebody_else(cache, tmp_path, monkeypatch, caplog):
    as_somebody_else(monkeypatch, tmp_path)
    assert reason(caplog).startswith(f"{tmp_path} belongs to")


@needs_the_kernel
def test_a_link_to_a_directory_is_judged_by_where_it_leads(tmp_path, monkeypatch, compiler, caplog):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(open_to_all)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    monkeypatch.delenv(backends.SWITCH, raising=False)
    assert "can be written by" in reason(caplog)


def hand_over(path, monkeypatch):
    as_somebody_else(monkeypatch, path)


def open_up(path, monkeypatch):
    path.chmod(0o766)


def link(path, monkeypatch):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@needs_the_kernel
@pytest.mark.parametrize("change", [hand_over, open_up, link])
def test_a_kernel_that_somebody_else_could_have_put_there_is_not_loaded(change, cache, compiler, monkeypatch):
    load()
    (path,) = libraries(cache)
    change(path, monkeypatch)
    opened = []
    honest = build._opened
    monkeypatch.setattr(build, "_opened", lambda path: opened.append(honest(path)) or opened[-1])
    load()
    assert opened[0] is None
    assert compiler.read_text() == "once\nonce\n"


def test_a_directory_that_cannot_be_made(cache, caplog):
    cache.write_text("a file stands where the directory should be")
    assert str(cache) in reason(caplog)


@needs_the_kernel
def test_a_kernel_that_goes_away_leaves_the_work_to_torch(monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, 16, generator=g) for T in (1, 9, 9))
    slots, now = Slots(k, v, torch.arange(9).view(1, 1, 9)), torch.tensor([[8]])

    def output(backend):
        return backend.attend(
            AttentionInputs(q, slots, now, statistic=Nothing(), options=AttentionOptions(scaling=0.5))
        )[0]

    monkeypatch.setattr(bindings, "native", lambda: Native(None, "not today"))
    assert torch.equal(output(NativeBackend()), output(TorchBackend()))


@pytest.mark.slow
@needs_the_kernel
def test_the_threads_are_torchs_own(cache):
    """Two pools of threads would get in each other's way; the kernel's code must find torch's runtime."""
    code = (
        "import os, torch; from kvkeep.backends import choose; from kvkeep.attention_stats import Nothing\n"
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

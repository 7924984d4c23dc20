"""Loads the kernel: from the wheel that was installed, or compiled for this machine at first use.

A wheel for a platform has a library for each level of processors, and the best one that this processor runs is loaded.
Where the package has none (an editable install, a system without such a wheel) the kernel is compiled and kept in the
user's cache directory.

Nothing here raises on a machine that can do neither: there the package runs on torch alone, and `native().detail` says
why. A compiler that fails or hangs is not tried again for an hour, by any process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvkeep.backends.native import levels
from kvkeep.backends.native.levels import COMPILERS, HEADERS, SOURCES

NAMES = (
    *("attend", "prefill", "step", "write", "expire", "count_over", "evict"),
    *("products", "unpack", "gated", "norm", "before", "behind", "model_step"),
    "has_squares",
)
FUNCTIONS = tuple(f"kvkeep_{name}" for name in NAMES)

FLAGS = (*levels.FLAGS, "-march=native", "-shared")

_PATIENCE_S = 5
"""Seconds of waiting for the compiler after which the user is told; it takes about as long on a usual machine."""

_TIMEOUT_S = 180
"""Seconds after which a compiler hangs; on two cores of a server it takes 15 to 20."""

_RETRY_S = 3600
"""Seconds for which a failed attempt is not repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Native:
    """The kernel, or the reason why there is none.

    Attributes:
        library: the loaded library; ``None`` if there is none.
        detail: the library's file, or why there is none.
    """

    library: ctypes.CDLL | None
    detail: str


class _UnavailableError(Exception):
    """There can be no kernel on this machine; the message says why."""


@functools.cache
def native() -> Native:
    """Return the kernel, or why there is none; nothing is raised. Where the package brings none, the first call on a
    machine compiles it in some seconds; later calls of a process return the same object.
    """
    try:
        return _packaged() or _load()
    # a RuntimeError: the user has no home folder
    except (_UnavailableError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.info("The native kernel is not available, torch does the work: %s", error)
        return Native(None, str(error))


def _packaged() -> Native | None:
    """Return the best kernel of the wheel that this processor runs; ``None`` if the package brings none.

    Who can write there can change the package itself, so unlike the cache directory it is trusted.
    """
    for level in levels.runnable(platform.machine(), levels.features()):
        for path in levels.libraries(level.name):
            try:
                return Native(_bound(path), str(path))
            except (OSError, AttributeError) as error:
                _log.warning("The kernel %s cannot be loaded, and a slower one takes its place: %s.", path, error)
    return None


def _load() -> Native:
    """Return the kernel, compiled now if need be. A failure is written down, so that it is not repeated in each
    process.

    Raises:
        _UnavailableError: there is no compiler, an attempt has failed a short time ago, or this one fails.
    """
    compiler = _compiler()
    folder = _folder()
    failure = folder / f"failed-{_attempt(compiler)}.txt"
    _check_failure(failure)
    try:
        return _found_or_made(compiler, folder)
    except _UnavailableError as error:
        failure.write_text(str(error), encoding="utf-8", errors="replace")
        raise


def _found_or_made(compiler: str, folder: Path) -> Native:
    """Return the kernel that lies compiled in the cache folder, or compile it. Damaged files of it are removed.

    Raises:
        _UnavailableError: the kernel cannot be compiled or loaded.
    """
    key = _key(compiler)
    for path in levels.libraries(key, folder):
        if (library := _opened(path)) is not None:
            return Native(library, str(path))
        _log.info("The compiled kernel %s is damaged, gone, or somebody else's; compiling again.", path)
        path.unlink(missing_ok=True)
    path = _compile(compiler, folder, key)
    library = _opened(path)
    if library is None:
        raise _UnavailableError(f"{path} was compiled but cannot be loaded")
    return Native(library, str(path))


def _check_failure(failure: Path) -> None:
    """Refuse to repeat an attempt to compile that failed a short time ago, in this process or another.

    Remove the note of an older failure; do nothing without one.

    Raises:
        _UnavailableError: the attempt failed within the last hour.
    """
    try:
        age = time.time() - failure.stat().st_mtime
        reason = failure.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # there was no such attempt
        return
    if 0 <= age < _RETRY_S:  # below 0, the clock was put back, and the age says nothing
        raise _UnavailableError(f"{reason} ({age / 60:.0f} minutes ago; remove {failure} to try again now)")
    failure.unlink(missing_ok=True)


def _compiler() -> str:
    """Return the path of the first C++ compiler that is found.

    Raises:
        _UnavailableError: there is none.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise _UnavailableError(f"no C++ compiler was found ({', '.join(COMPILERS)})")


def _folder() -> Path:
    """Make the cache directory and return it. Code is loaded from it, so only this user may be able to write to it.

    Raises:
        _UnavailableError: somebody else can write to it or replace it, or the system does not say who can.
    """
    if os.name != "posix":
        raise _UnavailableError("only POSIX systems say who can write to the cache directory")
    base = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification: a relative path is to be ignored
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvkeep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        if not _is_safe(place.stat(), above=place != folder):
            raise _UnavailableError(f"{place} belongs to, or can be written by, somebody else")
    return folder


def _is_safe(status: os.stat_result, *, above: bool = False) -> bool:
    """Return whether only this user can write to the file or folder of this status.

    With ``above`` the folder may belong to the system, too, and the user's own group may write there, or everybody if
    it has the sticky bit, such as /tmp: there nobody can replace the files of others.
    """
    mine, others = status.st_uid == os.getuid(), status.st_mode & 0o022  # the group and all others may write
    if not above:
        return mine and not others
    if status.st_mode & stat.S_ISVTX:
        return mine or status.st_uid == 0
    # many systems give each user a group of their own, and let it write to all that they make
    own_group = status.st_gid == os.getgid() and not status.st_mode & 0o002
    return (mine or status.st_uid == 0) and (not others or own_group)


def _attempt(compiler: str) -> str:
    """Return the name of an attempt to compile, for the note of its failure: a digest of sources, flags, processor and
    the compiler's file. The compiler is not run, as it may be what fails.
    """
    status = os.stat(compiler)
    return levels.digest(_inputs(f"{compiler} {status.st_mtime_ns} {status.st_size}".encode()))


def _key(compiler: str) -> str:
    """Return the name of the program that this compiler makes of the sources for this processor: a digest of all that
    it depends on. The compiler is run for its version.
    """
    return levels.digest(_inputs(_run(compiler, ["--version"])))


def _inputs(compiler: bytes) -> bytes:
    """Return everything that the compiled program depends on as bytes: sources, flags, processor, and what ``compiler``
    says of the compiler.
    """
    sources = (path.read_bytes() for path in [*SOURCES, *HEADERS])
    return b"\0".join((*sources, compiler, " ".join(FLAGS).encode(), levels.processor().encode()))


def _run(compiler: str, arguments: list[str]) -> bytes:
    """Run the compiler, and return its standard output.

    Raises:
        _UnavailableError: the compiler failed, or did not end in time; then its whole process group is killed.
    """
    process = subprocess.Popen(
        [compiler, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            out, complaints = _wait(process, compiler)
        except BaseException:  # also Ctrl-C, which does not reach a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = complaints.decode("utf-8", "replace").splitlines()
        raise _UnavailableError(f"{compiler} failed: {next((line for line in lines if 'error' in line), 'no message')}")
    return out


def _wait(process: subprocess.Popen[bytes], compiler: str) -> tuple[bytes, bytes]:
    """Wait for a process to end, and return its output and errors.

    After some seconds the log says what is waited for.

    Raises:
        _UnavailableError: the process did not end in time.
    """
    try:
        return process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        _log.warning(
            "Waiting for %s to compile the native kernel, once, for at most %d s. KVKEEP_BACKEND=torch does without.",
            *(compiler, _TIMEOUT_S),
        )
    try:
        return process.communicate(timeout=_TIMEOUT_S - _PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise _UnavailableError(f"{compiler} did not end within {_TIMEOUT_S} s") from error


def _compile(compiler: str, folder: Path, key: str) -> Path:
    """Compile into a temporary folder in ``folder``, move the library to its place as a whole, so that no other process
    sees a part of it, and return its path. ``key`` is the program's name.
    """
    _log.info("Compiling the native kernel with %s; this takes some seconds, once.", compiler)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "kernel.so"
        _run(compiler, [*FLAGS, *map(str, SOURCES), "-o", str(built)])
        path = folder / levels.library_name(key, built.read_bytes())
        built.replace(path)
    return path


def _opened(path: Path) -> ctypes.CDLL | None:
    """Load a library of the cache; return ``None`` unless it belongs to this user and can be loaded, see `_bound`.

    One that is gone, since another process has found it damaged and removed it, cannot.
    """
    try:
        status = path.lstat()  # of a link itself, which is no regular file: it could lead anywhere
        return _bound(path) if stat.S_ISREG(status.st_mode) and _is_safe(status) else None
    except (OSError, AttributeError):
        return None


def _bound(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions.

    A library of a wheel takes the functions of OpenMP from the runtime that torch has loaded.

    Raises:
        OSError: the file is not whole, is no library, or needs something that is not there.
        AttributeError: it lacks a function of the kernel.
    """
    if levels.library_name(path.name.removeprefix("kernel-").partition(".")[0], path.read_bytes()) != path.name:
        raise OSError("it is damaged")  # a file that was cut off would end the process
    library = ctypes.CDLL(str(path))
    for function in [library[name] for name in FUNCTIONS]:  # each takes one packed struct; 0: it has done its work
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return library

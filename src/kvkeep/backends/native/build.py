"""Compile the kernel for this machine when it is first used, keep it in the user's cache directory, and load it.

Nothing here raises for a machine that cannot: without a compiler the package runs on torch alone, and `native().detail`
says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
COMPILERS = ("g++", "clang++", "c++")
FUNCTIONS = ("kvkeep_attend", "kvkeep_write", "kvkeep_expire", "kvkeep_count_over", "kvkeep_evict")

# without -ffast-math: see the head of vectors.h
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")

_TIMEOUT_S = 120
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Native:
    """The kernel, or the reason why there is none.

    Attributes:
        library: the loaded library; ``None`` where torch does the work.
        detail: the library's file, or why there is none.
    """

    library: ctypes.CDLL | None
    detail: str


class _UnavailableError(Exception):
    """The kernel cannot be had on this machine; the message says why."""


@functools.cache
def native() -> Native:
    """Load the kernel, which takes some seconds of compilation the first time on a machine."""
    try:
        return _load()
    except (_UnavailableError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.info("The native kernel is not available, torch does the work: %s", error)
        return Native(None, str(error))


def _load() -> Native:
    compiler = _compiler()
    folder = _folder()
    key = _key(compiler)
    for path in sorted(folder.glob(f"kernel-{key}-*.so")):
        if (library := _opened(path)) is not None:
            return Native(library, str(path))
        _log.info("The compiled kernel %s is damaged; compiling again.", path)
        path.unlink(missing_ok=True)
    path = _compile(compiler, folder, key)
    library = _opened(path)
    if library is None:
        raise _UnavailableError(f"{path} was compiled but cannot be loaded")
    return Native(library, str(path))


def _compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise _UnavailableError(f"no C++ compiler was found ({', '.join(COMPILERS)})")


def _folder() -> Path:
    """The cache directory; code is loaded from it, so nobody else may be able to write there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvkeep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if os.name != "posix" or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise _UnavailableError(f"{folder} belongs to, or can be written by, somebody else")
    return folder


def _key(compiler: str) -> str:
    """Name of the sources as this compiler translates it for this processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    parts = (
        *(path.read_bytes() for path in [*SOURCES, *HEADERS]),
        version,
        " ".join(FLAGS).encode(),
        _processor().encode(),
    )
    return _digest(b"\0".join(parts))


def _processor() -> str:
    """What ``-march=native`` depends on."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(names))])


def _compile(compiler: str, folder: Path, key: str) -> Path:
    """Compile beside the final place and rename: another process sees the whole file or none."""
    _log.info("Compiling the native kernel with %s; this takes some seconds, once.", compiler)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "kernel.so"
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise _UnavailableError(f"{compiler} failed: {complaint}")
        path = folder / f"kernel-{key}-{_digest(built.read_bytes())}.so"
        built.replace(path)
    return path


def _opened(path: Path) -> ctypes.CDLL | None:
    """Load a library whose content is what its name says: opening half a file can end the process."""
    if path.stem.rpartition("-")[2] != _digest(path.read_bytes()):
        return None
    try:
        library = ctypes.CDLL(str(path))
        functions = [library[name] for name in FUNCTIONS]
    except (OSError, AttributeError):
        return None
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return library


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

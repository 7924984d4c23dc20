"""What the kernel is compiled with, and the levels of processors that a wheel has libraries for.

`kvkeep.backends.native.build` compiles for this machine alone, with ``-march=native``. The build hook of the wheel,
``hatch_build.py``, compiles once per `Level`. The hook executes this file by its path in an environment without
kvkeep's dependencies, so this file imports the standard library only.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
"""Sources and headers of the kernel; in a wheel for a platform its libraries, too."""

SOURCES = sorted(FOLDER.glob("*.cpp"))
HEADERS = sorted(FOLDER.glob("*.h"))
COMPILERS = ("g++", "clang++", "c++")

# without -ffast-math: see the head of vectors.h
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")


class Toolchain(NamedTuple):
    """What a system's compilers take to make a library of a wheel.

    Attributes:
        openmp: what stands for ``-fopenmp``.
        link: flags of the linker. The functions of OpenMP stay undefined: they are those of the runtime that torch has
            loaded.
    """

    openmp: tuple[str, ...]
    link: tuple[str, ...]


TOOLCHAINS = {
    "Linux": Toolchain(("-fopenmp",), ("-shared", "-Wl,-s")),
    # Apple's Clang knows OpenMP behind its preprocessor only, and needs omp.h on CPATH
    "Darwin": Toolchain(("-Xpreprocessor", "-fopenmp"), ("-dynamiclib", "-undefined", "dynamic_lookup", "-Wl,-x")),
}
"""System, as `platform.system` names it → its compilers. Wheels of other systems have no kernel."""


class Level(NamedTuple):
    """Instructions that a library is compiled for.

    Attributes:
        name: of the level, in the name of the library's file, see `library_name`.
        machine: the architecture, as `platform.machine` names it.
        flags: of GCC and Clang.
        features: of the processor, as ``/proc/cpuinfo`` names them; a processor that has them all runs the library.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


# the levels of the x86-64 psABI; /proc/cpuinfo calls sse3 pni, and lzcnt abm
_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_bf16", "amx_tile"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")

LEVELS = (
    Level("x86-64-v4-amx", "x86_64", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), _AMX),
    Level("x86-64-v4-bf16", "x86_64", _BF16_FLAGS, _BF16),
    Level("x86-64-v4-vnni", "x86_64", _VNNI_FLAGS, _VNNI),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64", "x86_64", ("-march=x86-64",), frozenset()),
    Level("aarch64", "aarch64", (), frozenset()),
    Level("arm64", "arm64", (), frozenset()),  # what macOS calls the same architecture
)
"""All levels, the best of each architecture first. The macros that the headers test tell them apart."""


def library_name(program: str, content: bytes) -> str:
    """Return the name of a library's file, which tells whether the file is whole.

    Args:
        program: a level, or whatever else the library was compiled for; without a dot.
        content: of the file.
    """
    return f"kernel-{program}.{digest(content)}.so"


def libraries(program: str, folder: Path | None = None) -> list[Path]:
    """Return the files of a library; none if there is no such file. The folder is the package's own by default."""
    return sorted((FOLDER if folder is None else folder).glob(f"kernel-{program}.*.so"))


def digest(content: bytes) -> str:
    """Return the digest of a file's content, or of whatever a name should tell apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def runnable(machine: str, features: frozenset[str]) -> list[Level]:
    """Return the levels that a processor of an architecture with these features runs, the best one first."""
    return [level for level in LEVELS if level.machine == machine and level.features <= features]


def features() -> frozenset[str]:
    """Return the features of this machine's processor; none where the system does not tell."""
    lines = (line.partition(":") for line in processor().splitlines())
    return frozenset(
        word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split()
    )


def processor() -> str:
    """Return the description of the processor that ``-march=native`` depends on."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        # the first core stands for all
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(names))])

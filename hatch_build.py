"""Compiles the native kernel into the wheel, once for each level of processors.

Without a C++ compiler, in an editable install, and on systems other than Linux and macOS the wheel has no libraries,
fits every system, and the kernel is compiled at first use. ``HATCH_BUILD_NO_HOOKS=true`` builds such a wheel anywhere.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "kvkeep/backends/native"
TIMEOUT_S = 300
"""Seconds after which a compiler hangs."""


class KernelBuild(BuildHookInterface):
    """Adds the libraries to the wheel, and names the platform in its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the levels of this machine's architecture, and let the wheel have what was made."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvkeep-build-")  # goes with the process at the latest
        kernel = runpy.run_path(os.path.join(self.root, "src", PACKAGE, "levels.py"))
        if self.target_name != "wheel" or version == "editable" or platform.system() not in kernel["TOOLCHAINS"]:
            return
        levels = [level for level in kernel["LEVELS"] if level.machine == platform.machine()]
        compiler = next(filter(None, map(shutil.which, kernel["COMPILERS"])), None)
        if compiler is None:
            self.app.display_warning("No C++ compiler was found, so the wheel has no native kernel.")
            return
        folder = Path(self._scratch.name)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = list(pool.map(lambda level: compiled(compiler, kernel, level, folder), levels))
        for level, failure in zip(levels, failures, strict=True):
            if failure is None:
                library = folder / f"{level.name}.so"
                name = kernel["library_name"](level.name, library.read_bytes())
                build_data["force_include"][str(library)] = f"{PACKAGE}/{name}"
            else:
                self.app.display_warning(f"The wheel has no kernel for {level.name}: {failure}")
        if not all(failures):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder with the libraries."""
        self._scratch.cleanup()


def compiled(compiler: str, kernel: dict[str, Any], level: Any, folder: Path) -> str | None:
    """Compile the library of a level into a folder, under the level's name; return why that failed, or ``None``.

    It is linked without a runtime of OpenMP: it takes the functions of the one that torch has loaded, since two pools
    of threads would hinder each other, and not every machine has a second one.
    """
    system, (source,) = kernel["TOOLCHAINS"][platform.system()], kernel["SOURCES"]
    flags = [word for flag in kernel["FLAGS"] for word in (system.openmp if flag == "-fopenmp" else (flag,))]
    objects, library = folder / f"{level.name}.o", folder / f"{level.name}.so"
    for command in (
        [compiler, *flags, *level.flags, "-c", str(source), "-o", str(objects)],
        [compiler, *system.link, str(objects), "-o", str(library)],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            return next((line for line in error.stderr.splitlines() if "error" in line), str(error))
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return None


def platform_tag() -> str:
    """Return the tag of systems that run what is linked here: Linux with this version of glibc, or a later one; macOS
    from ``MACOSX_DEPLOYMENT_TARGET`` on, as the compiler.
    """
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")  # "glibc 2.36"
    except (ValueError, OSError):  # another C library
        name, version = "", ""
    if name == "glibc":
        return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")

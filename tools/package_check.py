"""Check what is in the wheels and sdists of kvkeep and kvkeep-lab.

python tools/package_check.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = {
    "kvkeep": [
        "README.md",
        "LICENSE",
        "NOTICE",
        "pyproject.toml",
        "hatch_build.py",
        "src/kvkeep/py.typed",
        "conftest.py",
        "docs/index.md",
        "lab/pyproject.toml",
    ],
    "kvkeep_lab": ["README.md", "LICENSE", "pyproject.toml", "hatch_build.py", "src/kvkeep_lab/py.typed"],
}
"""Package → files of its sdist; a wheel has all files of the package."""


def sources(package: str) -> set[str]:
    """The files of a package, as they are called in a wheel."""
    home = ROOT / ("src" if package == "kvkeep" else "lab/src")
    found = (path for path in (home / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(home).as_posix() for path in found if path.suffix not in (".pyc", ".so")}


def check(folder: Path, package: str) -> list[str]:
    """What is wrong with the wheel and the sdist of a package in a folder."""
    wheels, sdists = list(folder.glob(f"{package}-*.whl")), list(folder.glob(f"{package}-*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [
            f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists of {package}, not one of each. "
            "Build them: make package."
        ]
    (wheel,), (sdist,) = wheels, sdists
    inside = set(zipfile.ZipFile(wheel).namelist())
    missing = [f"{wheel.name} lacks {name}" for name in sorted(sources(package) - inside)]
    foreign = [name for name in sorted(inside) if not name.startswith((f"{package}/", f"{package}-"))]
    kernels = [name for name in inside if name.endswith(".so")]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    return [
        *missing,
        *([f"{wheel.name} names no platform, and has {kernels[0]}"] if kernels and "-any" in wheel.name else []),
        *([f"{wheel.name} names a platform, and has no kernel"] if not kernels and "-any" not in wheel.name else []),
        *(f"{wheel.name} has {name}, which is no part of the package" for name in foreign),
        *(f"{sdist.name} lacks {name}" for name in WANTED[package] if name not in packed),
        *(
            f"{sdist.name} has {name}"
            for name in sorted(packed)
            if "/.venv" in name or name.startswith(("site/", "dist/"))
        ),
    ]


if __name__ == "__main__":
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    sys.exit("\n".join(line for package in WANTED for line in check(dist, package)) or None)

"""Check what is in a wheel and an sdist.

python tools/package_check.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources() -> set[str]:
    """The files of the package, as they are called in a wheel."""
    found = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in found if path.suffix not in (".pyc", ".so")}


def check(folder: Path) -> list[str]:
    """What is wrong with the wheel and the sdist of a folder."""
    wheels, sdists = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [
            f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists, not one of each. Build them: make package."
        ]
    (wheel,), (sdist,) = wheels, sdists
    inside = set(zipfile.ZipFile(wheel).namelist())
    missing = [f"{wheel.name} lacks {name}" for name in sorted(sources() - inside)]
    foreign = [name for name in sorted(inside) if not name.startswith(("kvkeep/", "kvkeep-"))]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["README.md", "LICENSE", "pyproject.toml", "src/kvkeep/py.typed", "tests/conftest.py", "docs/index.md"]
    return [
        *missing,
        *(f"{wheel.name} has {name}, which is no part of the package" for name in foreign),
        *(f"{sdist.name} lacks {name}" for name in wanted if name not in packed),
        *(
            f"{sdist.name} has {name}"
            for name in sorted(packed)
            if "/.venv" in name or name.startswith(("site/", "dist/"))
        ),
    ]


if __name__ == "__main__":
    wrong = check(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
    sys.exit("\n".join(wrong) or None)

"""Print the requirements of pyproject.toml, one per line, for pip.

python tools/requirements.py EXTRA...              those of extras alone, without the library's own
python tools/requirements.py --lowest EXTRA...     the library's and the extras', each at the oldest version it allows
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNNEEDED = ("mypy", "ruff", "triton")
"""Left out at the lower end: linters, and a compiler that belongs to one version of torch."""


def of_extras(names: list[str]) -> list[str]:
    """The requirements of extras."""
    extras = project()["optional-dependencies"]
    if unknown := set(names) - set(extras):
        sys.exit(f"pyproject.toml has no extra {', '.join(sorted(unknown))}. There are {', '.join(extras)}.")
    return [one for name in names for part in extras[name] for one in _unfolded(part)]


def _unfolded(requirement: str) -> list[str]:
    """A requirement, or those of the library's own extras where it names them."""
    own = re.fullmatch(r"kvkeep\[([\w,-]+)\]", requirement)
    return of_extras(own[1].split(",")) if own else [requirement]


def lowest(names: list[str]) -> list[str]:
    """Every requirement of the library and of extras, pinned to the oldest version that it allows."""
    found = {}
    for one in [*project()["dependencies"], *of_extras(names)]:
        name, parts, bound = re.match(r"([\w-]+)(\[[\w,-]+\])?>=([\w.]+)", one).groups(default="")
        if name not in UNNEEDED:
            found.setdefault(name, f"{name}{parts}=={bound}")
    return list(found.values())


def project() -> dict:
    """The table ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--lowest"]
    print("\n".join((lowest if "--lowest" in sys.argv else of_extras)(words)))

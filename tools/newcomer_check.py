"""Run the README from top to bottom as a newcomer: a new environment, an empty home, without a compiler and with one.

python tools/newcomer_check.py                 make an environment, install torch and this clone, run everything
python tools/newcomer_check.py --venv DIR      run with an environment that exists

The embedded model stands for models of the hub, and numbers are small (`tools/run_snippets.py`). Commands of ``make``
are left to `make demo` and `make test` themselves.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import run_snippets

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang(\+\+)?|c89|c99)(-[\d.]+)?$")


def install(folder: Path) -> Path:
    """Make an environment with this clone in it, and return its folder."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for what in ([TORCH], [f"{ROOT}[server]", str(ROOT / "lab")]):
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *what], check=True)
    return venv


def tools_without_compiler(folder: Path) -> str:
    """Make a folder of links to all programs on PATH that are no compiler, and return it."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not COMPILER.match(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def check(venv: Path, folder: Path, path: str) -> bool:
    """Run the README in an empty home with these programs on PATH, and return whether everything ended well."""
    home, place = folder / "home", folder / "place"
    for new in (home, place):
        new.mkdir(parents=True)
    run_snippets.prepare(place)
    environment = {"HOME": str(home), "PATH": f"{venv / 'bin'}{os.pathsep}{path}", "HF_HUB_OFFLINE": "1"}
    environment |= {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    where = "import kvkeep.models, pathlib; print(pathlib.Path(kvkeep.models.__file__).parent / 'tiny')"
    python = str(venv / "bin" / "python")
    asked = subprocess.run([python, "-c", where], env=environment, capture_output=True, text=True, check=True)
    page = run_snippets.PageRun(place, asked.stdout.strip(), environment, print)
    return not page.run((ROOT / "README.md").read_text())


def main() -> int:
    """Run the README twice, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, help="an environment with kvkeep[server]; without it, a new one is made")
    given = parser.parse_args().venv
    if given is not None and not (given / "bin" / "kvkeep").exists():
        parser.error(f"{given} has no bin/kvkeep. Give an environment with kvkeep, or leave --venv out.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv = given.absolute() if given else install(folder)
        well = True
        for title, path in (
            ("without a compiler", tools_without_compiler(folder / "programs")),
            ("as PATH is", os.environ["PATH"]),
        ):
            print(f"== {title}")
            well &= check(venv, folder / title.replace(" ", "-"), path)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

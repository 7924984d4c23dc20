"""Upload what `make package` has built to an index on this machine, and install it from there as a stranger does.

python tools/publish_dry_run.py dist --torch "torch==2.13.0"

The index is pypiserver on loopback, with a redirect to the usual index for all other packages. The environment is new
and empty, and so is the home folder. Fails if pip installed something else than the wheel that was uploaded.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 30


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve the packages of a folder, also those that are uploaded meanwhile, and return the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", "--interface", "127.0.0.1", "--port", str(port), "--passwords", ".", "--authenticate", "."]
    process = subprocess.Popen([sys.executable, "-m", "pypiserver", *words, str(folder)])
    try:
        until = time.monotonic() + WAIT_S
        while not answers(f"http://127.0.0.1:{port}/"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("pypiserver does not start.")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(WAIT_S)


def answers(address: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(address, timeout=2):
            return True
    except urllib.error.URLError:
        return False


def run(*words: str | Path, home: Path | None = None) -> None:
    """Run a command, and end with its failure."""
    print("$", *words, flush=True)
    environment = os.environ if home is None else {**os.environ, "HOME": str(home)}
    if code := subprocess.run(list(map(str, words)), env=environment, cwd=home, check=False).returncode:
        raise SystemExit(f"{words[0]} ended with {code}.")


def differing(wheel: Path, site: Path) -> list[str]:
    """Return the files of a wheel that are not installed as they are in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return [
            name for name in names if not (site / name).is_file() or (site / name).read_bytes() != archive.read(name)
        ]


def main() -> None:
    """Publish to the index of this machine, install from it, and use what was installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--torch", default="torch", help="what is installed first: pip's own choice may bring CUDA")
    arguments = parser.parse_args()
    files = sorted(arguments.dist.glob("kvkeep*"))
    wheels = {name: next(iter(arguments.dist.glob(f"{name}-*.whl")), None) for name in ("kvkeep", "kvkeep_lab")}
    if None in wheels.values() or len(files) < 4:
        raise SystemExit(f"{arguments.dist} has no wheel and sdist of both packages. Build them: make package.")
    with tempfile.TemporaryDirectory(prefix="kvkeep-publish-") as scratch:
        packages, home, environment = (Path(scratch) / name for name in ("index", "home", "environment"))
        packages.mkdir()
        home.mkdir()
        python = environment / "bin" / "python"
        with index(packages) as address:
            twine = [sys.executable, "-m", "twine"]
            run(*twine, "check", "--strict", *files)
            run(
                *twine,
                "upload",
                "--disable-progress-bar",
                "--repository-url",
                address,
                "--username",
                "-",
                "--password",
                "-",
                *files,
            )
            run(sys.executable, "-m", "venv", environment)
            pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
            run(*pip, arguments.torch)
            # without a cache: an earlier dry run has left wheels of the same names there
            run(*pip, "--no-cache-dir", "--index-url", f"{address}simple/", "kvkeep[server]", "kvkeep-lab")
        (site,) = environment.glob("lib/python*/site-packages")
        for name, wheel in wheels.items():
            if others := differing(wheel, site):
                raise SystemExit(f"{name} was not installed from {wheel}: {others[0]} differs.")
        kvkeep = environment / "bin" / "kvkeep"
        run(kvkeep, "--version", home=home)
        run(kvkeep, "generate", "-p", "Once upon a time", "--max-new-tokens", "8", home=home)
        run(kvkeep, "serve", "--check", home=home)
        run(kvkeep, "theory", "--only", "ahakv-gain", home=home)
    print("The packages can be uploaded, and what was installed from the index works.")


if __name__ == "__main__":
    main()

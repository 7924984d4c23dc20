"""A system and a piece of work in a process of their own: no system sees what another has allocated or imported."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peers import Work

from kvkeep.models.load import quiet
from lib import speed_model

BENCH = Path(__file__).parents[1]


@dataclass(frozen=True)
class System:
    """A line of a table: a peer and what it is told.

    Attributes:
        name: what the table calls it.
        peer: its file in ``bench/peers``.
        options: what it is told beside the work.
    """

    name: str
    peer: str
    options: Mapping[str, int | str | None]


def leaving_out(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """An option for those who cannot wait."""
    parser.add_argument("--without", nargs="+", default=[], metavar="SYSTEM", help="leave these lines of the table out")
    return parser


def asked(systems: list[System], options: argparse.Namespace) -> list[System]:
    """The systems that are to run."""
    if unknown := set(options.without) - {system.name for system in systems}:
        raise SystemExit(f"--without {' '.join(unknown)}: there are only {', '.join(s.name for s in systems)}")
    return [system for system in systems if system.name not in options.without]


@contextmanager
def saved_model(layers: int, dtype: str, shape: str = "speed") -> Iterator[str]:
    """A folder with the model for speed, which every system loads."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        with quiet():
            speed_model(getattr(torch, dtype), layers, attach=False, shape=shape).save_pretrained(folder)
        yield folder


def interpreter(peer: str) -> str:
    """The Python of a peer's own environment if there is one, otherwise this one."""
    own = BENCH.parent / f".venv-peer-{peer}" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def run(system: System, work: Work) -> dict:
    """One run of a system in a new process: its measurements, or ``skipped`` with the reason."""
    path = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(work.threads)}
    done = subprocess.run(
        [interpreter(system.peer), "-W", "ignore", "-m", "peers", system.peer],
        input=json.dumps(asdict(work)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        return {"skipped": f"ended by {signal.Signals(-done.returncode).name}: out of memory?"}
    if done.returncode:
        return {"skipped": "failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def alternating(systems: list[System], work: Mapping[str, object], repeats: int) -> dict[str, list[dict]]:
    """Every system in turn, ``repeats`` times, so that a drift of the machine meets all of them alike.

    Who does not run is asked once.
    """
    found: dict[str, list[dict]] = {system.name: [] for system in systems}
    for _ in range(repeats):
        for system in systems:
            before = found[system.name]
            if not (before and "skipped" in before[0]):
                before.append(run(system, Work(**work, options=system.options)))
    return found


def middle(runs: list[dict], name: str) -> float:
    """The median over runs."""
    return statistics.median(run[name] for run in runs)


def skipped(found: Mapping[str, list[dict]]) -> list[str]:
    """A note for every run that was not done: its system's name, and why."""
    return [
        f"{name}{f', run {number} of {len(runs)}' if number > 1 else ''}: {' '.join(run['skipped'].split())}"
        for name, runs in found.items()
        for number, run in enumerate(runs, 1)
        if "skipped" in run
    ]


def ran(found: Mapping[str, list[dict]]) -> dict[str, list[dict]]:
    """The systems that did run, with the runs that were done."""
    done = {name: [run for run in runs if "skipped" not in run] for name, runs in found.items()}
    return {name: runs for name, runs in done.items() if runs}

"""A small evaluation on workers that live in this process, on a cluster that stands for Ray."""

import contextlib
import json
import pickle

import model_folders
from fake_ray import Cluster
from typer.testing import CliRunner

from kvkeep.cli.main import app

QUICK = ("--policies", "full,local,h2o@8", "--limit", 2, "--window", 40, "--budgets", "12,20%", "--threads", 1)
TASKS_HERE = ("--tasks", "perplexity,agreement", "--seed", "0,1")
CELLS = 2 * 2 * 5


class Real(Cluster):
    """Workers that run cells, in this process, but in another folder. All that reaches them has been pickled.

    Args:
        seed: decides which calls end when, and who dies.
        deaths: workers that die once a cell has been run.
        options: of the cluster.
    """

    def __init__(self, seed, *, deaths=0, **options):
        super().__init__(seed, **options)
        self._later = deaths

    def remote(self, kind):
        self.kind = lambda make: kind(pickle.loads(pickle.dumps(make)))
        return self

    def begun(self, call):
        with contextlib.chdir("/"):
            return call.actor.worker.begin(*call.arguments)

    def answered(self, call):
        self.deaths, self._later = self.deaths + self._later, 0
        with contextlib.chdir("/"):
            return pickle.loads(pickle.dumps(call.actor.worker.run(*pickle.loads(pickle.dumps(call.arguments)))))


def invoke(folder, *words, tasks=TASKS_HERE, model=None):
    asked = ("eval", model or model_folders.folder(), *QUICK, *tasks, "--no-plots", "-o", folder, *words)
    found = CliRunner().invoke(app, [*map(str, asked)], env={"COLUMNS": "160"})
    found.said = " ".join(found.output.split())
    assert "Traceback" not in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def rows(folder):
    """The lines of a folder in their order, without the time that they took."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in lines]

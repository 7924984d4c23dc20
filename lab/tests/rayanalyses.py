"""A small analysis on workers that live in this process, on a cluster that stands for Ray; see `raycells`."""

import json

import model_folders
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep_lab.analysis.groups import MEASUREMENTS

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 80
WALKED = ["sparsity", "heavy_hitters", "mlp_units", "repetition", "residual"]
APART = ["removal", "score_change", "budgets"]
NAMES = WALKED + APART
SKIPPED = {"budgets"}
TOKENS = 280


def invoke(text, folder, *words, model=None, only=NAMES):
    asked = ("analyze", model or model_folders.folder(), "--text", text, "-o", folder, "--max-tokens", TOKENS)
    asked += ("--only", ",".join(only), "--threads", 1, *words)
    found = CliRunner().invoke(app, [*map(str, asked)], env={"COLUMNS": "160"})
    found.said = " ".join(found.output.split())
    assert "Traceback" not in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def records(folder):
    """The measurements of a folder, without the time that they took."""
    found = [json.loads((folder / f"{kind.name}.json").read_text()) for kind in made(folder)]
    return {record["name"]: {key: value for key, value in record.items() if key != "seconds"} for record in found}


def made(folder):
    return [kind for kind in MEASUREMENTS if (folder / f"{kind.name}.json").exists()]


def same(folder, whole, stdout=None):
    """Whether a folder is that of one process, up to times and the folder's name."""
    assert records(folder) == records(whole[0])
    assert (folder / "run.json").read_bytes() == (whole[0] / "run.json").read_bytes()
    assert (folder / "index.html").read_bytes() == (whole[0] / "index.html").read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole[0].iterdir()}
    if stdout is not None:
        assert stdout == whole[1]


def ended(cluster):
    assert not any(actor.alive for actor in cluster.actors)

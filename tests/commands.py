"""Batch jobs as tests run them: the command, its files, and results made by hand."""

import json

from typer.testing import CliRunner

from kvkeep.batch.input import COMPLETION
from kvkeep.cli.main import app
from kvkeep.engine import Result


def run(*args, stdin=None):
    """Run ``kvkeep generate``; the message is one text without line breaks in ``said``."""
    result = CliRunner().invoke(app, ["generate", *map(str, args)], input=stdin)
    result.said = " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write(path, *entries):
    """A JSONL file of these lines."""
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def completions(path):
    """The lines of an output by the numbers of their lines in the input."""
    return {entry[COMPLETION]["line"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def result_of(**fields):
    """A result with one token."""
    made = {"id": 0, "token_ids": (1,), "text": "a", "finish_reason": "stop", "prompt_tokens": 1, "logprobs": ()}
    return Result(**made | {"queued_s": 0.0, "ttft_s": 0.1, "prefill_s": 0.1, "tpot_s": None} | fields)

"""Lines of a batch job without an answer: they are set aside beside the output, with the reasons."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kvkeep.batch.input import read_lines
from kvkeep.batch.survey import Survey, foreign, write_bad
from kvkeep.cli import console
from kvkeep.cli.generate.request import Batch


def set_aside(source: Path, survey: Survey, failed: Mapping[int, str], batch: Batch) -> None:
    """Write lines without an answer to a file beside the output; if the output is a stream, to standard error.

    Args:
        source: the input.
        survey: knows the lines that cannot be run.
        failed: line number → reason, of lines that have failed now.
        batch: the options of the job.
    """
    to_file = batch.output != "-"
    entries = survey.entries(read_lines(source), failed, bad=to_file or not failed)
    if to_file:
        if not survey.bad and os.path.lexists(beside(batch)):  # lines of an earlier run that are nowhere else
            raise foreign(beside(batch))
        write_bad(beside(batch), entries)
    count = console.count(len(failed or survey.bad), "line")
    are = "is" if len(failed or survey.bad) == 1 else "are"
    problem = f"{count} failed" if failed else f"{count} cannot be run"
    console.note(f"{problem} and {are} set aside {f'in {beside(batch)}' if to_file else 'below'}")
    if not to_file:
        sys.stderr.writelines(json.dumps(entry) + "\n" for entry in entries)


def beside(batch: Batch) -> Path:
    """The file for lines without an answer."""
    return Path(f"{batch.output}.bad")

"""Inputs and outputs of batch jobs that are no local JSONL files: they are copied here, and collected here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from kvkeep.cli import console
from kvkeep.cli.files import data_folder, read_again
from kvkeep.cli.generate.request import Batch
from kvkeep.cli.generate.run_lines import INCOMPLETE
from kvkeep.errors import InputError
from kvkeep.scale import remote_files
from kvkeep.scale.remote_files import Destination, is_foreign_output


def lines_of(batch: Batch) -> AbstractContextManager[Path]:
    """A JSONL file that can be read several times, with the lines of a job's input.

    Raises:
        InputError: the input is a folder in which the output lies.
    """
    if not remote_files.is_foreign(batch.input):
        return read_again(batch.input, kind="input")
    if remote_files.is_within(batch.output, batch.input):
        raise InputError(
            f"The output {batch.output} lies in the folder {batch.input}, whose files are the input. If the job "
            "stops, the next run would take its completions for lines. Give an output elsewhere."
        )
    return remote_files.as_lines(batch.input)


@contextmanager
def published(batch: Batch) -> Iterator[Batch]:
    """The options of a job that writes to a local file, for the time of this block; its lines are published at the end.

    If the block raises an error or the user ends the job, nothing is published. The local file stays until every line
    has its completion at the destination, so the same command goes on from there.

    Raises:
        InputError: the destination cannot be written.
    """
    if not is_foreign_output(batch.output):
        yield batch
        return
    destination = Destination(batch.output, data_folder() / "kvkeep" / "jobs")
    with destination.held():
        console.progress(f"collecting completions in {destination.path} …")
        try:
            yield replace(batch, output=str(destination.path))
        except typer.Exit as end:
            if end.exit_code == INCOMPLETE and destination.collected:
                _publish(destination, complete=False)
            raise
        _publish(destination, complete=True)


def _publish(destination: Destination, *, complete: bool) -> None:
    destination.publish(complete=complete)
    console.note(f"completions are in {destination.target}")

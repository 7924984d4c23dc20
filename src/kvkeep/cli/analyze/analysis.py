"""The work of ``kvkeep analyze``: check everything, load the model, measure, and write the page.

All that can be refused is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvkeep import plots
from kvkeep.cli import console
from kvkeep.cli.analyze import Request
from kvkeep.cli.files import STANDARD_INPUT, read_text
from kvkeep.models import load
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.quiet import quiet
from kvkeep.models.text import Writer
from kvkeep.research.analysis import page, report
from kvkeep.research.analysis.report import Folder
from kvkeep.research.analysis.run import Job, OnStage, find, read, run

_PURPOSE = "Give some text to analyse with --text FILE."


def serve(request: Request) -> None:
    """Do what ``kvkeep analyze`` was asked for.

    Raises:
        KVKeepError: something in the request, the model or the folder cannot be used.
    """
    with quiet():
        folder = Folder(request.output)
        job = prepare(request)
        folder.check_free()
        folder.check(job.manifest())
        report.read(folder)
        for note in job.text.notes:
            console.note(note)
        writer = Writer(job.checkpoint, load.read_weights(job.checkpoint, request.dtype, request.device))
        with folder.locked():
            with _progress() as on_stage:
                run(job, writer, folder, on_stage)
            written, everything = report.write(folder)
    _show(request, written, everything)


def prepare(request: Request) -> Job:
    """Check a request from the cheapest test to the dearest, without reading weights.

    Raises:
        KVKeepError: something in the request or the model cannot be used.
    """
    kinds = find(request.only)
    text = read_text(request.text, kind="text file", purpose=_PURPOSE)
    parse_dtype(request.dtype)
    parse_device(request.device)
    name = request.model or load.embedded()
    console.progress(f"loading {name} …")
    checkpoint = load.find(name, allow_pickle=request.allow_pickle)
    file = "standard input" if request.text == STANDARD_INPUT else Path(request.text).name
    tokens = read(checkpoint, file, text, request.max_tokens)
    return Job(request.model or page.EMBEDDED, checkpoint, tokens, kinds, request.seed)


@contextmanager
def _progress() -> Iterator[OnStage]:
    """A bar with the time left of what is being done; after Ctrl-C it says how to go on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("time left", style="dim"),
        TimeRemainingColumn(),
    )
    screen = console.err()
    bar = Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)
    lines: dict[str, Any] = {}

    def on_stage(what: str, share: float) -> None:
        if what not in lines:
            for line in lines.values():
                bar.update(line, visible=False)
            lines[what] = bar.add_task(what, total=1.0)
        bar.update(lines[what], completed=share, refresh=True)

    try:
        with bar:
            yield on_stage
    except KeyboardInterrupt:
        console.note("stopped. What is finished is on the disk; run the same command again to go on.")
        raise


def _show(request: Request, written: Path, everything: dict[str, Any]) -> None:
    """The recommendation, what was skipped, and where the page is."""
    if not plots.available():
        console.note(f"no pictures: {plots.MISSING}, then run the same command again.")
    if request.json:
        console.write_json({"output": str(request.output), "page": str(written), **everything})
        return
    screen = console.out()
    filled = console.table("measurement", "verdict", "this model shows")
    for name, record in everything["measurements"].items():
        said = record.get("reading")
        verdict, here = ("skipped", record["skipped"]) if said is None else (said["verdict"], said["here"])
        filled.add_row(name, verdict, console.visible(here))
    screen.print(filled)
    screen.print()
    screen.print(console.visible(everything["recommendation"]["short"]))
    console.err().print(console.facts({"page": str(written)}))

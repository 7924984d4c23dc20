"""The work of ``kvkeep calibrate``: check everything, load the model, measure, and write the profile.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvkeep.calibration import duo_attention
from kvkeep.calibration.calibrate import Job, OnStage, Part, Settings, calibrate
from kvkeep.cli import console
from kvkeep.cli.calibrate import report
from kvkeep.cli.calibrate.request import Request, target
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.errors import InputError
from kvkeep.head_profile import Profile
from kvkeep.models import threads
from kvkeep.models.files import cached_if_unreachable, locate
from kvkeep.models.load import embedded, find, quiet, read_config

EMBEDDED = "the embedded model"
DEFAULT_CONTEXT = 1024


def serve(request: Request) -> None:
    """Write a profile and print a summary.

    Raises:
        KVKeepError: the request or the model cannot be used, or the profile cannot be written.
        Exit: the user pressed Ctrl-C; finished layers are safe.
    """
    with quiet(), threads.restored():
        duo_pattern = request.from_duo
        profile = _measure(request) if duo_pattern is None else _import(request, duo_pattern)
    report.show(request, profile)


def _import(request: Request, path: str) -> Profile:
    if request.text is not None:
        raise InputError("--from-duo measures nothing, so --text has no use. Leave one of them out.")
    if request.model is None:
        raise InputError("--from-duo needs the MODEL that the pattern was trained for; only its configuration is read.")
    name = locate(request.model)
    with cached_if_unreachable(name):
        config = read_config(name)
    profile = duo_attention.imported(path, config, name=request.model, sparsity=request.sparsity)
    _save(profile, request)
    return profile


def _measure(request: Request) -> Profile:
    job = prepare(request)
    for note in job.notes():
        console.note(note)
    part_path = request.output.with_name(request.output.name + ".part")
    with _resumable(part_path), Part.open(part_path) as part:
        writer = writer_of(job.checkpoint, request)
        with _progress() as on_stage:
            profile = calibrate(job, writer, part, on_stage)
        _save(profile, request)
        part.remove()
    return profile


def prepare(request: Request) -> Job:
    """Check a request, cheap tests first, without reading weights.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    if request.sparsity is not None:
        raise InputError("--sparsity belongs to --from-duo. A measured profile has each head's own number.")
    text = None
    if request.text is not None:
        text = read_text(request.text, kind="text file", purpose="Give some text to calibrate on with --text FILE.")
    check_weights(request)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    trained = checkpoint.trained_length or DEFAULT_CONTEXT
    settings = Settings(
        sinks=request.sinks,
        recent=request.recent,
        case=request.case,
        context=min(DEFAULT_CONTEXT, trained) if request.context is None else request.context,
        documents=request.documents,
        questions=request.questions,
        windows=request.windows,
        seed=request.seed,
    )
    return Job(model=request.model or EMBEDDED, checkpoint=checkpoint, text=text, settings=settings)


def _save(profile: Profile, request: Request) -> None:
    target(str(request.output), overwrite=request.overwrite)  # somebody may have written it in the meantime
    profile.save(request.output)


@contextmanager
def _resumable(part: Path) -> Iterator[None]:
    """After Ctrl-C, a note on how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if part.exists():
            console.note(f"stopped. Finished layers are in {part}; run the same command again to go on.")
        else:
            console.note("stopped; nothing was written")
        raise typer.Exit(console.INTERRUPTED) from interrupt


@contextmanager
def _progress() -> Iterator[OnStage]:
    """A bar on standard error that moves with each finished layer; nothing where that is no terminal."""
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

    with bar:
        yield on_stage

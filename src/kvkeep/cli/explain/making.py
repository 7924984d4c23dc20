"""The work of ``kvkeep explain``: run the policies, write the page, print a summary.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvkeep.cli import console
from kvkeep.cli.explain.request import Request, target
from kvkeep.cli.explain.terminal import show
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.errors import InputError
from kvkeep.evals.grid import split_policies
from kvkeep.explain import explanation
from kvkeep.explain.explain import check, explain
from kvkeep.explain.explanation import Explanation
from kvkeep.models import threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import embedded, find, quiet
from kvkeep.result_files import write_whole

_SPEED_OVER_S = 600.0
"""Seconds over which the bar averages: one chunk of a long text may take longer than rich's 30 seconds."""


def serve(request: Request) -> None:
    """Record a text under the policies, and write or print the record.

    Raises:
        KVKeepError: the request or the model cannot be used, or the page cannot be written.
        Exit: the user pressed Ctrl-C; no page was written.
    """
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            _serve(request)
    except KeyboardInterrupt as interrupt:
        console.note("stopped; no page was written")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _serve(request: Request) -> None:
    policies = split_policies(request.policies)
    options = {"prefill_chunk": request.prefill_chunk, "max_new_tokens": request.max_new_tokens}
    check(policies, request.budget, **options)
    if request.plots is not None:
        explanation.check(request.plots, overwrite=request.overwrite)
    check_weights(request)
    text = read_text(request.text, kind="text", purpose="Give some text to read.")
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    writer = writer_of(find(name, allow_pickle=request.allow_pickle), request)
    with _progress() as progress:
        found = explain(
            writer.model,
            text,
            tokenizer=writer.checkpoint.tokenizer,
            name=request.model or "the embedded model",
            question=request.question,
            policies=policies,
            budget=request.budget,
            raw=request.raw,
            command=request.line(),
            progress=progress,
            **options,
        )
    _report(request, found)


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on standard error; nothing where that is no terminal."""
    screen = console.err()
    columns = (TextColumn("recording"), BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(
        *columns,
        console=screen,
        disable=not screen.is_terminal,
        transient=True,
        expand=True,
        speed_estimate_period=_SPEED_OVER_S,
    )
    task = bar.add_task("", total=1.0)
    with bar:
        yield lambda share: bar.update(task, completed=share)


def _report(request: Request, found: Explanation) -> None:
    """Write the page, and print what was asked for."""
    for note in found.notes:
        console.note(note)
    drawn = found.draw(request.plots, overwrite=request.overwrite) if request.plots is not None else []
    if request.output is not None:
        target(str(request.output), overwrite=request.overwrite)  # somebody may have written it in the meantime
        try:
            write_whole(request.output, found.to_html().encode())
        except OSError as error:
            raise InputError(f"{request.output} cannot be written: {error.strerror}.") from error
    if request.json:
        console.write_text(found.to_json() + "\n")
        return
    screen = console.out()
    if request.terminal:
        show(screen, found)
    _sum(found)
    if request.output is not None:
        size = console.show_bytes(request.output.stat().st_size)
        screen.print(f"\n{console.visible(str(request.output))}: {size}, for a browser", soft_wrap=True)
    for path in drawn:
        screen.print(console.visible(str(path)), soft_wrap=True)


def _sum(found: Explanation) -> None:
    """Print each policy's answer, its agreement with the full cache's, and its bytes."""
    figures = console.table("", "answer", "agrees", "memory", "compression")
    for run in found.runs:
        end = run.ledger.answered
        figures.add_row(
            run.policy,
            console.printable("".join(run.answer).strip()),
            f"{run.agreement:.0%}",
            console.show_bytes(end.allocated_bytes),
            console.show_factor(end.full_bytes / end.allocated_bytes),
        )
    full = max(run.ledger.answered.full_bytes for run in found.runs)
    figures.add_row(
        "full cache", console.printable("".join(found.answer).strip()), "", console.show_bytes(full), "1.0×"
    )
    console.out().print(figures)

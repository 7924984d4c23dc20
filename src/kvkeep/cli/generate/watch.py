"""What a person sees of work that takes long, and how Ctrl-C ends it between two steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvkeep.cli import console


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the work after the line that is being written; the second ends it at once."""
    pressed = False

    def press(*args: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens per second and the time left, for a person who watches."""
    screen = console.err()
    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("time left", style="dim"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)
    task = bar.add_task("lines", total=total, completed=done, rate="")
    start, tokens = time.perf_counter(), 0

    def on_tokens(new: int, finished: int) -> None:
        nonlocal tokens
        tokens += new
        rate = tokens / max(1e-9, time.perf_counter() - start)
        bar.update(task, advance=finished, rate=f"{console.show_rate(rate)} tokens/s")

    with bar:
        yield on_tokens

"""The work of ``kvkeep explain``: run the policies, write the page, print a summary.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console
from kvkeep.cli.explain import ExplainOptions
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.progress import ProgressBar
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.errors import InputError
from kvkeep.evals.arms import split_policies
from kvkeep.explain import explanation
from kvkeep.explain.explain import check, explain
from kvkeep.explain.explanation import Explanation, PolicyRun
from kvkeep.models import threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import find, quiet
from kvkeep.models.tiny import embedded
from kvkeep.result_files import write_whole

# A record on a terminal: the text under each policy, side by side, shaded by the share of heads that hold a token.

_NARROWEST = 20
"""Columns of a text; on a narrower terminal the texts stand one above the other."""
_STYLES = ("dim", "", "on grey23", "white on blue", "bold white on blue")
"""For tokens that no head holds, and for a few heads up to all of them."""


def show(screen: Console, found: Explanation) -> None:
    """Print the text and the answer under each policy, as its cache held them after the last token, and how to read it.

    The texts stand side by side, or one above the other on a narrow screen.
    """
    aside = screen.width // len(found.runs) >= _NARROWEST
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in found.runs if aside else found.runs[:1]:
        grid.add_column(ratio=1, overflow="fold")
    heads = [Text(run.policy, "bold") for run in found.runs]
    texts = [_shaded(found.tokens, run) for run in found.runs]
    if aside:
        grid.add_row(*heads)
        grid.add_row(*texts)
    else:
        for head, text in zip(heads, texts, strict=True):
            grid.add_row(head)
            grid.add_row(text)
    screen.print(grid)
    screen.print(Text("· no head holds it; the darker the blue, the more heads do\n", "dim"))


def _shaded(tokens: list[str], run: PolicyRun) -> Text:
    """Return the text and the answer, with each token shaded by the share of heads that hold it at the end.

    Tokens that none holds are dots.
    """
    shares = (run.ledger.dropped < 0).float().mean(dim=0).tolist()
    shaded = Text()
    for token, share in zip([*tokens, *run.answer], shares, strict=False):  # shares have room for the longest answer
        text = console.printable(token)
        level = 0 if share == 0 else 1 + min(3, int(share * 3.999))  # quarters; the last one holds a share of 1
        shaded.append(_dots(text) if level == 0 else text, _STYLES[level])
    return shaded


def _dots(text: str) -> str:
    """Return as many dots as the text is wide, with the text's white space kept."""
    return "".join(letter if letter.isspace() else "·" * cell_len(letter) for letter in text)


_SPEED_OVER_S = 600.0
"""Seconds over which the bar averages: one chunk of a long text may take longer than rich's 30 seconds."""


def serve(request: ExplainOptions) -> None:
    """Record a text under the policies, and write or print the record.

    Raises:
        KVKeepError: the request or the model cannot be used, or the page cannot be written.
        Exit: the user pressed Ctrl-C; a note says if no page was written.
    """
    written = False
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            found = _recorded(request)
            drawn = _drawn(request, found)
            with Uninterrupted():  # so that the note is true
                _write(request, found)
                written = True
            _report(request, found, drawn)
    except KeyboardInterrupt as interrupt:
        console.note("stopped" if written else "stopped; no page was written")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _recorded(request: ExplainOptions) -> Explanation:
    """Check the options, run the policies on the text, and return the record."""
    policies = None if request.policies is None else split_policies(request.policies)
    options: dict[str, Any] = {
        "case": request.case,
        "prefill_chunk": request.prefill_chunk,
        "max_new_tokens": request.max_new_tokens,
    }
    check(policies, request.budget, **options)
    if request.plots is not None:
        explanation.check(request.plots, overwrite=request.overwrite)
    check_weights(request)
    text = read_text(request.text, kind="text", purpose="Give some text to read.")
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    writer = writer_of(find(name, allow_pickle=request.allow_pickle), request)
    with ProgressBar("text", "wide bar", "percent", "bare left", text="recording", speed_over_s=_SPEED_OVER_S) as bar:
        return explain(
            writer.model,
            text,
            tokenizer=writer.checkpoint.tokenizer,
            name=request.model or "the embedded model",
            question=request.question or "",
            policies=policies,
            budget=request.budget,
            raw=request.raw,
            command=request.line(),
            progress=bar.show,
            **options,
        )


def _drawn(request: ExplainOptions, found: Explanation) -> list[Path]:
    """Print the notes of a record, draw the plots that were asked for, and return their files."""
    for note in found.notes:
        console.note(note)
    return found.draw(request.plots, overwrite=request.overwrite) if request.plots is not None else []


def _write(request: ExplainOptions, found: Explanation) -> None:
    """Write the page, if one was asked for.

    Raises:
        InputError: the page cannot be written.
    """
    if request.output is None:
        return
    # the file may have come into being while the policies ran
    request.check_output()
    try:
        write_whole(request.output, found.to_html().encode())
    except OSError as error:
        raise InputError(f"{request.output} cannot be written: {error.strerror}.") from error


def _report(request: ExplainOptions, found: Explanation, drawn: Iterable[Path]) -> None:
    """Print the record as JSON or as a summary, with the files that were written."""
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
    """Print a table of each policy's answer, its agreement with the full cache's, and its bytes.

    Below it say where each answer parts from the full cache's.
    """
    figures = console.table("", "answer", "agrees", "memory", "compression")
    for run in found.runs:
        end = run.ledger.answered
        figures.add_row(
            run.policy,
            console.printable(found.text_of(run.answer)),
            f"{run.agreement:.0%}",
            console.show_bytes(end.allocated_bytes),
            console.show_factor(end.full_bytes / end.allocated_bytes),
        )
    full = max(run.ledger.answered.full_bytes for run in found.runs)  # of the longest answer
    figures.add_row("full cache", console.printable(found.text_of(found.answer)), "", console.show_bytes(full), "1.0×")
    console.out().print(figures)
    for run in found.runs:
        if run.parting is not None:
            console.out().print(f"\n{run.policy} parts from the full cache at {_parting(found, run.parting, run)}.")


def _parting(found: Explanation, place: int, run: PolicyRun) -> str:
    """Return in words which token a policy's answer has at ``place`` (from 0), and which the full cache's has there."""
    ours, theirs = run.answer[place:][:1], found.answer[place:][:1]
    return f"token {place + 1}, {_quoted(ours, found)} in place of {_quoted(theirs, found)}"


def _quoted(token: list[str], found: Explanation) -> str:
    """Return the token of a list of one in quotes; ``an end`` for a special token or an empty list."""
    return console.visible(repr(token[0])) if token and token[0] not in found.special else "an end"

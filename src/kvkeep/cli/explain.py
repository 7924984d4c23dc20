"""``kvkeep explain``: its options. The work is done by `making`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import STANDARD_OUTPUT, place
from kvkeep.cli.options import (
    MEMORY,
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LoadIn,
    Model,
    ModelRequest,
    Threads,
    parse_budget,
    parse_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError

# A request to ``kvkeep explain``, and the file that it writes.


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ModelRequest):
    """The options of ``kvkeep explain``. Numbers of tokens are read; the rest is not checked."""

    text: str
    question: str
    raw: bool
    policies: str
    budget: float | int
    prefill_chunk: int
    max_new_tokens: int
    output: Path | None
    plots: Path | None
    overwrite: bool
    terminal: bool
    json: bool

    def line(self) -> str:
        """The command line that makes the page again."""
        options: dict[str, object] = {"--text": self.text, "--prompt": self.question, "--policies": self.policies}
        options |= {
            "--budget": as_typed(self.budget),
            "--prefill-chunk": self.prefill_chunk,
            "--max-new-tokens": self.max_new_tokens,
        }
        options |= {"--dtype": self.dtype, "--device": self.device, "--load-in": self.load_in, "--output": self.output}
        options["--plots"] = self.plots
        words = ["kvkeep", "explain", *([self.model] if self.model else [])]
        for name, value in options.items():
            if value not in (None, "", "auto"):
                words += [name, str(value)]
        return " ".join(map(quote, [*words, *(["--raw"] if self.raw else [])]))


def as_typed(budget: float | int) -> str:
    """A budget as the option takes it: a share in per cent, or a number of tokens."""
    if isinstance(budget, int):
        return str(budget)
    return f"{budget:.10%}".rstrip("0%").rstrip(".") + "%"


def target(name: str, *, overwrite: bool) -> Path:
    """The file for a page, after a check that it can be written there.

    Raises:
        InputError: there is something of that name already, or no folder for it.
    """
    path = place(name, "--output")
    if name == STANDARD_OUTPUT:
        raise InputError("A page is written to a file, not to standard output; give a name such as page.html.")
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', error)}.") from error
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise InputError(f"{path} is a folder, or no regular file. Give the name of a file for the page.")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path} exists. Give another --output, or --overwrite to replace it.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for the page. Make it first, or give another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {path.parent}. Give another --output.")
    return path


_TEXT = "Text"


@one_line_errors
def explain(
    text: Annotated[
        str,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="The text, a UTF-8 file; - is standard input.",
            rich_help_panel=_TEXT,
        ),
    ],
    model: Model = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The question. It follows the text after a blank line.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.", rich_help_panel=_TEXT)
    ] = False,
    policies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Policies with their options, at most six, e.g. h2o:recent=8,sinks=4,tova.",
            autocompletion=shell_completion.policy_list,
            rich_help_panel=MEMORY,
        ),
    ] = "h2o,snapkv,local",
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, or a share of the prompt's.",
            rich_help_panel=MEMORY,
        ),
    ] = "20%",
    prefill_chunk: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of the prompt that are read at a time. Each chunk is a moment of the page.",
            rich_help_panel=MEMORY,
        ),
    ] = "64",
    max_new_tokens: Annotated[
        str,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="TOKENS",
            help="The most tokens of an answer, up to 54.",
            rich_help_panel=_TEXT,
        ),
    ] = "32",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the page, e.g. page.html.", rich_help_panel=OUTPUT
        ),
    ] = None,
    plots: Annotated[
        str | None,
        typer.Option(
            "--plots",
            metavar="FOLDER",
            help="Folder for pictures, with matplotlib (extra: plots).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of that name.", rich_help_panel=OUTPUT)
    ] = False,
    terminal: Annotated[
        bool,
        typer.Option(
            "--terminal",
            help="Print the text under each policy, side by side. Dots stand for tokens that no head holds.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a bounded memory kept of a text, what it dropped and why, beside other policies.

    The result is one page for a browser. It needs no network. The text is read under each policy, and then once with
    the full cache, which tells what the answer's tokens would have looked at.
    """
    if output is None and plots is None and not (terminal or json):
        raise InputError("There is no place for the page. Give --output page.html, or --terminal to see it here.")
    request = ExplainOptions(
        model=model,
        text=text,
        question=question or "",
        raw=raw,
        policies=policies,
        budget=parse_budget(budget, "--budget"),
        prefill_chunk=parse_chunk(prefill_chunk),
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        output=None if output is None else target(output, overwrite=overwrite),
        plots=None if plots is None else place(plots, "--plots"),
        overwrite=overwrite,
        terminal=terminal,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        json=json,
    )
    from kvkeep.cli import explain_run  # imports torch and transformers

    explain_run.serve(request)

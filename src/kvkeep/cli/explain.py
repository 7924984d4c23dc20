"""``kvkeep explain``: its options. The work is in `kvkeep.cli.explain_run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import join

from kvkeep.cli import shell_completion
from kvkeep.cli.files import check_text, place, target
from kvkeep.cli.options import (
    BUDGET,
    JSON,
    OUTPUT,
    PREFILL_CHUNK,
    ModelOptions,
    check_policies,
    option,
    parse_budget,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.parameters import MEMORY

_TEXT = "Text"


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ModelOptions):
    """Show what a bounded memory kept of a text, what it dropped and why.

    The result is one page for a browser. It needs no network. By default the text is read as kvkeep generate does, or
    with --case later as kvkeep remember does: the same policy, budget and chunks. Then it is read with the full cache,
    which tells what the answer's tokens would have looked at.
    """

    text: str = option("The text, a UTF-8 file; - is standard input.", "-f", metavar="FILE", group=_TEXT)
    question: str | None = option(
        "The question. It follows the text after a blank line.",
        "--prompt",
        "-p",
        default=None,
        metavar="TEXT",
        group=_TEXT,
    )
    raw: bool = option("Do not apply the tokenizer's chat template.", default=False, group=_TEXT, rare=True)
    case: str = option(
        "inside: the question ends the text, as in kvkeep generate. later: it comes after the text was cut, as in "
        "kvkeep remember.",
        default="inside",
        metavar="CASE",
        complete=shell_completion.words("inside", "later"),
        group=_TEXT,
    )
    policies: str | None = option(
        "Policies with their options, at most six, e.g. h2o:recent=8,sinks=4,tova. Default: that of kvkeep generate or "
        "kvkeep remember.",
        default=None,
        metavar="LIST",
        complete=shell_completion.policy_list,
        group=MEMORY,
    )
    budget: float | int | None = option(
        BUDGET,
        help="Tokens kept per layer and head, e.g. 512, or a share of the prompt's: 20%. Default: 1024, or less for a "
        "short text.",
        read=parse_budget,
    )
    prefill_chunk: int | None = option(
        PREFILL_CHUNK,
        help="Tokens of the prompt that are read at a time; each chunk is a moment of the page. Default: all of them.",
    )
    max_new_tokens: int = option(
        "The most tokens of an answer, up to 54.",
        "-n",
        default="32",
        read=parse_tokens,
        metavar="TOKENS",
        group=_TEXT,
    )
    output: Path | None = option(
        "File for the page, e.g. page.html.", "-o", default=None, read=place, metavar="FILE", group=OUTPUT
    )
    plots: Path | None = option(
        "Folder for pictures, with matplotlib (extra: plots).",
        default=None,
        read=place,
        metavar="FOLDER",
        group=OUTPUT,
    )
    overwrite: bool = option("Replace files of that name.", default=False, group=OUTPUT, rare=True)
    terminal: bool = option(
        "Print the text under each policy, side by side. Dots stand for tokens that no head holds.",
        default=False,
        group=OUTPUT,
    )
    json: bool = option(JSON)

    def check_values(self) -> None:
        """Refuse a text, a model or a policy that does not exist, and a dtype or a device that cannot be used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        check_text(self.text, kind="text")
        super().check_values()
        if self.policies is not None:
            check_policies(self.policies, alone=True)

    def checked(self) -> ExplainOptions:
        """Check that something is written or printed, and can be; return the options themselves.

        Raises:
            InputError: there is no place for the page, it cannot be written, or no question could come later.
        """
        if self.output is None and self.plots is None and not (self.terminal or self.json):
            raise InputError("There is no place for the page. Give --output page.html, or --terminal to see it here.")
        if self.case == "later" and not (self.question or "").strip():
            raise InputError("--case later was given, and no question that could come later. Give one with --prompt.")
        self.check_output()
        return self

    def check_output(self) -> None:
        """Check that the page's file does not exist, or may be overwritten; do nothing without ``--output``.

        Raises:
            InputError: the page cannot be written.
        """
        if self.output is not None:
            target(self.output, "page", example="page.html", overwrite=self.overwrite)

    def line(self) -> str:
        """Return the command line, quoted for a shell, that makes the page again where it does not exist."""
        options: dict[str, object] = {
            "--text": self.text,
            "--prompt": self.question,
            "--case": self.case,
            "--policies": self.policies,
            "--budget": None if self.budget is None else as_typed(self.budget),
            "--prefill-chunk": self.prefill_chunk,
            "--max-new-tokens": self.max_new_tokens,
            "--dtype": None if self.dtype == "auto" else self.dtype,
            "--device": None if self.device == "auto" else self.device,
            "--load-in": self.load_in,
            "--threads": self.threads,
            "--output": self.output,
            "--plots": self.plots,
        }
        flags = {
            "--raw": self.raw,
            "--allow-pickle": self.allow_pickle,
            "--terminal": self.terminal,
            "--json": self.json,
        }
        words = ["kvkeep", "explain", *([self.model] if self.model else [])]
        for name, value in options.items():
            if value not in (None, ""):
                # in one word, a value such as --help is no option
                words += [f"{name}={value}"] if str(value).startswith("-") else [name, str(value)]
        return join([*words, *(name for name, given in flags.items() if given)])


def as_typed(budget: float | int) -> str:
    """Return a budget as the option takes it: a float in per cent, ``20%``, or an int as a number of tokens."""
    if isinstance(budget, int):
        return str(budget)
    return f"{budget * 100:.15g}%"  # 15 digits hide how a share was rounded

"""What the subcommands share: consoles, one-line errors, JSON, and numbers in words.

Text that a user may want to pipe goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.errors import BudgetError, InputError, KVKeepError

P = ParamSpec("P")

BAD_INPUT = 2
"""Exit code of everything that the user can put right; the same as for a misspelt option."""

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
MAX_TOKENS = 2**31 - 1
"""The last position there is."""
_MAX_BYTES = 2**63 - 1
_LONGEST = 300
"""Characters of a word in a message; a longer one is a value that somebody gave, and shown in part."""
_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for prefix, power in (("k", 1), ("K", 1), ("M", 2), ("G", 3), ("T", 4))},
    **{f"{prefix}iB": 1024**power for prefix, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))},
}
_OUT_OF_MEMORY = "This machine has too little memory for that. Give it less to do at once, or free some memory."
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))  # all but tab and line break
_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}


Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel="Output")]


def out() -> Console:
    """Standard output, for results."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Standard error, for progress, notes and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Make a subcommand print errors of kvkeep as one line; with its option ``debug``, after the traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (KVKeepError, MemoryError) as found:
            if kwargs.get("debug"):
                traceback.print_exception(found)
            error(_OUT_OF_MEMORY if isinstance(found, MemoryError) else str(found))
            raise typer.Exit(BAD_INPUT) from found

    return wrapper


def progress(message: str) -> None:
    """Say what is going on, to a person who is waiting."""
    console = err()
    if console.is_terminal:
        console.print(Text(message, "dim"), soft_wrap=True)


def error(message: str) -> None:
    """Say in one line what went wrong."""
    err().print(Text.assemble(("error: ", "bold red"), visible(" ".join(map(_cut, message.split())))), soft_wrap=True)


def note(message: str) -> None:
    """Say something that the user should know but that stops nothing."""
    err().print(Text.assemble(("note: ", "yellow"), printable(message)))


def write_json(value: object) -> None:
    """Print one JSON object to standard output, with the control characters that JSON allows escaped as well."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False).translate(_ESCAPES) + "\n")


def write_text(text: str) -> None:
    """Write a piece of a model's text at once; a terminal never gets control characters from it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def streamed_text() -> Iterator[Callable[[str], None]]:
    """A function that writes pieces of text; whatever happens meanwhile, the last line is ended."""
    last = "\n"

    def write(piece: str) -> None:
        nonlocal last
        write_text(piece)
        last = piece

    try:
        yield write
    finally:
        if not last.endswith("\n"):
            write_text("\n")


def printable(text: str) -> str:
    """The text without the control characters that could steer a terminal."""
    return text.translate(_CONTROLS)


def visible(text: str) -> str:
    """The text on one line with every character that is not printed written as its escape: nothing of it is hidden."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _cut(word: str) -> str:
    """A word of a message, without the middle where it is too long to read."""
    return word if len(word) <= _LONGEST else f"{word[: _LONGEST // 2]}…{word[-_LONGEST // 2 :]}"


def facts(rows: dict[str, str]) -> Table:
    """Names and values, as two columns without lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, printable(value))
    return grid


def table(*columns: str) -> Table:
    """An empty table with a line under its head, in the width of the terminal."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def facts_table(name: str, value: str, rows: dict[str, str]) -> Table:
    """Names and values under a head."""
    filled = table(name, value)
    for row in rows.items():
        filled.add_row(*row)
    return filled


def parse_tokens(text: str, option: str) -> int:
    """Read a number of tokens: ``1024``, ``4K`` (4 × 1024), ``4k`` (4 × 1000), ``1M``, ``1.5k``.

    Raises:
        InputError: it is not a whole number, or larger than positions can be.
    """
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        number = int(digits) * unit if digits.lstrip("+-").isdecimal() else float(digits) * unit
        tokens = int(number)
    except (ValueError, OverflowError):  # no number, "nan", "inf"
        tokens, number = 0, 0.5
    if tokens != number:
        raise InputError(f"{option} {text!r} is not a whole number of tokens; write e.g. 1024, 4K (4096) or 4k (4000).")
    if tokens > MAX_TOKENS:
        raise InputError(f"{option} {text} is larger than {MAX_TOKENS}, the last position there is.")
    return tokens


def parse_number(text: str, option: str) -> float:
    """Read a number.

    Raises:
        InputError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a number.") from None


def parse_budget(text: str, option: str) -> float | int:
    """Read a budget: ``20%`` becomes 0.2, a number of tokens an int.

    Raises:
        InputError: it is neither.
        BudgetError: the share is outside 0 … 100 %.
    """
    if not text.endswith("%"):
        return parse_tokens(text, option)
    percent = parse_number(text[:-1], option)
    if not 0 < percent <= 100:
        raise BudgetError(f"{option} {text} is outside 0 … 100%. It is the share of the text's tokens that stay.")
    return percent / 100


def parse_bytes(text: str, option: str, *, example: str = "24GiB (2^30 each) or 24GB (10^9 each)") -> int:
    """Read a size: ``24GiB``, ``24 GB``, ``512MiB``.

    Raises:
        InputError: it is no number with a unit, not above 0, or larger than any machine has.
    """
    found = re.fullmatch(r"\s*([+-]?[0-9]*\.?[0-9]+)\s*([kKMGT]?i?B)\s*", text)
    if found is None or found[2] not in _BYTES:
        raise InputError(f"{option} {text!r} is not a size with a unit; write e.g. {example}.")
    number = float(found[1]) * _BYTES[found[2]]
    if number > _MAX_BYTES:
        raise InputError(f"{option} {text} is more than any machine has, 2^63 bytes; write e.g. {example}.")
    size = round(number)
    if size < 1:
        raise InputError(f"{option} {text} is not above 0; write e.g. {example}.")
    return size


def show_bytes(count: int) -> str:
    """Bytes in decimal units, three digits: ``1.23 MB``."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{_three_digits(size)} {unit}"


def show_factor(factor: float) -> str:
    """A factor as ``4.0×``, with more digits where one would not tell."""
    return f"{factor:.1f}×" if factor >= 0.95 else f"{factor:.2g}×"


def show_speed(tpot_s: float | None) -> str:
    """The time per token as ``23.5 tokens/s``; a dash if there was none to measure."""
    return f"{show_rate(1 / tpot_s)} tokens/s" if tpot_s else "–"


def show_rate(rate: float) -> str:
    """Tokens per second, three digits at least: ``23.5``, ``1234``."""
    return _three_digits(rate)


def show_seconds(seconds: float) -> str:
    """A duration: ``310 ms``, ``4.2 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def count(number: int, noun: str) -> str:
    """A number and its noun: ``1 token``, ``2 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"

"""A request to ``kvkeep explain``, and the file that it writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from kvkeep.cli.files import STANDARD_OUTPUT, place
from kvkeep.cli.model_request import ModelRequest
from kvkeep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
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

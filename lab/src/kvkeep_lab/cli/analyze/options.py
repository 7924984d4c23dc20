"""The options of ``kvkeep analyze``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.files import place
from kvkeep.cli.options import JSON, OUTPUT, RAY_ADDRESS, WORKERS, ModelOptions, check_workers, option, parse_tokens

_ANALYSIS = "Analysis"


def _names(text: str | None, option: str) -> tuple[str, ...]:
    return () if text is None else tuple(filter(None, (name.strip() for name in text.split(","))))


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(ModelOptions):
    """Measure on your model and text what the papers measured on theirs, and name the risks of a smaller cache.

    The result is one page with figures and claims. The text runs through a full cache once, in blocks, so memory stays
    bounded. Every finished measurement is written to DIR at once.

    Attributes:
        text: path of the text, or ``-``.
        only: names of measurements; all if empty.
        workers: the number of workers of Ray; ``None`` to measure in this process.

    """

    text: str = option("UTF-8 text to read; - is standard input.", metavar="FILE", group=_ANALYSIS)
    output: Path = option(
        "Folder for the page, pictures and numbers. The same command again resumes a run that was stopped.",
        "-o",
        read=place,
        metavar="DIR",
        group=OUTPUT,
    )
    only: tuple[str, ...] = option(
        "Measurements, e.g. sparsity,persistence, or all. Default: all but removal and local_global, which take long.",
        read=_names,
        reads_none=True,
        default=None,
        metavar="LIST",
        group=_ANALYSIS,
    )
    max_tokens: int | None = option(
        "Tokens of the text that are read. Default: 4096, or the trained length if that is less.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=_ANALYSIS,
    )
    seed: int = option("Seed of all random choices.", default=0, least=0, most=2**31 - 1, metavar="N", group=_ANALYSIS)
    workers: int | None = option(
        "Make the measurements on N copies of the model, each in a process of a cluster of Ray. Needs the extra "
        "kvkeep\\[ray].",
        name="ray_workers",
        default=None,
        metavar="N",
        group=WORKERS,
    )
    ray_address: str | None = option(RAY_ADDRESS, group=WORKERS)
    json: bool = option(JSON)

    def checked(self) -> AnalyzeOptions:
        """Return the options, after a check of the workers."""
        check_workers(self.workers, self.ray_address)
        return self

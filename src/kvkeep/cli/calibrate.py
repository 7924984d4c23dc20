"""``kvkeep calibrate``: its options. The work is in `kvkeep.cli.calibrate_run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli import shell_completion
from kvkeep.cli.files import check_text, place, target
from kvkeep.cli.options import JSON, OUTPUT, ModelOptions, option, parse_tokens
from kvkeep.errors import InputError

_MEASURE, _IMPORT = "Measurement", "Import"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelOptions):
    """Measure which heads of a model need the far past, and write a profile for budgets per head; or, with --for
    triattention, the statistics of queries that this policy reads.

    Each head is limited to its first and newest tokens, alone and together with others. Measured are the answers to
    planted facts that are lost, and the distance from the full cache on your text. Every finished layer is kept.
    """

    output: Path = option(
        "File for the profile, for example heads.json, or for statistics, for example queries.pt. "
        "The same command again resumes a run that was stopped.",
        "-o",
        read=place,
        metavar="FILE",
        group=OUTPUT,
    )
    purpose: str = option(
        "heads: a profile for --head-budget. triattention: the mean queries of every head, in the format of "
        "TriAttention's code, for --policy triattention:calibration=FILE.",
        "--for",
        name="purpose",
        default="heads",
        metavar="WHAT",
        complete=shell_completion.words("heads", "triattention"),
        group=_MEASURE,
    )
    text: str | None = option(
        "UTF-8 text on which heads are compared with the full cache; - is standard input. Default: the package's own "
        "sentences.",
        default=None,
        metavar="FILE",
        group=_MEASURE,
    )
    context: int | None = option(
        "Length of each text. Default: 1024, or the trained length if that is less; 256 with --quick.",
        default=None,
        read=parse_tokens,
        metavar="TOKENS",
        group=_MEASURE,
    )
    sinks: int = option(
        "First tokens that a limited head still sees.", default=4, least=0, metavar="N", group=_MEASURE, rare=True
    )
    recent: int = option(
        "Newest tokens that a limited head still sees.", default=32, least=1, metavar="N", group=_MEASURE, rare=True
    )
    case: str = option(
        "later: questions come after the text was cut. inside: the question ends the text, so a limited head still "
        "reads it with all of the past.",
        default="later",
        metavar="CASE",
        complete=shell_completion.words("later", "inside"),
        group=_MEASURE,
    )
    documents: int | None = option(
        "Number of texts with planted facts. Default: 6; 0 with --quick.",
        default=None,
        least=0,
        metavar="N",
        group=_MEASURE,
        rare=True,
    )
    quick: bool = option(
        "A first table in a minute or so, from a single text of 256 tokens and without questions.",
        default=False,
        group=_MEASURE,
    )
    seed: int = option(
        "Seed of facts, questions and windows.",
        default=0,
        least=0,
        most=2**31 - 1,
        metavar="N",
        group=_MEASURE,
        rare=True,
    )
    from_duo: str | None = option(
        "Measure nothing: turn a pattern of DuoAttention, a full_attention_heads.tsv or its folder, into a profile. "
        "No weights are read.",
        default=None,
        metavar="PATH",
        group=_IMPORT,
    )
    sparsity: float | None = option(
        "With --from-duo: the share of heads that need no far past; the others need it. Default: the pattern's own "
        "numbers.",
        default=None,
        least=0,
        most=1,
        metavar="SHARE",
        group=_IMPORT,
    )
    overwrite: bool = option("Replace a profile of that name.", default=False, group=OUTPUT, rare=True)
    json: bool = option(JSON)

    def check_values(self) -> None:
        """Refuse an unknown ``--for``, one that excludes ``--from-duo``, a text or a model that does not exist, and a
        dtype or a device that cannot be used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.purpose not in ("heads", "triattention"):
            raise InputError(f"--for {self.purpose!r:.60} is nothing to calibrate for; use heads or triattention.")
        if self.purpose != "heads" and self.from_duo is not None:
            raise InputError(
                "--from-duo brings needs of heads, and --for triattention asks for queries. Leave one out."
            )
        check_text(self.text, kind="text file")
        super().check_values()

    def checked(self) -> CalibrateOptions:
        """Check that the profile can be written (see `check_output`), and return the options themselves."""
        self.check_output()
        return self

    def check_output(self) -> None:
        """Check that the profile's file does not exist, or may be overwritten, and that its folder exists.

        Raises:
            InputError: the profile cannot be written.
        """
        kind, example = ("profile", "heads.json") if self.purpose == "heads" else ("file", "queries.pt")
        target(self.output, kind, example=example, overwrite=self.overwrite)

"""``kvkeep remember``: its options. The work is in `kvkeep.cli.remember_run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvkeep.cli.files import check_text, place, target
from kvkeep.cli.options import (
    ADAPTER,
    BUDGET,
    JSON,
    NO_DEFAULT,
    OUTPUT,
    POLICY,
    CacheOptions,
    check_one_adapter,
    check_policy,
    option,
    parse_budget,
    parse_share,
    parse_system,
)
from kvkeep.errors import InputError
from kvkeep.parameters import MEMORY
from kvkeep.policies import FALLBACK, LATER

_TEXT = "Text"


@dataclass(frozen=True, kw_only=True)
class RememberOptions(CacheOptions):
    """Read a text once and keep its memory in a file, to ask about it any number of times.

    The default policy suits questions that come later. Ask them with kvkeep generate --memory FILE or kvkeep chat
    --memory FILE; the model's weights and the memory's settings must then be the same.
    """

    text: str = option(
        "The text, a UTF-8 file; - is standard input. White space around the text is dropped.",
        "-f",
        metavar="FILE",
        group=_TEXT,
    )
    output: Path = option(
        "File for the memory, for example report.kvkeep.", "-o", read=place, metavar="FILE", group=OUTPUT
    )
    system: str | None = option(
        "A system message before the text, for models with a chat template.",
        default=None,
        read=parse_system,
        metavar="TEXT",
        group=_TEXT,
    )
    raw: bool = option(
        "Do not apply the tokenizer's chat template, neither to the text nor to its questions.",
        default=False,
        group=_TEXT,
        rare=True,
    )
    overwrite: bool = option("Replace a memory of that name.", default=False, group=OUTPUT)
    policy: str | None = option(
        POLICY,
        help=f"{POLICY.help} Default: {LATER}, or {FALLBACK} on a model without rotary positions.",
        default=None,
        more=NO_DEFAULT,
    )
    budget: float | int | None = option(
        BUDGET,
        help=f"{BUDGET.help} Or a share of the text: 20%. Default: 1024; under full the text and 2048 more.",
        read=parse_budget,
    )
    fidelity: float | None = option(
        "In place of --budget: the smallest that keeps this share of the text, e.g. 0.9, found in several readings.",
        default=None,
        metavar="SHARE",
        read=partial(parse_share, why="Policy full keeps all."),
        group=MEMORY,
    )
    no_fidelity: bool = option(
        "Do not measure what the memory keeps of the text.", default=False, group=MEMORY, rare=True
    )
    adapter: Mapping[str, str] = option(ADAPTER)
    json: bool = option(JSON)

    def check_values(self) -> None:
        """Refuse a text, a model or a policy that does not exist, a dtype or a device that cannot be used, and options
        that exclude ``--fidelity``.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        check_text(self.text, kind="text")
        if self.fidelity is not None and (self.budget is not None or self.no_fidelity):
            other = "--no-fidelity" if self.no_fidelity else "--budget"
            raise InputError(f"--fidelity chooses the budget by a measurement. Give --fidelity or {other}, not both.")
        super().check_values()
        if self.policy is not None:
            check_policy(self.policy)

    def checked(self) -> RememberOptions:
        """Check that the memory can be written, and that one adapter at most was named; return the options themselves.

        Raises:
            InputError: several adapters were named, or the memory cannot be written.
        """
        check_one_adapter(self.adapter, "a memory")
        self.check_output()
        return self

    def check_output(self) -> None:
        """Check that the memory's file does not exist, or may be overwritten, and that its folder exists.

        Raises:
            InputError: the memory cannot be written.
        """
        target(self.output, "memory", example="report.kvkeep", overwrite=self.overwrite)

"""``kvkeep tune``: its options. The work is in `kvkeep.cli.tune_run`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from kvkeep.cli import shell_completion
from kvkeep.cli.files import check_text, place
from kvkeep.cli.options import (
    JSON,
    LAYER_BUDGET,
    NO_PLOTS,
    OUTPUT,
    POSITIONS,
    PREFILL_CHUNK,
    ModelOptions,
    check_policies,
    items,
    option,
    parse_budgets,
    parse_head_budget,
    parse_layer_weights,
    parse_share,
    parse_tokens,
)

_QUALITY, _SEARCH = "Quality", "Search"


def _heads(text: str | None, option: str) -> tuple[str | None, ...]:
    """Return the rules of ``--head-budget``, checked; without it ``(None,)``, which is each policy's own rule."""
    return (None,) if text is None else tuple(parse_head_budget(item, option) for item in items(text, option))


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ModelOptions):
    """Find the policy and budget with the smallest memory that keep the target share of the full cache's quality.

    The settings are written to DIR/kvkeep.toml, which kvkeep generate --config and Engine.from_config read.

    Attributes:
        budgets: each a share of the text (a float) or a number of tokens (an int); empty for the default.
    """

    case: str = option(
        "later: questions come after the text was cut. inside: the question ends the text. stream: the text goes on.",
        default="later",
        metavar="CASE",
        complete=shell_completion.words("later", "inside", "stream"),
        group=_QUALITY,
    )
    target: float = option(
        "Share of the full cache's quality to keep with 95 % confidence: 0.98, or 98%.",
        read=partial(parse_share, why="No number of questions can show that all of the full cache's quality is kept."),
        default="0.98",
        metavar="SHARE",
        group=_QUALITY,
    )
    text: str | None = option(
        "UTF-8 text, in which facts are planted and asked for; for stream, the text that goes on. Default: the "
        "package's own plain sentences.",
        default=None,
        metavar="FILE",
        group=_QUALITY,
    )
    questions: str | None = option(
        'Your own questions in place of planted facts: JSONL lines with a "question", its "answer", and perhaps a '
        '"text" of their own.',
        default=None,
        metavar="FILE",
        group=_QUALITY,
    )
    context: int | None = option(
        "Length of a text. Default: 1024, or the trained length if that is less; 256 with --quick.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=_QUALITY,
    )
    facts: int | None = option(
        "Facts planted in a text; all are asked for. Default: 16.", default=None, metavar="N", group=_QUALITY, rare=True
    )
    limit: int | None = option(
        "Questions of the confirmation, or texts for stream. Default: 448 questions, 24 texts.",
        read=parse_tokens,
        default=None,
        metavar="N",
        group=_QUALITY,
        rare=True,
    )
    seed: int = option(
        "Chooses facts and texts.", default=0, least=0, most=2**31 - 1, metavar="N", group=_QUALITY, rare=True
    )
    policies: str | None = option(
        "Policies to search, e.g. leverage,h2o:recent=8,sinks=4. Default: those made for the case.",
        default=None,
        metavar="LIST",
        complete=shell_completion.policy_list,
        group=_SEARCH,
    )
    budgets: tuple[float | int, ...] = option(
        "Budgets to search: shares of the text such as 20%, or tokens. Default: 11 from 3% to 90%.",
        read=parse_budgets,
        reads_none=True,
        default=None,
        metavar="LIST",
        group=_SEARCH,
    )
    prefill_chunk: int | None = option(PREFILL_CHUNK, rare=True)
    layer_budget: str | tuple[float, ...] | None = option(LAYER_BUDGET, read=parse_layer_weights)
    head_budgets: tuple[str | None, ...] = option(
        "Rules to search that divide the budget among KV heads, e.g. uniform,ada:0.2,global:0.2,profile:FILE with the "
        "file of [b]kvkeep calibrate[/b]. Default: each policy's own rule.",
        read=_heads,
        reads_none=True,
        name="head_budget",
        default=None,
        metavar="LIST",
        complete=shell_completion.words("uniform", "ada:0.2", "global:0.2", "profile:"),
        group=_SEARCH,
    )
    positions: Literal["true", "slot"] | None = option(POSITIONS)
    quick: bool = option(
        "A first table in a minute or so: short texts, 24 questions, three policies at three budgets, no promise.",
        default=False,
        group=_SEARCH,
    )
    named_output: Path | None = option(
        "Folder for kvkeep.toml, curve.png and measurements. The same command again resumes a search that was stopped. "
        "Default: tuned; with --quick tuned-quick.",
        "-o",
        read=place,
        name="output",
        default=None,
        metavar="DIR",
        group=OUTPUT,
    )
    plots: bool = option(NO_PLOTS)
    json: bool = option(JSON)

    @property
    def output(self) -> Path:
        """Return the folder of ``--output``; without it ``tuned``, or ``tuned-quick`` with ``--quick``."""
        return self.named_output or Path("tuned-quick" if self.quick else "tuned")

    def check_values(self) -> None:
        """Refuse a text, a model or a policy that does not exist, and a dtype or a device that cannot be used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        check_text(self.text, kind="text file")
        super().check_values()
        if self.policies is not None:
            check_policies(self.policies)

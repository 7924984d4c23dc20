"""An analysis before a model is there: its text, its measurements, and what a folder lacks of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import task
from kvkeep.evals.task import Options
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.result_files import as_text
from kvkeep_lab.analysis.groups import MEASUREMENTS
from kvkeep_lab.analysis.measure import Measurement
from kvkeep_lab.analysis.report import AnalysisFolder

ALL = "all"
"""Stands for every measurement, slow ones too."""

DEFAULT_TOKENS = 4096
"""Default number of tokens to read; fewer if the model was trained for fewer."""


@dataclass(frozen=True)
class Text:
    """The text to analyse.

    Attributes:
        name: name of the file, without its folder.
        sha256: hash of the whole text.
        tokens: the tokens to read.
        notes: notes for the reader.
    """

    name: str
    sha256: str
    tokens: Int[Tensor, " n"]
    notes: list[str]


@dataclass(frozen=True)
class AnalysisJob:
    """An analysis, after all checks that need no weights.

    Attributes:
        model: the model's name in results.
        checkpoint: configuration and tokenizer.
        text: the text to analyse.
        kinds: the measurements.
        seed: seed of random choices.
    """

    model: str
    checkpoint: Checkpoint
    text: Text
    kinds: Sequence[type[Measurement]]
    seed: int

    def manifest(self) -> dict[str, Any]:
        """Return the properties that all results in one folder share, as far as they are known without weights."""
        return {
            "model": as_text(self.model),
            "text": f"sha256:{self.text.sha256}",
            "text_name": as_text(self.text.name),
            "n_tokens": len(self.text.tokens),
            "seed": self.seed,
            "trained_length": self.checkpoint.trained_length,
            "notes": self.text.notes,
        }


def find(names: Sequence[str]) -> list[type[Measurement]]:
    """Return measurements by name, in the page's order; without names, all but the slow ones; `ALL` stands for all.

    Raises:
        InputError: there is no measurement of that name.
    """
    known = {kind.name: kind for kind in MEASUREMENTS}
    if strange := sorted(set(names) - {*known, ALL}):
        raise InputError(f"There is no measurement {strange[0]!r}. Known: {', '.join(known)}, and {ALL}.")
    if ALL in names:
        return [*known.values()]
    return [kind for name, kind in known.items() if (name in names if names else not kind.slow)]


def read(checkpoint: Checkpoint, name: str, text: str, max_tokens: int | None) -> Text:
    """Return the first tokens of a text, with notes about their number.

    Raises:
        InputError: the text is too short, or ``max_tokens`` is below 2, a begin token and one of the text.
    """
    if max_tokens is not None and max_tokens < 2:
        raise InputError(f"max_tokens={max_tokens} leaves nothing to read; give a number of tokens, e.g. 4096.")
    trained, limit = checkpoint.trained_length, checkpoint.position_limit
    wanted = max_tokens or min(DEFAULT_TOKENS, trained or DEFAULT_TOKENS)
    notes = []
    if limit is not None and wanted > limit:
        notes.append(f"The model has learned positions for {limit} tokens, so no more were read.")
        wanted = limit
    tokens = task.windows(checkpoint, Options(text=text), rows=1, length=wanted)[0]
    if max_tokens is not None and len(tokens) < wanted:
        notes.append(f"The text has only {len(tokens)} tokens.")
    if trained is not None and len(tokens) > trained:
        notes.append(
            f"The model was made for {trained} tokens; what it does with the other {len(tokens) - trained} says little "
            "about it."
        )
    return Text(name, hashlib.sha256(text.encode()).hexdigest()[:16], tokens, notes)


def words(checkpoint: Checkpoint, tokens: Int[Tensor, " n"]) -> tuple[str, ...]:
    """Return the piece of text of each token."""
    return tuple(str(checkpoint.tokenizer.decode([token])) for token in tokens.tolist())


def left(job: AnalysisJob, folder: AnalysisFolder) -> list[type[Measurement]]:
    """Return the measurements of a job that a folder does not hold.

    Raises:
        InputError: a file in the folder is damaged.
    """
    return [kind for kind in job.kinds if folder.record(kind.name, kind.VERSION) is None]

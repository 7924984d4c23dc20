"""Calibrates a model: takes the far past from each head alone, then from more and more heads together."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, TypeAlias

from kvkeep.cache.bounded_cache import handing_cache
from kvkeep.cache.hf_layers import HandingLayer
from kvkeep.calibration import passages
from kvkeep.calibration.limited import Near, Passage
from kvkeep.calibration.losses import Bench, Head, Loss
from kvkeep.calibration.part import Part
from kvkeep.errors import InputError
from kvkeep.evals.asking import Prompted
from kvkeep.evals.run import fingerprint, versions
from kvkeep.evals.task import check_positions, past_training
from kvkeep.evals.whole import Adding
from kvkeep.head_profile import Profile, describe
from kvkeep.models.load import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import as_text

METHOD = 1
"""Incremented by every change that changes results; progress of another version is not gone on with."""

_LOSSES = ("harmed", "answers", "text")

_NATS = 1e-4
"""A text on which no head makes a larger difference, in nats, says nothing about heads."""

_SMALL = 0.15
"""Needs below this are 0."""

_ROOM = 24
"""Positions for an answer."""

_STEPS = 12
"""Numbers of heads that are limited together."""

CASES = ("later", "inside")
"""When the memory is cut: before a question about the text is read, or after it."""

OnStage: TypeAlias = Callable[[str, float], object]
"""Called with the name of the current stage and its finished share."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a calibration depends on beside the model.

    Attributes:
        sinks: first tokens that a limited head still sees.
        recent: newest tokens that it still sees.
        case: one of `CASES`. Inside, a limited head still reads the question with all of the past.
        context: tokens of each text.
        documents: number of texts with planted facts.
        questions: questions about each of them.
        windows: number of windows of the text.
        seed: chooses facts, questions and windows.
    """

    sinks: int = 4
    recent: int = 32
    case: str = "later"
    context: int = 1024
    documents: int = 6
    questions: int = 16
    windows: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers and the case.

        Raises:
            InputError: one is out of range, or there is no such case.
        """
        if self.case not in CASES:
            raise InputError(f"case={self.case!r:.40} is neither later nor inside.")
        least = {"sinks": 0, "recent": 1, "documents": 0, "questions": 1, "windows": 1, "seed": 0}
        for name, low in least.items():
            if (number := getattr(self, name)) < low:
                raise InputError(f"{name}={number} is too small; give {low} or more.")
        if self.questions > passages.FACTS:
            raise InputError(f"questions={self.questions} are more than the {passages.FACTS} facts of a text.")
        if self.context < 2 * (self.sinks + self.recent):
            raise InputError(
                f"context={self.context} is too short for {self.sinks} + {self.recent} tokens near a head to be a "
                f"small part of it; give at least {2 * (self.sinks + self.recent)}."
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A calibration, after all checks that need no weights.

    Attributes:
        model: the model's name in the profile.
        checkpoint: configuration and tokenizer.
        text: the user's text; ``None`` for the package's own sentences.
        settings: the numbers.
    """

    model: str
    checkpoint: Checkpoint
    text: str | None
    settings: Settings

    def __post_init__(self) -> None:
        """Make everything that needs no weights, so that bad input is found early.

        Raises:
            InputError: the model has too few positions, the text is too short, or the facts are longer than the
                context.
        """
        check_positions(self.checkpoint, self.settings.context + _ROOM, "calibration", "context")
        _ = self.windows, self.documents

    @functools.cached_property
    def documents(self) -> list[list[Prompted]]:
        """The questions about each text with planted facts."""
        s = self.settings
        return passages.documents(self.checkpoint, n=s.documents, questions=s.questions, tokens=s.context, seed=s.seed)

    @functools.cached_property
    def windows(self) -> list[Passage]:
        """The windows of the text."""
        s = self.settings
        return passages.windows(self.checkpoint, self.text, n=s.windows, tokens=s.context, seed=s.seed)

    def notes(self) -> list[str]:
        """Notes for the user."""
        return past_training(self.checkpoint, self.settings.context, "calibration")

    def manifest(self) -> dict[str, Any]:
        """The properties of a calibration that can go on, as far as they are known without weights."""
        digest = None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()[:16]
        text = "own" if digest is None else f"sha256:{digest}"
        return {"method": METHOD, "model": as_text(self.model), "text": text, **asdict(self.settings)}


def calibrate(job: Job, writer: Writer, part: Part, on_stage: OnStage = lambda what, share: None) -> Profile:
    """Measure the heads that were not measured yet, and return the profile.

    Raises:
        InputError: the part holds another calibration, cannot be written, or memory does not suffice.
        UnsupportedModelError: the model's attention cannot be reached, or its layers differ in their heads.
    """
    about = {"weights": fingerprint(writer), "dtype": writer.dtype, **versions()}
    part.agree({**job.manifest(), **about})
    bench = _bench(job, writer, on_stage)
    alone = _alone(bench, part, on_stage)
    heads = needs(alone, bench.questions)
    together = _together(bench, part, heads, on_stage)
    near = job.settings.sinks + job.settings.recent
    model = {"name": as_text(job.model), **describe(writer.model.config)}
    return Profile(
        model={**model, "layers": len(heads), "kv_heads": len(heads[0])},
        heads=heads,
        least=near,
        sinks=job.settings.sinks,
        weights=about["weights"],
        measured={
            **job.manifest(),
            **about,
            "questions": job.settings.documents * job.settings.questions,
            "known": bench.questions,
            "alone": {name: [[getattr(loss, name) for loss in layer] for layer in alone] for name in _LOSSES},
            "together": together,
        },
    )


def needs(alone: Sequence[Sequence[Loss]], questions: int) -> tuple[tuple[float, ...], ...]:
    """The need of each head, from its loss alone.

    The harm to answers and the distance on the text, each as a share of the largest, are averaged. The need is the root
    of it: heads replace each other, so the harm of one alone falls short of its part. Small needs are 0.

    Args:
        alone: losses by layer and head.
        questions: number of questions that the model answers; harm to one of them may be chance.
    """
    text = _of_largest([[loss.text for loss in layer] for layer in alone], least=_NATS)
    chance = 1 / questions if questions else 0.0
    answers = _of_largest([[max(0.0, (loss.harmed or 0.0) - chance) for loss in layer] for layer in alone], least=0.0)
    parts = [part for part in (text, answers) if any(map(any, part))] or [text]
    by_layer = [zip(*(part[layer] for part in parts), strict=True) for layer in range(len(alone))]
    roots = [[math.sqrt(sum(values) / len(parts)) for values in layer] for layer in by_layer]
    return tuple(tuple(round(root, 3) if root >= _SMALL else 0.0 for root in layer) for layer in roots)


def _of_largest(values: Sequence[Sequence[float]], *, least: float) -> list[list[float]]:
    """Values as shares of the largest; all 0 if that is not above ``least``."""
    largest = max(max(row) for row in values)
    return [[value / largest if largest > least else 0.0 for value in row] for row in values]


def _bench(job: Job, writer: Writer, on_stage: OnStage) -> Bench:
    """The passages, with what the model says of them under the full cache."""
    s, name = job.settings, "reading with the full cache"
    made = job.documents
    layers = handing_cache(writer.model.config, lambda index: Adding()).layers
    together = all(
        isinstance(layer, HandingLayer) for layer in layers
    )  # questions cannot share a state, as they do keys
    asked: list[Passage] = []
    for index, document in enumerate(made):
        on_stage(name, index / (len(made) + 1))
        asked += passages.answered(writer, document, together=together)
    on_stage(name, len(made) / (len(made) + 1))
    return Bench(writer.model, Near(s.sinks, s.recent, s.case == "inside"), asked, job.windows)


def _alone(bench: Bench, part: Part, on_stage: OnStage) -> list[list[Loss]]:
    """The loss of each head alone, by layer; one pass for a layer, whose heads are rows of a batch."""
    found = []
    for done, (layer, heads) in enumerate(bench.heads.items()):
        on_stage("each head alone", done / len(bench.heads))
        row = part.find("layer", layer=layer)
        if row is None or len(row["losses"]) != heads:
            losses = bench.losses([{(layer, head)} for head in range(heads)])
            part.add("layer", {"layer": layer, "losses": [[*astuple(loss)] for loss in losses]})
            found.append(losses)
        else:
            found.append([Loss(*loss) for loss in row["losses"]])
    return found


def _together(bench: Bench, part: Part, heads: Sequence[Sequence[float]], on_stage: OnStage) -> list[dict[str, Any]]:
    """The loss of more and more heads together, those with the least need first."""
    on_stage("heads together", 0.0)
    numbers = list(bench.heads)
    order = sorted((need, numbers[at], head) for at, row in enumerate(heads) for head, need in enumerate(row))
    chosen: list[Head] = [(layer, head) for _, layer, head in order]
    sizes = sorted({round(len(chosen) * step / _STEPS) for step in range(1, _STEPS + 1)} - {0})
    row = part.find("together")
    if row is None or row["sizes"] != sizes:
        losses = bench.losses([chosen[:size] for size in sizes])
        row = {"sizes": sizes, "losses": [[*astuple(loss)] for loss in losses]}
        part.add("together", row)
    on_stage("heads together", 1.0)
    return [{"heads": n, **asdict(Loss(*loss))} for n, loss in zip(sizes, row["losses"], strict=True)]

"""Runs an analysis: one walk for all measurements that read attention or MLP blocks, then the runs of single ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import InputError
from kvkeep.evals.run import fingerprint, versions
from kvkeep.models.device import enough_memory
from kvkeep.models.load import with_random_weights
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import finite
from kvkeep_lab.analysis.job import AnalysisJob, find, left, words
from kvkeep_lab.analysis.measure import AttentionRows, Context, Measurement, Mlp, Skipped, Subject
from kvkeep_lab.analysis.report import AnalysisFolder, interpret
from kvkeep_lab.analysis.walk import look, walk

Record: TypeAlias = dict[str, Any]
"""A finished measurement, as its file holds it: its name, and its result or why there is none."""

OnStage: TypeAlias = Callable[[str, float], object]
"""Called with the name of the current stage and its finished share."""


OnRecord: TypeAlias = Callable[[Sequence[type[Measurement]], float | None], object]
"""Called after each record is written, with the measurements that are left and the seconds that these will take, about;
``None`` while nobody knows."""

_NO_NUMBER = (
    "What the model computes on this text is no number (NaN). Often the dtype is too narrow for the model: choose "
    "another with --dtype."
)


def run(
    job: AnalysisJob,
    writer: Writer,
    folder: AnalysisFolder,
    on_stage: OnStage = lambda what, share: None,
    on_record: OnRecord = lambda waiting, seconds: None,
) -> None:
    """Make every measurement that the folder does not hold yet; each is written as soon as it is finished.

    Args:
        job: the analysis.
        writer: the model.
        folder: gets the records.
        on_stage: called as the work goes on.
        on_record: called after each record.

    Raises:
        InputError: the folder holds another run, another run is writing there, it cannot be written, or memory does not
            suffice.
        UnsupportedModelError: the model's attention cannot be analysed.
    """
    made = Pass(writer, job.text.tokens, job.seed, on_stage)
    with folder.locked():
        folder.open({**job.manifest(), **made.about()})
        waiting = {kind.name: kind for kind in left(job, folder)}
        pace = Pace()
        for record in made.make([*waiting.values()]):
            folder.write(f"{record['name']}.json", record)
            pace.add(waiting.pop(record["name"]), record)
            on_record([*waiting.values()], pace.seconds([*waiting.values()]))


class Pace:
    """Estimates how long measurements take, from those that are finished and from `Measurement.effort`."""

    def __init__(self) -> None:
        self._seconds, self._effort = 0.0, 0

    def add(self, kind: type[Measurement], record: Record) -> None:
        """Count a finished measurement, unless it only reads the walk: that is over when the first runs begin."""
        if kind.effort and "seconds" in record:
            self._seconds, self._effort = self._seconds + record["seconds"], self._effort + kind.effort

    def seconds(self, waiting: Sequence[type[Measurement]]) -> float | None:
        """Return how long the runs of other measurements take; ``None`` while none that has any is finished."""
        effort = sum(kind.effort for kind in waiting)
        if not effort:
            return 0.0
        return self._seconds / self._effort * effort if self._effort else None


@dataclass(eq=False)
class _Made:
    """A measurement in progress.

    Attributes:
        measurement: the measurement.
        seconds: time spent in it.
        reason: why it was skipped; ``None`` if it was not.
    """

    measurement: Measurement
    seconds: float = 0.0
    reason: str | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Add the time spent inside, and record the reason if the measurement is skipped."""
        start = time.perf_counter()
        try:
            yield
        except Skipped as reason:
            self.reason = str(reason)
        self.seconds += time.perf_counter() - start


@dataclass(eq=False)
class _Audience:
    """All readers of one walk."""

    readers: list[_Made]

    def rows(self, rows: AttentionRows) -> None:
        """Pass rows to all readers of attention."""
        self._check("attention", rows.weights)
        for made in self._of("attention"):
            with made.working():
                made.measurement.rows(rows)

    def mlp(self, mlp: Mlp) -> None:
        """Pass tokens to all readers of MLP blocks."""
        self._check("mlp", mlp.residual, mlp.output)
        for made in self._of("mlp"):
            with made.working():
                made.measurement.mlp(mlp)

    def _check(self, part: str, *shown: Tensor) -> None:
        """Skip the readers of a part whose numbers are none: many of theirs would be finite, and mean nothing."""
        if not all(bool(tensor.sum(dtype=torch.float64).isfinite()) for tensor in shown):
            for made in self._of(part):
                made.reason = _NO_NUMBER

    def _of(self, part: str) -> list[_Made]:
        return [made for made in self.readers if part in made.measurement.reads and made.reason is None]


class Pass:
    """Makes measurements of one model on one text.

    Args:
        writer: the model.
        tokens: the text.
        seed: seed of random choices.
        on_stage: called as the work goes on.

    Raises:
        UnsupportedModelError: the model's attention cannot be analysed.
    """

    def __init__(
        self,
        writer: Writer,
        tokens: Int[Tensor, " n"],
        seed: int,
        on_stage: OnStage = lambda what, share: None,
    ) -> None:
        seen = self._anatomy = look(writer.model, int(tokens[0]))
        said = words(writer.checkpoint, tokens)
        windows = tuple(windows_of(writer.model.config).values())
        self._context = Context(len(tokens), seen.n_layers, seen.n_heads, seen.n_kv_heads, tokens, said, seed, windows)
        self._subject = Subject(writer, tokens, seed, lambda: with_random_weights(writer, seed))
        self._on_stage = on_stage

    def about(self) -> dict[str, Any]:
        """Return the properties that all results in one folder share, as far as the model decides them.

        With them come the device, the model's shape and the versions of the packages.
        """
        writer, seen = self._subject.writer, self._anatomy
        shape = {"n_layers": seen.n_layers, "n_heads": seen.n_heads, "n_kv_heads": seen.n_kv_heads}
        made_by = {"weights": fingerprint(writer), "dtype": writer.dtype, "device": writer.device, **versions()}
        return {**made_by, **shape}

    def make(self, kinds: Sequence[type[Measurement]]) -> Iterator[Record]:
        """Make measurements, each as its record is asked for.

        One walk serves all, and one more those with a control; then come the runs of the others, the cheapest first.
        What is impossible here is skipped, and comes first.
        """
        able = []
        for kind in kinds:
            if reason := self._obstacle(kind):
                yield _record(kind, {"skipped": reason})
            else:
                able.append(_Made(kind(self._context)))
        self._walk(able, self._subject.writer, "reading the text")
        plain = [made for made in able if not made.measurement.control]
        for made in plain:
            if "model" not in made.measurement.reads or made.reason:
                yield _finished(made)
        yield from self._control([made for made in able if made.measurement.control])
        for made in sorted(plain, key=lambda made: made.measurement.effort):
            if "model" in made.measurement.reads and not made.reason:
                self._run(made)
                yield _finished(made)

    def _obstacle(self, kind: type[Measurement]) -> str | None:
        """Return why a measurement is impossible here; ``None`` if it is possible."""
        n = self._context.n_tokens
        if n < kind.least_tokens:
            return f"The text has {n} tokens; this needs {kind.least_tokens}."
        if "mlp" in kind.reads and self._anatomy.no_mlp:
            return f"The model's MLP blocks cannot be shown: {self._anatomy.no_mlp}."
        if "units" in kind.reads and self._anatomy.no_units:
            return f"The hidden units of the model's MLP blocks cannot be shown: {self._anatomy.no_units}."
        return None

    def _walk(self, readers: list[_Made], writer: Writer, what: str) -> None:
        reads = frozenset().union(*(made.measurement.reads for made in readers)) & {"attention", "mlp"}
        if not reads:
            return
        self._on_stage(what, 0.0)
        walk(
            writer.model,
            self._subject.tokens,
            _Audience(readers),
            reads=reads,
            progress=lambda share: self._on_stage(what, share),
        )

    def _control(self, trained: list[_Made]) -> Iterator[Record]:
        """Walk the same architecture without training for the measurements that compare with it, and finish them."""
        going = [made for made in trained if not made.reason]
        drawn = [_Made(type(made.measurement)(self._context)) for made in going]
        if going:
            self._walk(drawn, self._subject.random(), "reading it with random weights")
        others = dict(zip(map(id, going), drawn, strict=True))
        for made in trained:
            if "model" in made.measurement.reads and not made.reason:
                self._run(made)
            yield _finished(made, others.get(id(made)))

    def _run(self, made: _Made) -> None:
        what = made.measurement.title
        self._on_stage(what, 0.0)
        with made.working():
            made.measurement.runs(self._subject, lambda share: self._on_stage(what, share))


def _finished(made: _Made, drawn: _Made | None = None) -> Record:
    """Return the record of a measurement: its result, or the reason why there is none."""
    result: dict[str, Any] = {}
    if made.reason is None:
        with made.working():
            result = made.measurement.result()
            if drawn is not None:
                if drawn.reason:
                    raise Skipped(f"With random weights, its control: {drawn.reason}")
                result["random"] = drawn.measurement.result()
            _check_numbers(type(made.measurement), result)
    outcome = {"skipped": made.reason} if made.reason else {"result": result}
    return _record(type(made.measurement), {**outcome, "seconds": round(made.seconds, 3)})


def _check_numbers(kind: type[Measurement], result: dict[str, Any]) -> None:
    """Check that a result that holds NaN or infinity has the numbers that its reading needs.

    Raises:
        Skipped: it lacks one. Its file would look as if it was damaged, however often it is measured again.
    """
    try:
        json.dumps(result, allow_nan=False)
    except ValueError:
        try:
            interpret(kind, finite(result))
        except TypeError as error:
            raise Skipped(_NO_NUMBER) from error


def _record(kind: type[Measurement], outcome: dict[str, Any]) -> Record:
    about = {"name": kind.name, "version": kind.VERSION, "source": kind.source, "title": kind.title}
    return {**about, **outcome, **versions()}


# Measurements in other processes than the one that writes the folder.

LONG = 16_384
"""Tokens of a text above which four workers wait for a single walk: it takes longer than a third of all runs."""

_WALKED = frozenset({"attention", "mlp"})


@dataclass(frozen=True)
class MeasurementPiece:
    """Measurements on their way to the process that makes them.

    Attributes:
        names: of the measurements.
        dtype: of the weights that they are made with.
    """

    names: tuple[str, ...]
    dtype: str


class MeasurementRunner:
    """Makes measurements of one model on one text.

    Args:
        writer: the model.
        tokens: the text.
        seed: seed of random choices.

    Raises:
        UnsupportedModelError: the model's attention cannot be analysed.
    """

    def __init__(self, writer: Writer, tokens: Int[Tensor, " n"], seed: int) -> None:
        self._writer = writer
        self._pass = Pass(writer, tokens, seed)

    def about(self) -> dict[str, Any]:
        """Return the model, as the description of a run has it."""
        return self._pass.about()

    def run(self, piece: MeasurementPiece) -> list[Record]:
        """Return the records of all measurements of a piece.

        Raises:
            KVKeepError: a measurement cannot be made, or this process computes in another dtype.
        """
        if piece.dtype != self._writer.dtype:
            raise InputError(
                f"This worker computes in {self._writer.dtype}, and others in {piece.dtype}. Give `dtype`."
            )
        with enough_memory(self._writer.model.device):
            return [*self._pass.make(find(piece.names))]


def cut(kinds: Sequence[type[Measurement]], tokens: int, workers: int) -> list[list[type[Measurement]]]:
    """Return measurements in the groups in which workers make them, in the order in which they are begun.

    A measurement that does not read the walk is a group of its own. The others read one walk, as in one process: it
    takes as long as what they do with its rows, or longer (9 and 5 s of 4 096 tokens, 66 and 72 s of 16 384, with the
    embedded model on one thread), so a second walk would cost more than it shares out. Only workers that would have
    nothing else to do walk again. For them these measurements are cut into more groups, those with a control or with
    runs of their own first. In a `LONG` text all workers will have nothing else to do.

    The walk grows with the square of the text and the runs do not, so it is begun first; then come the longest runs, so
    that no long one is alone at the end.

    Args:
        kinds: the measurements.
        tokens: tokens of the text.
        workers: number of workers, 1 or more.
    """
    walked = sorted((kind for kind in kinds if kind.reads & _WALKED), key=lambda kind: (not kind.control, -kind.effort))
    others = sorted((kind for kind in kinds if not kind.reads & _WALKED), key=lambda kind: -kind.effort)
    idle = workers if tokens > LONG else workers - len(others)
    groups = max(1, min(len(walked), idle)) if walked else 0
    return [*(walked[first::groups] for first in range(groups)), *([kind] for kind in others)]

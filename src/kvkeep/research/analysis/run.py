"""Runs an analysis: one walk for all measurements that read attention or MLP blocks, then the runs of single ones."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import texts
from kvkeep.evals.run import fingerprint, versions
from kvkeep.evals.task import Options
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer, with_random_weights
from kvkeep.research.analysis.groups import MEASUREMENTS
from kvkeep.research.analysis.measure import Context, Measurement, Mlp, Rows, Skipped, Subject
from kvkeep.research.analysis.report import Folder
from kvkeep.research.analysis.walk import Anatomy, look, walk
from kvkeep.runs import as_text

DEFAULT_TOKENS = 4096
"""Default number of tokens to read; fewer if the model was trained for fewer."""

OnStage: TypeAlias = Callable[[str, float], object]
"""Called with the name of the current stage and its finished share."""


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
class Job:
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
        """The properties that all results in one folder share, as far as they are known without weights."""
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
    """Measurements by name, in the page's order; without names, all of them.

    Raises:
        InputError: there is no measurement of that name.
    """
    known = {kind.name: kind for kind in MEASUREMENTS}
    if strange := sorted(set(names) - set(known)):
        raise InputError(f"There is no measurement {strange[0]!r}. Known: {', '.join(known)}.")
    return [kind for name, kind in known.items() if not names or name in names]


def read(checkpoint: Checkpoint, name: str, text: str, max_tokens: int | None) -> Text:
    """The first tokens of a text, with notes about their number.

    Raises:
        InputError: the text is too short, or ``max_tokens`` is below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens} leaves nothing to read; give a number of tokens, e.g. 4096.")
    trained, limit = checkpoint.trained_length, checkpoint.position_limit
    wanted = max_tokens or min(DEFAULT_TOKENS, trained or DEFAULT_TOKENS)
    notes = []
    if limit is not None and wanted > limit:
        notes.append(f"The model has learned positions for {limit} tokens, so no more were read.")
        wanted = limit
    tokens = texts.windows(checkpoint, Options(text=text), rows=1, length=wanted)[0]
    if max_tokens is not None and len(tokens) < wanted:
        notes.append(f"The text has only {len(tokens)} tokens.")
    if trained is not None and len(tokens) > trained:
        notes.append(
            f"The model was made for {trained} tokens; what it does with the other {len(tokens) - trained} says little "
            "about it."
        )
    return Text(name, hashlib.sha256(text.encode()).hexdigest()[:16], tokens, notes)


def run(job: Job, writer: Writer, folder: Folder, on_stage: OnStage = lambda what, share: None) -> None:
    """Make every measurement that the folder does not hold yet; each is written as soon as it is finished.

    Raises:
        InputError: the folder holds another run, another run is writing there, it cannot be written, or memory does not
            suffice.
        UnsupportedModelError: the model's attention cannot be analysed.
    """
    about = {"weights": fingerprint(writer), "dtype": writer.dtype, "device": writer.device, **versions()}
    anatomy = look(writer.model, int(job.text.tokens[0]))
    shape = {"n_layers": anatomy.n_layers, "n_heads": anatomy.n_heads, "n_kv_heads": anatomy.n_kv_heads}
    with folder.locked():
        folder.open({**job.manifest(), **about, **shape})
        todo = [kind for kind in job.kinds if folder.record(kind.name, kind.VERSION) is None]
        _Pass(job, writer, folder, anatomy, on_stage).make(todo)


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

    def rows(self, rows: Rows) -> None:
        """Pass rows to all readers of attention."""
        for made in self._of("attention"):
            with made.working():
                made.measurement.rows(rows)

    def mlp(self, mlp: Mlp) -> None:
        """Pass tokens to all readers of MLP blocks."""
        for made in self._of("mlp"):
            with made.working():
                made.measurement.mlp(mlp)

    def _of(self, part: str) -> list[_Made]:
        return [made for made in self.readers if part in made.measurement.reads and made.reason is None]


@dataclass(frozen=True, eq=False)
class _Pass:
    """Makes the measurements of one job."""

    job: Job
    writer: Writer
    folder: Folder
    anatomy: Anatomy
    on_stage: OnStage
    subject: Subject = field(init=False)
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        tokens, seed, writer, seen = self.job.text.tokens, self.job.seed, self.writer, self.anatomy
        words = tuple(writer.show_token(token) for token in tokens.tolist())
        context = Context(len(tokens), seen.n_layers, seen.n_heads, seen.n_kv_heads, tokens, words, seed)
        object.__setattr__(self, "context", context)
        drawn = lambda: with_random_weights(writer, seed)  # noqa: E731
        object.__setattr__(self, "subject", Subject(writer, tokens, seed, drawn))

    def make(self, kinds: Sequence[type[Measurement]]) -> None:
        """Make the measurements: one walk for all, one more for those with a control, then the runs of the others.

        Those that are impossible here are saved as skipped first.
        """
        able = []
        for kind in kinds:
            if reason := self._obstacle(kind):
                self._save(kind, {"skipped": reason})
            else:
                able.append(_Made(kind(self.context)))
        self._walk(able, self.writer, "reading the text")
        plain = [made for made in able if not made.measurement.control]
        for made in plain:
            if "model" not in made.measurement.reads or made.reason:
                self._finish(made)
        self._control([made for made in able if made.measurement.control])
        for made in plain:
            if "model" in made.measurement.reads and not made.reason:
                self._run(made)
                self._finish(made)

    def _obstacle(self, kind: type[Measurement]) -> str | None:
        """Why a measurement is impossible here; ``None`` if it is possible."""
        n = self.context.n_tokens
        if n < kind.least_tokens:
            return f"The text has {n} tokens; this needs {kind.least_tokens}."
        if "mlp" in kind.reads and self.anatomy.no_mlp:
            return f"The model's MLP blocks cannot be shown: {self.anatomy.no_mlp}."
        if "units" in kind.reads and self.anatomy.no_units:
            return f"The hidden units of the model's MLP blocks cannot be shown: {self.anatomy.no_units}."
        return None

    def _walk(self, readers: list[_Made], writer: Writer, what: str) -> None:
        reads = frozenset().union(*(made.measurement.reads for made in readers)) & {"attention", "mlp"}
        if not reads:
            return
        self.on_stage(what, 0.0)
        walk(
            writer.model,
            self.job.text.tokens,
            _Audience(readers),
            reads=reads,
            progress=lambda share: self.on_stage(what, share),
        )

    def _control(self, trained: list[_Made]) -> None:
        """Walk the same architecture without training for the measurements that compare with it, and finish them."""
        going = [made for made in trained if not made.reason]
        drawn = [_Made(type(made.measurement)(self.context)) for made in going]
        if going:
            self._walk(drawn, self.subject.random(), "reading it with random weights")
        others = dict(zip(map(id, going), drawn, strict=True))
        for made in trained:
            if "model" in made.measurement.reads and not made.reason:
                self._run(made)
            self._finish(made, others.get(id(made)))

    def _run(self, made: _Made) -> None:
        what = made.measurement.title
        self.on_stage(what, 0.0)
        with made.working():
            made.measurement.runs(self.subject, lambda share: self.on_stage(what, share))

    def _finish(self, made: _Made, drawn: _Made | None = None) -> None:
        """Save the result, or the reason why there is none."""
        result: dict[str, Any] = {}
        if made.reason is None:
            with made.working():
                result = made.measurement.result()
                if drawn is not None:
                    result["random"] = drawn.measurement.result()
        outcome = {"skipped": made.reason} if made.reason else {"result": result}
        self._save(type(made.measurement), {**outcome, "seconds": round(made.seconds, 3)})

    def _save(self, kind: type[Measurement], outcome: dict[str, Any]) -> None:
        about = {"name": kind.name, "version": kind.VERSION, "source": kind.source, "title": kind.title}
        self.folder.write(f"{kind.name}.json", {**about, **outcome, **versions()})

"""Calibrates a model: takes the far past from each head alone, then from more and more heads together."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.attention_probe import keeps_states
from kvkeep.calibration.head_losses import Head, Loss, LossMeter, NearWindow, Passage
from kvkeep.errors import InputError
from kvkeep.evals import task
from kvkeep.evals.forward import Drive, batches, left_padded
from kvkeep.evals.qa_task import decode_greedily
from kvkeep.evals.run import fingerprint, versions
from kvkeep.evals.task import Options, check_positions, past_training
from kvkeep.evals.tasks.recall import NEW_TOKENS, Prompted, ask, right, wording_of
from kvkeep.head_profile import SINKS, Profile, describe
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep.result_files import (
    RowFile,
    as_text,
    finite,
    first_fault,
    list_of,
    optional,
    real_number,
    tuple_of,
    whole_number,
)

# The passages of a calibration: texts with planted facts and questions about them, and windows of the user's text.
#
# A model's own answers under the full cache are its targets, so neither its tokenizer nor its way to answer matters.

TAIL = 128
"""Last tokens of a window of text whose predictions are compared."""

FACTS = 16
"""Facts of a text."""


def documents(checkpoint: Checkpoint, *, n: int, questions: int, tokens: int, seed: int) -> list[list[Prompted]]:
    """Return the questions about each of ``n`` texts of about ``tokens`` tokens with planted facts: a list per text.

    Raises:
        InputError: the facts alone are longer than a text.
    """
    if not n:
        return []
    options = Options(seed=seed, facts=FACTS, ask="later", contexts=(tokens,))
    try:
        asked = ask(checkpoint, options, tokens, n * questions, documents=n)
    except InputError as error:
        raise InputError(
            f"Texts of {tokens} tokens have no room for {FACTS} facts. Give a longer `context`."
        ) from error
    return [list(group) for _, group in groupby(asked, key=lambda question: question.document)]


def answered(writer: Writer, asked: Sequence[Prompted], *, together: bool) -> list[Passage]:
    """Return the questions that the model answers right under the full cache, each followed by its answer, as
    passages.

    Args:
        writer: the model.
        asked: the questions, all about one text.
        together: whether all questions share one passage. A model with layers that have a state needs one for each.

    Returns:
        The passages; none if the model answers nothing right.
    """
    replies, wording = _replies(writer, asked), wording_of(writer.checkpoint)
    known = [
        (question.ids, torch.tensor(reply))
        for question, reply in zip(asked, replies, strict=True)
        if reply and right(wording, question.question, writer.text_of(reply))
    ]
    if not together:
        # a branch begins with the token that predicts its first target
        return [_passage([passage], len(passage[0]) - 1) for passage in known]
    return [_passage(known, asked[0].first)] if known else []


def _passage(known: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]], stem: int) -> Passage:
    """Return one passage: a text, and its questions with their answers as branches behind it, so that it is read once.

    Args:
        known: token ids of each prompt, and of its answer.
        stem: tokens that all prompts begin with.
    """
    branches = [torch.cat([prompt[stem:], reply]) for prompt, reply in known]
    return Passage(
        torch.cat([known[0][0][:stem], *branches]),
        stem,
        tuple(map(len, branches)),
        tuple(len(reply) for _, reply in known),
    )


def _replies(writer: Writer, asked: Sequence[Prompted]) -> list[list[int]]:
    """Return the model's greedy reply to each question under the full cache, without the token that ends it."""
    ends = ends_of(writer.model, writer.checkpoint.tokenizer, chat=True)
    most = NEW_TOKENS[wording_of(writer.checkpoint)]
    replies: list[list[int]] = []
    for at in batches([len(question.ids) for question in asked]):
        prompts = [question.ids for question in asked[at]]
        # with room for prompts and replies, since a full cache never evicts
        drive = Drive(writer, parse("full"), [max(map(len, prompts)) + most] * len(prompts))
        logits = drive.feed(*left_padded(prompts), last_only=True)
        replies += decode_greedily(drive, logits, most, ends)
    return [[token for token in reply if token not in ends] for reply in replies]


def windows(checkpoint: Checkpoint, text: str | None, *, n: int, tokens: int, seed: int) -> list[Passage]:
    """Return windows of a text, or of the package's own sentences, as passages whose last tokens are the targets.

    Raises:
        InputError: the text is too short.
    """
    rows = task.windows(checkpoint, Options(text=text, seed=seed), rows=n, length=tokens)
    # - 1: nothing predicts a text's first token
    return [Passage(row, len(row), (), (min(TAIL, len(row) - 1),)) for row in rows]


# The file of a calibration that is not finished: what was measured so far, a line for each layer.

_BEGINNING = b'{"row": "'
"""The first bytes of each line, see `kvkeep.result_files.read_rows`."""
_RUN = "run"
"""The kind of the first line, which has the calibration's settings."""
_LOSS_NUMBERS = list_of(tuple_of(optional(real_number()), optional(real_number()), real_number()))
"""The numbers of each `Loss`."""
_ENTRIES = {"layer": {"losses": _LOSS_NUMBERS}, "together": {"sizes": list_of(whole_number()), "losses": _LOSS_NUMBERS}}
"""The entries of each kind of line that are read; settings are compared as they are."""


class CalibrationFile:
    """Lines of one calibration, in a file beside the profile. They are read when the calibration goes on.

    Args:
        file: the file, locked.

    Attributes:
        path: its path.
    """

    def __init__(self, file: RowFile):
        self._file, self.path = file, file.path
        self._rows = file.read()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[CalibrationFile]:
        """Open and lock the file of a calibration's progress, make it if need be, and yield it with its lines read.

        A file without lines is removed at the end.

        Raises:
            InputError: the file cannot be read or written, another run is writing to the file, or the file holds
                something else.
        """
        if path.exists() and not path.is_file():  # a pipe would never end
            raise InputError(f"{path} is no file, and the calibration notes its progress there. Remove it.")
        rows = RowFile(path, _BEGINNING, _fault)
        with ExitStack() as held:
            with _writing(path):
                file = held.enter_context(rows.locked())
            # the other run may have removed the file between its opening and its locking here
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise InputError(f"Another run has just finished and removed {path}. Look at what it wrote first.")
            part = cls(rows)
            try:
                yield part
            finally:
                if not part._rows:
                    path.unlink(missing_ok=True)

    def agree(self, run: Mapping[str, Any]) -> None:
        """Check that the first line has the settings ``run`` of this calibration; if the file is empty, write it.

        Raises:
            InputError: the file holds another calibration.
        """
        wanted = json.loads(json.dumps(finite(dict(run))))  # tuples as lists, for example, as they are read back
        if not self._rows:
            self.add(_RUN, wanted)
            return
        found = {key: value for key, value in self._rows[0].items() if key != "row"}
        differ = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
        if self._rows[0]["row"] != _RUN or differ:
            what = differ[0] if differ else "its first line"
            raise InputError(
                f"{self.path} holds the progress of another calibration: {what} was {found.get(what)!s:.60} and is "
                f"{wanted.get(what)!s:.60} now. Give the same settings to go on, another `output`, or remove the file."
            )

    def find(self, row: str, **keys: object) -> dict[str, Any] | None:
        """Return the last line of the kind ``row`` that has these entries; ``None`` if there is none yet."""
        for line in self._rows[::-1]:  # one that lacked losses has been measured again since
            if line["row"] == row and all(line.get(key) == value for key, value in keys.items()):
                return line
        return None

    def add(self, row: str, values: Mapping[str, Any]) -> None:
        """Write a line, and wait until it is on the disk.

        Raises:
            InputError: the line cannot be written; the lines before are safe.
        """
        with _writing(self.path):
            self._rows += self._file.extend([finite({"row": row, **values})])

    def remove(self) -> None:
        """Forget the lines, so that the file is removed when it is closed: the profile is written."""
        self._rows = []


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write of the progress file ``path`` in the context into an `InputError`.

    Raises:
        InputError: something in the context has raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The progress of the calibration cannot be written to {path}: {error.strerror}. Make room or give another "
            "`output`; the same command goes on from there."
        ) from error


def _fault(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a line of the progress file; ``None`` if it is valid."""
    if not isinstance(row.get("row"), str):
        return "it is no line of a calibration"
    return first_fault(row, _ENTRIES.get(row["row"], {}))


METHOD = 1
"""Incremented by every change that changes results; progress of another version is not gone on with."""

_LOSSES = ("harmed", "answers", "text")
"""The fields of a `Loss`, which the profile lists under ``measured``."""

_NATS = 1e-4
"""A text on which no head makes a larger difference, in nats, says nothing about heads."""

_SMALL = 0.15
"""Needs below this are 0."""

_ROOM = 24
"""Positions for an answer, the most that `NEW_TOKENS` allows one."""

_STEPS = 12
"""Numbers of heads that are limited together."""

QUICK = {"context": 256, "documents": 0, "windows": 1}
"""Settings of a first look, in place of the defaults."""

CASES = ("later", "inside")
"""When the memory is cut: before a question about the text is read, or after it."""

OnStage: TypeAlias = Callable[[str, float], object]
"""Called with the name of the current stage and its finished share."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
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

    sinks: int = SINKS
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
            InputError: a number is out of range, or there is no such case.
        """
        if self.case not in CASES:
            raise InputError(f"case={self.case!r:.40} is neither later nor inside.")
        least = {"sinks": 0, "recent": 1, "documents": 0, "questions": 1, "windows": 1, "seed": 0}
        for name, low in least.items():
            if (number := getattr(self, name)) < low:
                raise InputError(f"{name}={number} is too small; give {low} or more.")
        if self.questions > FACTS:
            raise InputError(f"The questions, {self.questions}, are more than the {FACTS} facts of a text.")
        if self.context < 2 * (self.sinks + self.recent):
            raise InputError(
                f"context={self.context} is too short for {self.sinks} + {self.recent} tokens near a head to be a "
                f"small part of it; give at least {2 * (self.sinks + self.recent)}."
            )


@dataclass(frozen=True, kw_only=True)
class Calibration:
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
    settings: CalibrationSettings

    def __post_init__(self) -> None:
        """Make questions and windows, for which no weights are needed, so that bad input is found early.

        Raises:
            InputError: the model has too few positions, the text is too short, or the facts are longer than the
                context.
        """
        check_positions(self.checkpoint, self.settings.context + _ROOM, "calibration", "context")
        _ = self.windows, self.documents

    @functools.cached_property
    def documents(self) -> list[list[Prompted]]:
        """Return the questions about each text with planted facts."""
        s = self.settings
        return documents(self.checkpoint, n=s.documents, questions=s.questions, tokens=s.context, seed=s.seed)

    @functools.cached_property
    def windows(self) -> list[Passage]:
        """Return the windows of the text."""
        s = self.settings
        return windows(self.checkpoint, self.text, n=s.windows, tokens=s.context, seed=s.seed)

    def notes(self) -> list[str]:
        """Return sentences for the user, such as that the texts are longer than the model was trained for."""
        return past_training(self.checkpoint, self.settings.context, "calibration")

    def manifest(self) -> dict[str, Any]:
        """Return what this calibration must have in common with one that it resumes, as far as it is known without the
        weights: method, model, text and settings.
        """
        digest = None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()[:16]
        text = "own" if digest is None else f"sha256:{digest}"
        return {"method": METHOD, "model": as_text(self.model), "text": text, **asdict(self.settings)}


def calibrate(
    job: Calibration, writer: Writer, part: CalibrationFile, on_stage: OnStage = lambda what, share: None
) -> Profile:
    """Measure how much each head needs the far past, and return the profile of the heads. It is not written.

    Args:
        job: texts, questions and settings.
        writer: the model.
        part: the progress: what it has is not measured again, and what is measured is written there.
        on_stage: called with the name and the finished share of each stage.

    Raises:
        InputError: the part holds another calibration, cannot be written, or memory does not suffice.
        UnsupportedModelError: the model's attention cannot be reached, or its layers differ in their heads.
    """
    about = {"weights": fingerprint(writer), "dtype": writer.dtype, **versions()}
    part.agree({**job.manifest(), **about})  # before anything is measured
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
    """Return the need of each head, in [0, 1], by layer, from the loss of limiting that head alone.

    The harm to answers and the distance on the text, each as a share of the largest, are averaged. The need is the root
    of it: heads replace each other, so the harm of one alone falls short of its part. Small needs are 0.

    Args:
        alone: losses by layer and head.
        questions: number of questions that the model answers; harm to one of them may be chance.
    """
    text = _of_largest([[loss.text for loss in layer] for layer in alone], least=_NATS)
    # one harmed answer may be chance
    chance = 1 / questions if questions else 0.0
    answers = _of_largest([[max(0.0, (loss.harmed or 0.0) - chance) for loss in layer] for layer in alone], least=0.0)
    # a measure by which no head matters says nothing; if that is true of both, no head needs anything
    parts = [part for part in (text, answers) if any(map(any, part))] or [text]
    by_layer = [zip(*(part[layer] for part in parts), strict=True) for layer in range(len(alone))]
    roots = [[math.sqrt(sum(values) / len(parts)) for values in layer] for layer in by_layer]
    return tuple(tuple(round(root, 3) if root >= _SMALL else 0.0 for root in layer) for layer in roots)


def _of_largest(values: Sequence[Sequence[float]], *, least: float) -> list[list[float]]:
    """Return values as shares of the largest one; all 0 if the largest is not above ``least``."""
    largest = max(max(row) for row in values)
    return [[value / largest if largest > least else 0.0 for value in row] for row in values]


def _bench(job: Calibration, writer: Writer, on_stage: OnStage) -> LossMeter:
    """Answer the questions and read all passages with the full cache, and return the meter that compares heads with it.

    Questions that the model answers wrong have no part in it.
    """
    s, name = job.settings, "reading with the full cache"
    made = job.documents
    together = not keeps_states(writer.model.config)  # questions cannot share a state, as they do keys
    asked: list[Passage] = []
    for index, document in enumerate(made):
        on_stage(name, index / (len(made) + 1))
        asked += answered(writer, document, together=together)
    on_stage(name, len(made) / (len(made) + 1))
    return LossMeter(writer.model, NearWindow(s.sinks, s.recent, s.case == "inside"), asked, job.windows)


def _alone(bench: LossMeter, part: CalibrationFile, on_stage: OnStage) -> list[list[Loss]]:
    """Return the loss of limiting each head alone, by layer.

    A layer takes one pass, with its heads as rows of a batch. What the file has is not measured again; the rest is
    written there.
    """
    found = []
    for done, (layer, heads) in enumerate(bench.heads.items()):
        on_stage("each head alone", done / len(bench.heads))
        row = part.find("layer", layer=layer)
        if row is None or len(row["losses"]) != heads:  # a changed file may have another number
            losses = bench.losses([{(layer, head)} for head in range(heads)])
            part.add("layer", {"layer": layer, "losses": [[*astuple(loss)] for loss in losses]})
            found.append(losses)
        else:
            found.append([Loss(*loss) for loss in row["losses"]])
    return found


def _together(
    bench: LossMeter, part: CalibrationFile, heads: Sequence[Sequence[float]], on_stage: OnStage
) -> list[dict[str, Any]]:
    """Return the losses of growing sets of heads that are limited together, those with the least need first.

    There are at most `_STEPS` sets; each entry has its number of heads (``heads``), and the fields of a `Loss`. What
    the file has is not measured again; else it is written there.

    Args:
        bench: measures losses.
        part: the file.
        heads: the need of each head, by layer.
        on_stage: called at the start and at the end.
    """
    on_stage("heads together", 0.0)
    numbers = list(bench.heads)
    order = sorted((need, numbers[at], head) for at, row in enumerate(heads) for head, need in enumerate(row))
    chosen: list[Head] = [(layer, head) for _, layer, head in order]
    # without 0, which a model of few heads has among its sizes
    sizes = sorted({round(len(chosen) * step / _STEPS) for step in range(1, _STEPS + 1)} - {0})
    row = part.find("together")
    if row is None or row["sizes"] != sizes or len(row["losses"]) != len(sizes):  # as in a layer, see `_alone`
        losses = bench.losses([chosen[:size] for size in sizes])
        row = {"sizes": sizes, "losses": [[*astuple(loss)] for loss in losses]}
        part.add("together", row)
    on_stage("heads together", 1.0)
    return [{"heads": n, **asdict(Loss(*loss))} for n, loss in zip(sizes, row["losses"], strict=True)]

"""A worker: a process with a model and an engine of its own, which runs the lines of a batch job that it is given.

Nothing here knows Ray. A thread steps the engine, and a coroutine waits for the answer of each line, so that lines
share the engine's rows as they do in one process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from kvkeep.batch.input import BadLine, InputLine, reason_of
from kvkeep.batch.output import as_line, record
from kvkeep.batch.survey import Shape, problem
from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Result
from kvkeep.errors import KVKeepError
from kvkeep.scale.worker_pool import WeightLayout, WorkerFacts, WorkKind, WorkResult
from kvkeep.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Built:
    """What a worker works with.

    Attributes:
        engine: runs requests.
        read: reads a line with the model's tokenizer, from its number and its bytes.
        texts: decodes tokens, for log-probabilities in OpenAI's format.
        weights: a fingerprint of the model's weights.
        layout: how they were laid out.
        memory: the memory that every line follows.
    """

    engine: Engine
    read: Callable[[int, bytes], InputLine | BadLine]
    texts: TokenTexts | None
    weights: str
    layout: WeightLayout = (False, False)
    memory: Snapshot | None = None


@runtime_checkable
class Make(Protocol):
    """Loads a model and makes an engine, in the process of a worker. It travels there, so it is small."""

    def __call__(self, like: WeightLayout | None) -> Built:
        """Load the model, make the engine, and return both.

        Args:
            like: how another worker has laid out the weights; ``None`` for a choice by speed.

        Raises:
            KVKeepError: the model cannot be used, or not one row fits.
        """


@dataclass(frozen=True)
class EngineFacts(WorkerFacts):
    """What a worker says of itself once its engine is there.

    Attributes:
        rows: number of sequences that it runs at once.
        row_bytes: bytes of a row.
    """

    rows: int
    row_bytes: int


class LineWorker:
    """Runs lines on an engine of its own.

    Args:
        make: makes the engine.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._built: Built | None = None
        self._loop: Loop | None = None

    def begin(self, like: WeightLayout | None) -> EngineFacts | str:
        """Load the model, make the engine and start its thread; return facts, or the message of an error of kvkeep.

        Args:
            like: how another worker has laid out the weights; ``None`` for a choice by speed.
        """
        try:
            built = self._make(like)
        except KVKeepError as error:
            return str(error)
        self._built, self._loop = built, Loop(built.engine)
        self._loop.start()
        engine = built.engine
        return EngineFacts(built.weights, built.layout, platform.node(), os.getpid(), engine.rows, engine.row_bytes)

    def judge(self, shapes: Sequence[Shape]) -> list[str | None]:
        """Return for each shape of requests why the engine refuses these, in words; ``None`` where it accepts them."""
        built = self._built
        assert built is not None
        return [problem(shape, built.engine, built.memory) for shape in shapes]

    async def run(self, number: int, raw: bytes, made_by: Mapping[str, Any]) -> WorkResult:
        """Read a line, run its requests to their end, and return its output line, or the reason why it has none.

        Args:
            number: the line's number in the input.
            raw: the line's bytes.
            made_by: the settings of the job, which are written beside the completion.
        """
        built, loop = self._built, self._loop
        assert built is not None
        assert loop is not None
        line = built.read(number, raw)
        if isinstance(line, BadLine):
            return WorkResult(number, reason=line.reason)
        results = await asyncio.wrap_future(loop.put(line))
        if isinstance(results, str):
            return WorkResult(number, line.digest, reason=results)
        whole = as_line(record(line, results, made_by, built.texts))
        return WorkResult(number, line.digest, whole, new=sum(len(result.token_ids) for result in results))


@dataclass
class _Task:
    """A line in the engine.

    Attributes:
        line: the line.
        future: takes the results of its requests, or the reason why it failed.
        results: place among the line's requests → result.
    """

    line: InputLine
    future: Future[list[Result] | str] = field(default_factory=Future)
    results: dict[int, Result] = field(default_factory=dict)

    def end(self, place: int, result: Result) -> None:
        """Store the result of the line's request at this place. With the last one, end the future: with all results in
        the order of the requests, or with the reason of the first that failed.
        """
        self.results[place] = result
        if len(self.results) < len(self.line.requests):
            return
        problems = [str(result.error) for result in self.results.values() if result.finish_reason == "error"]
        self.future.set_result(problems[0] if problems else [self.results[at] for at in sorted(self.results)])


class Loop(threading.Thread):
    """Steps an engine as long as lines are in it, in a thread of its own that ends with the process.

    Args:
        engine: runs the lines. Nobody else adds requests to it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="kvkeep-worker", daemon=True)
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._running: dict[int, tuple[_Task, int]] = {}

    def put(self, line: InputLine) -> Future[list[Result] | str]:
        """Queue a line, from any thread, and return a future of the results of its requests, in their order, or of the
        reason why it failed, as text. An error of the engine itself is raised by the future.
        """
        task = _Task(line)
        self._inbox.put(task)
        return task.future

    def run(self) -> None:
        """Hand lines to the engine and step it, for ever. An error of the engine itself ends all lines in it."""
        while True:
            self._feed()
            try:
                events = self._engine.step()
            except BaseException as error:  # the thread goes on, and the lines' callers get the error
                self._give_up(error)
                continue
            for event in events:
                # requests of lines that were given up have no entry any more
                if event.result is not None and event.id in self._running:
                    task, place = self._running.pop(event.id)
                    task.end(place, event.result)

    def _feed(self) -> None:
        """Hand waiting lines to the engine while it has room for more; block until there is a line if nothing runs."""
        while not self._running or self._engine.has_room:
            try:
                task = self._inbox.get(block=not self._running)
            except queue.Empty:  # the engine goes on with the lines that it has
                return
            self._begin(task)

    def _begin(self, task: _Task) -> None:
        """Add a line's requests to the engine. If one is refused, the others are cancelled and the line gets the
        reason.
        """
        numbers: list[int] = []
        try:
            numbers.extend(self._engine.add(request) for request in task.line.requests)
        except KVKeepError as error:
            for number in numbers:
                self._engine.cancel(number)
            task.future.set_result(reason_of(error))
        except BaseException as error:  # raised where the line's result is awaited
            task.future.set_exception(error)
        else:
            self._running |= {number: (task, place) for place, number in enumerate(numbers)}

    def _give_up(self, error: BaseException) -> None:
        """Cancel all requests that the engine runs, and let the futures of their lines raise an error."""
        for number in self._running:
            self._engine.cancel(number)
        # each line once, though it may have several requests
        for task in {id(task): task for task, _ in self._running.values()}.values():
            task.future.set_exception(error)
        self._running.clear()


# at_once is more than `ahead` of any engine: Ray would let calls beyond it wait, and rows would stay empty
LINES = WorkKind[EngineFacts](
    LineWorker, "line", at_once=4096, ahead=lambda facts: facts.rows + max(2, facts.rows // 2), patience_s=300.0
)
"""Batch jobs: a worker has half as many lines more than rows, so that no row is empty while an answer is on its way."""


# A worker for evaluations and analyses: a process with a model, which runs the pieces that it is given one at a time.
#
# Nothing here knows Ray, nor what a piece is.


@runtime_checkable
class PieceRunner(Protocol):
    """A model and what is done with it, such as `kvkeep.evals.run.CellRunner`."""

    def about(self) -> dict[str, Any]:
        """Return the model's properties as ``run.json`` records them, ``weights`` and ``dtype`` included."""

    def run(self, piece: Any) -> Any:
        """Run a piece of work and return its result.

        Raises:
            KVKeepError: the piece cannot be run.
        """


@runtime_checkable
class MakeModelWorker(Protocol):
    """Loads a model in the process of a worker. It travels there, so it is small."""

    def __call__(self) -> PieceRunner:
        """Load the model, and return what runs pieces on it.

        Raises:
            KVKeepError: the model cannot be used there.
        """


@dataclass(frozen=True)
class ModelFacts(WorkerFacts):
    """What a worker says of itself once its model is there.

    Attributes:
        about: see `PieceRunner.about`.
    """

    about: Mapping[str, Any]


class ModelWorker:
    """Runs pieces; the result of each is its answer.

    Args:
        make: loads the model.
    """

    def __init__(self, make: MakeModelWorker) -> None:
        self._make = make
        self._runner: PieceRunner | None = None

    def begin(self, like: WeightLayout | None) -> ModelFacts | str:
        """Load the model; return facts, or the message of an error of kvkeep. Other errors are raised.

        Args:
            like: of no effect: evaluations and analyses leave weights as they are.
        """
        try:
            self._runner = self._make()
            about = self._runner.about()
        except KVKeepError as error:
            return str(error)
        return ModelFacts(about["weights"], (False, False), platform.node(), os.getpid(), about)

    def run(self, number: int, piece: Any) -> WorkResult:
        """Run a piece, and return what became of it, with its result.

        Any error refuses the piece, and the job ends: the error would occur in every worker.
        """
        assert self._runner is not None
        try:
            return WorkResult(number, whole=self._runner.run(piece))
        except KVKeepError as error:
            return _refusal(number, str(error))
        except Exception as error:  # a defect, or a file that cannot be read
            logging.getLogger(__name__).exception("Piece %d failed.", number)
            return _refusal(number, f"{type(error).__name__}: {error}")


def _refusal(number: int, why: str) -> WorkResult:
    """Return what becomes of a piece that this worker refuses: the reason, with the name of its machine before it."""
    return WorkResult(number, refused=True, reason=f"On {platform.node()}: {why}")


CELLS = WorkKind[ModelFacts](ModelWorker, "cell", at_once=1, ahead=lambda facts: 1, patience_s=3600.0)
"""Evaluations: cells take seconds to hours, so none waits in the hands of a worker while another one is free."""

MEASUREMENTS = WorkKind[ModelFacts](
    ModelWorker, "measurement group", at_once=1, ahead=lambda facts: 1, patience_s=3600.0
)
"""Analyses: a group is a few measurements, and takes seconds to hours as well."""

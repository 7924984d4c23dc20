"""The driver of a job in pieces on a cluster of Ray: it starts the workers, hands out pieces, and takes the answers.

A command says what a worker is made from, which pieces there are, and what becomes of a result::

    size = pool_size(workers, todo, piece="cell", tell=note)
    with running(make_pool, size, threads=threads, address=address, stopped=stopped) as pool:
        outcome = run_pieces(pool, source, write, stopped)
        outcome.check(say_what_is_unfinished)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from kvkeep.errors import InputError
from kvkeep.models import threads as threads_of
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.scale.cluster import joined, own_cpus
from kvkeep.scale.worker_pool import Source, Stopped, WorkerFacts, WorkerPool, WorkResult

F = TypeVar("F", bound=WorkerFacts)

Write: TypeAlias = Callable[[WorkResult], "str | None"]
"""Writes the result of a piece; returns why no piece can be run any more, if that is so."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The model of a worker, as the command's options name it. It travels to the worker's process, so it is small.

    Attributes:
        model: a hub name or a whole path; ``None``: the embedded model.
        dtype, device, load_in: how weights are read.
        threads: of torch.
        allow_pickle: whether weights may be read from pickles.
        adapters: whole paths of adapters by their names.
    """

    model: str | None
    dtype: str = "auto"
    device: str = "auto"
    load_in: str | None = None
    threads: int | None = None
    allow_pickle: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)

    def load(self, check: Callable[[Checkpoint], object] = lambda checkpoint: None) -> Writer:
        """Load the model in this process, set the number of threads, and return the model with its tokenizer.

        Args:
            check: raises an error for a checkpoint that is refused, before its weights are read.

        Raises:
            KVKeepError: the model cannot be used here, or ``check`` refuses it.
        """
        with quiet():
            checkpoint = find(self.model or embedded(), allow_pickle=self.allow_pickle)
            check(checkpoint)
            model = read_weights(checkpoint, self.dtype, self.device, load_in=self.load_in, adapters=self.adapters)
            writer = Writer(checkpoint, model)
        threads_of.use(writer.model, self.threads)
        return writer


def pool_size(workers: int, todo: int, *, piece: str, tell: Callable[[str], object]) -> int:
    """Return the number of workers for a job: no more than it has pieces to do, and at least one. Tell the user if that
    is fewer than wanted.

    Args:
        workers: the number that the user wants.
        todo: the pieces that are not done.
        piece: a word for a piece.
        tell: prints a note for the user.
    """
    size = min(workers, max(1, todo))
    if size < workers:
        are = "is" if todo == 1 else "are"
        tell(f"{_count(size, 'worker')} for {_count(todo, piece)} that {are} not done")
    return size


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


@contextmanager
def running(
    make: Callable[[], WorkerPool[F]], size: int, *, threads: int | None, address: str | None, stopped: Stopped
) -> Iterator[WorkerPool[F]]:
    """Join or start a cluster, start the workers, and yield their pool; at the end of the context end the workers and
    leave the cluster.

    If the user stops the job meanwhile, the pool is yielded although its workers may not have begun.

    Args:
        make: returns the workers' pool, once the cluster has been joined.
        size: the number of workers.
        threads: of each worker; by default as many as there are processors for it.
        address: of a running cluster; by default one is started here.
        stopped: whether the user wants to stop.

    Raises:
        InputError: there is no cluster, or the workers do not fit or cannot begin.
    """
    with joined(address, cpus=own_cpus(size, threads) * size), closing(make()) as pool:
        pool.begin(stopped)
        yield pool


@dataclass
class Outcome:
    """What has become of the pieces that were handed out.

    Attributes:
        refusal: why no piece can be run any more.
        failed: number of a piece → why it has no result.
        stopped: whether the user has stopped the job.
    """

    refusal: str | None = None
    failed: dict[int, str] = field(default_factory=dict)
    stopped: bool = False

    def take(self, answer: WorkResult, write: Write) -> None:
        """Write a piece's result with ``write``, or store why it has none or why the job has to end.

        Of several refusals by workers, the first is kept. Call this once for each piece.
        """
        if answer.refused:
            self.refusal = self.refusal or str(answer.reason)
        elif answer.whole is None:
            self.failed[answer.number] = str(answer.reason)
        elif (refusal := write(answer)) is not None:
            self.refusal = refusal

    def check(self, unfinished: Callable[[Mapping[int, str]], str]) -> None:
        """Raise an error if no piece could be run any more, or if pieces have failed.

        Failed pieces are no error if the user has stopped the job: other pieces have no result either.

        Args:
            unfinished: returns the message for pieces that have failed.

        Raises:
            InputError: there is a refusal, of a worker or of the results' writer, or pieces have failed.
        """
        if self.refusal is not None:
            raise InputError(self.refusal)
        if self.failed and not self.stopped:
            raise InputError(unfinished(self.failed))


def run_pieces(
    pool: WorkerPool[F],
    source: Source,
    write: Write,
    stopped: Stopped,
    *,
    told: Sequence[Any] = (),
    on_failure: Callable[[WorkResult], object] = lambda answer: None,
) -> Outcome:
    """Run pieces until each has an answer, one is refused, or the user stops; write each result as it comes.

    Return what has become of the pieces.

    Args:
        pool: the workers, which have begun.
        source: gives the pieces as workers become free.
        write: writes a result; a reason that it returns ends the job, as a piece that is refused does.
        stopped: whether the user wants to stop.
        told: what workers are told beside each piece.
        on_failure: called with the answer of a piece that has failed.

    Raises:
        InputError: no worker is left.
        LostClusterError: the cluster has gone away.
    """
    outcome = Outcome()

    def take(answer: WorkResult) -> None:
        if answer.whole is None and not answer.refused:  # a refusal ends the job, and is told as its error
            on_failure(answer)
        outcome.take(answer, write)

    pool.run(source, told, take, lambda: stopped() or outcome.refusal is not None)
    outcome.stopped = stopped()
    return outcome

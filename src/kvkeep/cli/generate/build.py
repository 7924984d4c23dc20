"""The model and the engine of a batch job, in this process or in that of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvkeep.cli import console, torchrun
from kvkeep.cli.generate.completion import engine_for, sampling_of
from kvkeep.cli.generate.encode import reader
from kvkeep.cli.generate.request import Batch, Request
from kvkeep.cli.loading import writer_of
from kvkeep.cli.memories import Memory
from kvkeep.engine import Engine
from kvkeep.engine.admission import DEFAULT_ROWS
from kvkeep.errors import InputError
from kvkeep.models.compile import compile_layers
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.fused_modules import pack_weights
from kvkeep.models.load import embedded, find, quiet
from kvkeep.models.prepare import chosen, prepare
from kvkeep.models.tokenization import Writer
from kvkeep.models.weight_hash import fingerprint
from kvkeep.openai.responses import Show
from kvkeep.scale.worker import Built
from kvkeep.scale.worker_pool import Layout


def rows_of(batch: Batch, most: int) -> int:
    """The rows of an engine that runs a number of requests; what fits into `kv_memory` may be less."""
    return max(1, min(most, batch.max_rows or (most if batch.kv_memory else DEFAULT_ROWS)))


def engine_of(
    writer: Writer, request: Request, batch: Batch, *, most: int, budget: int, like: Layout | None = None
) -> Engine:
    """The engine of a batch job, with no more rows than requests.

    Args:
        writer: the model.
        request: the options of the command.
        batch: the options of the job.
        most: the number of requests.
        budget: tokens kept per layer and head.
        like: how another worker of the job has laid out the weights, see `kvkeep.models.prepare.prepare`.

    Raises:
        BudgetError: not one row fits.
    """
    options: dict[str, Any] = {"rows": rows_of(batch, most), "kv_memory": batch.kv_memory}
    engine = engine_for(writer, request, budget=budget, prompts_first=True, **options)
    if torchrun.processes() > 1:  # each would choose for itself which layers to fuse, and round in another way
        return engine
    if not batch.compile:
        prepare(writer.model, engine.rows, like)
    else:
        if like is None or like[1]:
            pack_weights(writer.model, engine.rows, if_faster=like is None)
        console.progress("compiling …")
        console.note(f"{console.count(compile_layers(writer.model), 'layer')} compiled")
    return engine


def show_with(writer: Writer) -> Show:
    """A function that returns the text of a token. Many tokenizers drop the white space at the beginning of a text."""

    def show(before: int | None, token: int) -> str:
        if before is not None:
            first, both = writer.show_token(before), str(writer.checkpoint.tokenizer.decode([before, token]))
            if both.startswith(first):
                return both.removeprefix(first)
        return writer.show_token(token)

    return show


_ANY_LINE = b'{"prompt": "a"}'


@contextmanager
def _meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do some work in another thread during this block. Whoever needs it later says why it fails, if it does."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name="kvkeep-meanwhile")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a worker needs to make the engine of a job; see `kvkeep.scale.worker.Make`.

    Attributes:
        request: the options of the command, with the model's whole path.
        batch: the options of the job.
        most: the number of requests of a worker.
        budget: tokens kept per layer and head.
        memory: a fingerprint of the memory that every line follows.
    """

    request: Request
    batch: Batch
    most: int
    budget: int
    memory: str | None

    def __call__(self, like: Layout | None) -> Built:
        """Load the model, and make the engine.

        Args:
            like: how another worker has laid out the weights.

        Raises:
            KVKeepError: the model or the memory cannot be used here, or not one row fits.
        """
        with quiet(), enough_memory(parse_device(self.request.device)):
            memory = None if self.request.memory is None else Memory.read(self.request.memory)
            if memory is not None and memory.digest != self.memory:
                raise InputError(f"{self.request.memory} is another memory on a worker. Give every node the same file.")
            checkpoint = find(self.request.model or embedded(), allow_pickle=self.request.allow_pickle)
            read_line = reader(checkpoint, self.request, sampling_of(self.request), memory)
            with _meanwhile(lambda: read_line(0, _ANY_LINE)):  # starts the process that fills in chat templates
                writer = writer_of(checkpoint, self.request)
                weights = fingerprint(writer.model)  # before layers are packed
            engine = engine_of(writer, self.request, self.batch, most=self.most, budget=self.budget, like=like)
        snapshot = None if memory is None else memory.snapshot
        return Built(engine, read_line, show_with(writer), weights, chosen(writer.model), snapshot)

"""A batch job on workers of Ray: this process reads the lines, hands them out, and writes the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

from kvkeep.batch.output import Output
from kvkeep.batch.progress import Work
from kvkeep.cli import console
from kvkeep.cli.generate.bar import Bar
from kvkeep.cli.generate.build import Recipe, rows_of
from kvkeep.cli.generate.request import Batch, Request
from kvkeep.cli.workers import PROCESS_BYTES, room_for, whole
from kvkeep.engine import Engine
from kvkeep.errors import KVKeepError
from kvkeep.models.load import embedded
from kvkeep.planning.plan import plan
from kvkeep.scale.worker import LINES, EngineFacts
from kvkeep.scale.worker_pool import Answer, Crew, Item, Layout


def crew_of(
    request: Request,
    batch: Batch,
    *,
    requests: int,
    longest: int,
    budget: int,
    memory: str | None,
    like: Layout | None = None,
) -> Crew[EngineFacts]:
    """The workers of a job, which have not been started yet. The cluster has been joined.

    Args:
        request: the options of the command.
        batch: the options of the job.
        requests: number of all requests.
        longest: tokens of the longest one.
        budget: tokens kept per layer and head.
        memory: a fingerprint of the memory that every line follows.
        like: how an earlier run of the job laid out the weights.

    Raises:
        InputError: nodes have other versions than this process, or the workers do not fit.
    """
    assert batch.workers is not None
    most = ceil(requests / batch.workers)
    need, device = room_for(
        batch.workers,
        _bytes(request, batch, most, longest, budget),
        device=request.device,
        threads=request.threads,
        address=batch.address,
    )
    asked = replace(request, model=whole(request.model), memory=whole(request.memory), device=device)
    recipe = Recipe(request=asked, batch=batch, most=most, budget=budget, memory=memory)
    return Crew(LINES, recipe, batch.workers, need, like=like, tell=console.note)


def _bytes(request: Request, batch: Batch, most: int, longest: int, budget: int) -> int:
    """Main memory of a worker, as ``kvkeep plan`` counts it; 0 for a model that cannot be planned."""
    names = ("kv_bits", "layer_budget", "head_budget", "prefill_chunk", "positions", "dtype")
    options: dict[str, Any] = {name: getattr(request, name) for name in names}
    with suppress(KVKeepError):
        made = plan(request.model or embedded(), request.policy, budget, context=longest, **options)
        weights, row = made.bounded.weight_bytes, made.bounded.row_bytes
        rows = rows_of(batch, most)
        slots = min(rows * row, batch.kv_memory) if batch.kv_memory else rows * row
        return PROCESS_BYTES + slots + (weights if request.load_in is None else 0)
    return 0


class Far:
    """The lines of a job on their way through workers.

    Args:
        crew: the workers.
        lines: the lines that are not done yet, while they are read.
        work_of: returns the tokens of a line's requests.
    """

    engine: Engine | None = None

    def __init__(self, crew: Crew[EngineFacts], lines: Iterator[Item], work_of: Callable[[int], Work]) -> None:
        self._crew, self._lines, self._work_of = crew, lines, work_of
        self.size: Mapping[str, int] = {
            "rows": crew.facts.rows,
            "row_bytes": crew.facts.row_bytes,
            "workers": crew.size,
        }

    def run(self, output: Output, bar: Bar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and why lines failed."""
        new, failed = 0, dict[int, str]()

        def take(answer: Answer) -> None:
            nonlocal new
            if answer.number in output.done or answer.number in failed:
                return
            if answer.whole is None:
                failed[answer.number] = str(answer.reason)
                bar.whole(self._work_of(answer.number), None)
                return
            output.put(answer.number, answer.digest, answer.whole)
            new += answer.new
            bar.whole(self._work_of(answer.number), answer.new)

        self._crew.run(lambda place: next(self._lines, None), [output.own], take, stopped)
        return new, failed

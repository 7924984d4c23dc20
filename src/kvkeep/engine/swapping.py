"""Rows in time slices: sequences that have had their slice wait in main memory, and others go on in their rows.

A slice ends when the time spent on copies is again a small share of the time of all steps. Both are measured. Copies
count as far as steps wait for them: on a CUDA device most of them take place beside the steps, see
`kvkeep.engine.host_copies`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvkeep.engine.dispatcher import Guard
from kvkeep.engine.host_copies import Pinned, Staging
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.prefix_cache import PrefixCache, begin
from kvkeep.engine.scheduler import Scheduler, Swap
from kvkeep.engine.sequence import Hosted, Sequence
from kvkeep.types import MemoryUsage

SHARE = 0.05
"""The largest share of the time of steps that copies take in the long run."""

LEAST = 8
"""The fewest tokens of a slice: a sequence that comes and goes faster makes little progress."""

MOST_HOST_ROWS = 2**31 - 1
"""More sequences than any memory holds."""

_SAVED = 2
"""Swaps that steps without a swap may pay for in advance, so that swaps never come in bursts."""

_log = logging.getLogger(__name__)


class Swapper:
    """Decides when a sequence gives up its row. It is entered around every step, and measures the step.

    Args:
        host_rows: the most sequences that may wait in main memory after they have begun.
        staging: copies beside the steps; ``None``: steps wait for all copies.

    Attributes:
        copied_s: seconds of all steps in which nothing but copies took place, with what it took to begin copies that
            then took place beside the steps.
        worked_s: seconds of everything else in all steps.
        swaps: the number of sequences that have given up their rows.
    """

    def __init__(self, host_rows: int, staging: Staging | None = None) -> None:
        self.host_rows = host_rows
        self.staging = staging
        self.copied_s = self.worked_s = 0.0
        self.swaps = 0
        self._saved_s = self._cost_s = self._ahead_s = self._began = self._copying_s = 0.0

    def __enter__(self) -> None:
        """Begin to measure a step."""
        self._began, self._copying_s = time.perf_counter(), 0.0

    def __exit__(self, *error: object) -> None:
        """Count the step's time without copies as worked, and save a share of it for later swaps. Free the device's
        copy of a sequence that has left, once it has arrived in main memory.
        """
        worked = time.perf_counter() - self._began - self._copying_s
        self.worked_s += worked
        self._saved_s = min(self._saved_s + SHARE * worked, _SAVED * self._cost_s)
        if self.staging is not None:
            self.staging.settle()

    def turn(
        self, scheduler: Scheduler, rows: KVManager, prefixes: PrefixCache, guarded: Callable[[Sequence], Guard]
    ) -> None:
        """Swap a waiting request with a sequence whose time slice is over, if there is one. Then start copying the next
        one to the device ahead of its turn.

        Args:
            scheduler: knows who waits and who runs.
            rows: the rows.
            prefixes: common beginnings of prompts.
            guarded: returns a context that keeps a failure within one request.
        """
        if (swap := self.due(scheduler, rows)) is not None:
            with self.timed(), guarded(swap.coming):
                with guarded(swap.leaving):
                    self.leave(swap, scheduler, rows)
                if swap.coming.row is not None:  # else the leaving one could not be copied, and stays
                    begin(swap.coming, swap.row, rows, prefixes)
        if self.staging is not None:
            self._prefetch(self.staging, scheduler, rows)

    def _prefetch(self, staging: Staging, scheduler: Scheduler, rows: KVManager) -> None:
        """Start copying the next sequence to the device, ahead of its swap.

        The time that the start takes counts for that swap.
        """
        began = time.perf_counter()
        sequence = scheduler.next_hosted(rows.takes)
        held = sequence.hosted.contents if sequence is not None and sequence.hosted else None
        if staging.prefetch(held if isinstance(held, Pinned) else None):
            self._spend(took := time.perf_counter() - began)
            self._ahead_s += took

    def due(self, scheduler: Scheduler, rows: KVManager) -> Swap | None:
        """Return the swap that is due: the sequence whose time slice is over, and the one that takes its row. Return
        ``None`` if nobody waits, if the steps since the last swap have not taken long enough to pay for another one, or
        if the scheduler has no pair.
        """
        # the first swap has to save nothing: what one costs is not known before
        if not scheduler.waiting or self._saved_s < self._cost_s:
            return None
        return scheduler.swap(rows.takes, self.host_rows, least=LEAST)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the body as the cost of one swap, with what it took to prepare this swap ahead.

        The device's work is waited for before and after the body, so that it counts for neither too little nor too
        much.
        """
        self._wait()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._spend(took := time.perf_counter() - began)
            self._cost_s, self._ahead_s = self._ahead_s + took, 0.0

    def _spend(self, seconds: float) -> None:
        """Count seconds as spent on copies, and take them from what later swaps may cost."""
        self._copying_s += seconds
        self.copied_s += seconds
        self._saved_s -= seconds

    def _wait(self) -> None:
        """Wait until the device has done all work of the steps."""
        if self.staging is not None:
            self.staging.synchronize()

    def memory(self, waiting: Iterable[Sequence]) -> MemoryUsage:
        """Return the bytes of all sequences that wait in main memory, and of the copies that are on their way."""
        on_the_way = MemoryUsage(allocated_bytes=self.staging.nbytes if self.staging else 0)
        return hosted_memory(waiting) + on_the_way

    def clear(self) -> None:
        """Free the memory of copies on the device."""
        if self.staging is not None:
            self.staging.clear()

    def leave(self, swap: Swap, scheduler: Scheduler, rows: KVManager) -> None:
        """Copy the leaving sequence into main memory, and give its row to the coming one.

        If the copy fails, most likely for lack of memory, the sequence keeps its row and begins a new slice.
        """
        sequence, row = swap.leaving, swap.row
        try:
            memory = rows.memory_of(row)
            held = Hosted(self.staging.take(rows, row, memory) if self.staging else rows.take(row), memory)
        except Exception as error:  # most likely no memory: the sequence is as it was
            _log.debug("A sequence keeps its row.", exc_info=error)
            sequence.resumed = len(sequence.token_ids)
            return
        sequence.swap_out(held)
        rows.end(row)
        scheduler.exchange(swap)
        self.swaps += 1


def hosted_memory(waiting: Iterable[Sequence]) -> MemoryUsage:
    """Return the memory usage of all waiting sequences that were swapped out, with the bytes that they take in main
    memory as the allocated ones.
    """
    found = (held for sequence in list(waiting) if (held := sequence.hosted) is not None)
    return sum((replace(held.memory_usage, allocated_bytes=held.contents.nbytes) for held in found), MemoryUsage())

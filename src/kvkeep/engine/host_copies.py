"""Copies of rows on their way to and from main memory, beside the steps of a model on a CUDA device.

A sequence that gives up its row is copied within the device, and the row is free at once. From there it goes into
pinned main memory while steps run. The sequence whose turn comes next is brought to the device in the same way ahead of
its turn, and then copied into its row within the device. So steps wait for copies within the device only, unless main
memory is slower than a turn is long.

On other devices nothing of this exists. A model that is split over processes has no turns at all, see
`kvkeep.engine.tensor_parallel.check_split`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from kvkeep.kv.store import inference
from kvkeep.snapshot.contents import Contents
from kvkeep.types import MemoryUsage

# Copies between a device and main memory that take place beside the steps of a model.
#
# A queue has few operations, so that tests on a CPU can have one whose copies come as late as they may.

Bytes: TypeAlias = Tensor
"""A contiguous tensor of uint8 with one axis."""


@runtime_checkable
class CopyEvent(Protocol):
    """The end of some copies; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Return whether the event has occurred."""

    def synchronize(self) -> None:
        """Block until the event has occurred."""


@runtime_checkable
class CopyQueue(Protocol):
    """Copies between a device and main memory that take place beside the steps, in the order of their calls.

    Attributes:
        device: the device.
    """

    device: torch.device

    def empty(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` of new memory on the device, whose content is not set."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` of new main memory that the device can read and write by itself; its content is not set."""

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> CopyEvent:
        """Start copying the first tensor of each pair into the second, after the device's work so far, and return an
        event at the copies' end.

        The tensors' memory is not given to others before the copies have ended, even if nobody holds the tensors.
        """

    def hold(self, event: CopyEvent) -> None:
        """Make the device wait for an event before it does any later work of the steps.

        The call itself does not wait.
        """

    def synchronize(self) -> None:
        """Block until the device has done all work of the steps so far. Copies of this queue may go on."""


class CudaCopyQueue:
    """A queue of copies on a stream of its own.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)

    def empty(self, nbytes: int) -> Bytes:
        """Allocate memory on the device, which belongs to the stream of the steps."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Bytes:
        """Allocate pinned main memory for the device."""
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> CopyEvent:
        """Start the copies on this queue's own stream, after the work queued so far on the stream of the steps. Return
        an event at their end.

        Device memory is recorded on the stream, so that it is not given away early; torch does this for pinned memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                for block in (source, target):
                    if block.is_cuda:  # else torch could give its memory away before the copy has ended
                        block.record_stream(self._stream)
                target.copy_(source, non_blocking=True)
            ended: torch.cuda.Event = self._stream.record_event()
        return ended

    def hold(self, event: CopyEvent) -> None:
        """Make the stream of the steps wait for an event. The call itself does not wait."""
        torch.cuda.current_stream(self.device).wait_event(cast(torch.cuda.Event, event))

    def synchronize(self) -> None:
        """Block until the stream of the steps has done all its work."""
        torch.cuda.current_stream(self.device).synchronize()


COPIES = 2
"""Most copies of rows that lie on the device: one that leaves, and one that comes."""

_ALIGNED = 64
"""Storages begin at multiples of so many bytes, so that a view of any dtype can begin there."""

_PAGE = 4096
"""Bytes of the smallest block of pinned memory."""

_BLOCKS = 5
"""A sequence takes at most 2 to this power blocks, so less than a sixteenth of its bytes is lost at the end."""

_log = logging.getLogger(__name__)


class _View(NamedTuple):
    """A tensor in some bytes: the place and the length of its storage there, and how it lies in its storage."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, flat: Bytes) -> Tensor:
        """Return the tensor that this view describes, over a flat buffer of bytes."""
        storage = flat[self.start : self.start + self.nbytes].view(self.dtype)
        # `as_strided` counts from the beginning of the whole buffer, not of this part
        return storage.as_strided(self.shape, self.stride, storage.storage_offset() + self.offset)


class _Layout:
    """Where the tensors of a memory lie if the storages that they share lie one after the other.

    Args:
        contents: the memory.

    Attributes:
        storages: the place of each storage, and its bytes.
        nbytes: bytes of all of them.
    """

    def __init__(self, contents: Contents) -> None:
        self.storages: list[tuple[int, Bytes]] = []
        self.nbytes = 0
        self._views: list[_View] = []
        self._starts: dict[int, int] = {}
        self._like = contents.each(self._note)

    def over(self, flat: Bytes) -> Contents:
        """Return the memory of a row whose tensors are views of a flat buffer, which has its bytes in this layout."""
        views = iter(self._views)
        return self._like.each(lambda _: next(views).over(flat))

    def _note(self, x: Tensor) -> Tensor:
        """Record where a tensor lies in its storage, and the storage itself unless it is known. Return a tensor of its
        shape without memory.
        """
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._starts:
            self._starts[storage.data_ptr()] = self.nbytes
            # the whole storage, once, however many of the tensors are views of it
            whole = x.as_strided((storage.nbytes() // x.element_size(),), (1,), 0).view(torch.uint8)
            self.storages.append((self.nbytes, whole))
            self.nbytes += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        start, offset = self._starts[storage.data_ptr()], int(x.storage_offset())
        self._views.append(_View(start, storage.nbytes(), x.dtype, tuple(x.shape), x.stride(), offset))
        return torch.empty(x.shape, dtype=x.dtype, device="meta")


class Pinned:
    """The memory of a sequence in blocks of pinned main memory.

    Args:
        layout: where its tensors lie.
        blocks: the blocks, of equal size.
        written: the end of the copies into the blocks.
        queue: of these copies.

    Attributes:
        staged: its copy on the device, and the end of its way there; ``None`` while there is none.
        stays: whether it could not be brought to the device ahead of its turn.
    """

    def __init__(self, layout: _Layout, blocks: Sequence[Bytes], written: CopyEvent, queue: CopyQueue) -> None:
        self._layout, self._blocks, self._written, self._queue = layout, blocks, written, queue
        self.staged: tuple[Bytes, CopyEvent] | None = None
        self.stays = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pinned blocks."""
        return sum(map(len, self._blocks))

    @property
    def device_bytes(self) -> int:
        """Return the bytes that a copy of this memory needs on the device."""
        return self._layout.nbytes

    @inference
    def load(self) -> Contents:
        """Return the sequence's memory as tensors: on the device if a copy was staged there, and otherwise a copy in
        main memory, once the memory has arrived in the pinned blocks.
        """
        if self.staged is not None:
            try:
                self._queue.hold(self.staged[1])
                return self._layout.over(self.staged[0])
            except Exception as error:  # the device has no memory left, for example; the copy below still is there
                _log.debug("A sequence comes from main memory after all.", exc_info=error)
                self.staged = None
        self._written.synchronize()
        return self._layout.over(torch.cat(list(self._blocks)))

    def stage(self) -> CopyEvent:
        """Start copying the sequence's memory to the device, set ``staged``, and return the event of the copy's end."""
        flat = self._queue.empty(self._layout.nbytes)
        parts = zip(self._blocks, flat.split(len(self._blocks[0])), strict=True)
        pairs = [(block[: len(part)], part) for block, part in parts]
        self.staged = flat, (arrived := self._queue.copy(pairs))
        return arrived


@runtime_checkable
class Rows(Protocol):
    """Rows whose memory can be copied, as `kvkeep.engine.kv_manager.KVManager` has them."""

    def take(self, row: int, device: torch.device | None = ..., /) -> Contents:
        """Copy the memory of a row to a device; by default into main memory.

        For ``None`` leave the copy on the row's own device.
        """


class _Leaving(NamedTuple):
    """A copy of a row on the device whose way to main memory has begun, and its end."""

    contents: Contents
    nbytes: int
    written: CopyEvent


class Staging:
    """The copies of rows on the device: at most one that leaves, and at most one that comes.

    Whatever fails here, most likely for lack of memory, is done in the blocking way instead.

    Args:
        queue: copies beside the steps.

    Attributes:
        most_bytes: the most that all copies may take on the device; ``None``: no limit but their number.
    """

    def __init__(self, queue: CopyQueue) -> None:
        self._queue = queue
        self.most_bytes: int | None = None
        self._leaving: _Leaving | None = None
        # weak, so that the copy of a sequence that is cancelled meanwhile is freed with the sequence
        self._coming: weakref.ref[Pinned] | None = None
        self._arrived: CopyEvent | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all copies on the device. A copy that has just left counts until the step ends."""
        leaving, coming = self._leaving, self._staged()  # other threads may ask
        staged = None if coming is None else coming.staged
        return (leaving.nbytes if leaving else 0) + (len(staged[0]) if staged else 0)

    @inference
    def take(self, rows: Rows, row: int, memory: MemoryUsage) -> Pinned | Contents:
        """Copy the memory of a row into main memory. If there is room on the device, the copy takes place beside the
        steps, and is returned as pinned memory; else wait for it, and return the contents.

        In both cases the row may be overwritten at once.

        Args:
            rows: the rows.
            row: the row's index.
            memory: the bytes of the row.
        """
        try:
            found = self._leave(rows, row, memory)
        except Exception as error:  # staging is for speed alone
            _log.debug("A sequence leaves without staging.", exc_info=error)
            found = None
        return rows.take(row) if found is None else found

    def _leave(self, rows: Rows, row: int, memory: MemoryUsage) -> Pinned | None:
        """Start copying a row into pinned main memory. Return ``None`` if the copy must block instead: the device has
        no room, or the layers are on several devices.
        """
        self.settle(wait=True)  # one copy leaves at a time
        if not self._fits(bound(memory.allocated_bytes)):
            return None
        layout = _Layout(contents := rows.take(row, None))
        if any(storage.device != self._queue.device for _, storage in layout.storages):
            return None  # layers on several devices
        size = block_bytes(layout.nbytes)
        blocks = [self._queue.pinned(size) for _ in range(0, layout.nbytes, size)]
        written = self._queue.copy(list(_pieces(layout.storages, blocks)))
        self._leaving = _Leaving(contents, sum(len(storage) for _, storage in layout.storages), written)
        layout.storages = []  # they would hold the device's memory
        return Pinned(layout, blocks, written, self._queue)

    @inference
    def prefetch(self, pinned: Pinned | None) -> bool:
        """Start copying the sequence whose turn comes next to the device, unless it is there, there is no room, or
        another copy is on its way. Drop the copy of another sequence that is there.

        Args:
            pinned: the sequence's memory; ``None``: no sequence in pinned memory waits.

        Returns:
            Whether it was tried: a copy was started, or its start failed, after which it is not tried again.
        """
        self.settle()
        if (other := self._staged()) is not None and other is not pinned:
            other.staged = None
        if pinned is None or pinned.staged or pinned.stays:
            return False
        try:
            # one copy comes at a time, also if its sequence has gone meanwhile
            if not self._fits(pinned.device_bytes) or not (self._arrived is None or self._arrived.query()):
                return False
            self._coming = weakref.ref(pinned)
            self._arrived = pinned.stage()
        except Exception as error:  # to bring it early is for speed alone
            _log.debug("A sequence is not brought to the device ahead of its turn.", exc_info=error)
            # so that it is not tried again in each step
            pinned.stays = True
        return True

    def clear(self) -> None:
        """Wait for all copies, and free their memory on the device."""
        self.settle(wait=True)
        if (coming := self._staged()) is not None:
            coming.staged = None
        try:
            if self._arrived is not None:
                self._arrived.synchronize()
        except Exception as error:  # an error of the device, which its next use raises again
            _log.debug("A copy may not have arrived.", exc_info=error)
        self._coming = self._arrived = None

    def synchronize(self) -> None:
        """Block until the device has done all work of the steps so far."""
        self._queue.synchronize()

    def settle(self, *, wait: bool = False) -> None:
        """Free the device's copy of a leaving row once it has arrived in main memory.

        With ``wait``, wait for its arrival.
        """
        if self._leaving is None:
            return
        try:
            if wait:
                self._leaving.written.synchronize()
            elif not self._leaving.written.query():
                return
        except Exception as error:  # whoever loads the copy will be told
            _log.debug("A copy may not have arrived.", exc_info=error)
        self._leaving = None

    def _staged(self) -> Pinned | None:
        """Return the sequence that has a copy on the device ahead of its turn; ``None`` if there is none."""
        coming = self._coming() if self._coming else None
        return coming if coming is not None and coming.staged else None

    def _fits(self, nbytes: int) -> bool:
        """Return whether a copy of this size fits into the limit beside the copies that are there."""
        return self.most_bytes is None or self.nbytes + nbytes <= self.most_bytes


def staging_for(device: torch.device) -> Staging | None:
    """Return the staging for a model on a CUDA device; ``None`` on other devices."""
    return Staging(CudaCopyQueue(device)) if device.type == "cuda" else None


def bound(row_bytes: int) -> int:
    """Return the most bytes that the copy of a row of ``row_bytes`` can take on the device: it has positions twice."""
    # an eighth more covers the second copy of the positions, and alignment
    return row_bytes * 9 // 8 + _PAGE


def block_bytes(nbytes: int) -> int:
    """Return the bytes of each of the pinned blocks, at most 32, that hold ``nbytes`` together: a power of two,
    since torch's allocator rounds up to one anyway, and at least a page.
    """
    return max(_PAGE, 1 << max(0, nbytes.bit_length() - _BLOCKS))


def _pieces(storages: Sequence[tuple[int, Bytes]], blocks: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield the pairs of slices to copy: each part of a storage, and the part of a block where it goes."""
    size = len(blocks[0])
    for start, storage in storages:
        at = 0
        while at < len(storage):
            block, inside = divmod(start + at, size)
            n = min(len(storage) - at, size - inside)
            yield storage[at : at + n], blocks[block][inside : inside + n]
            at += n

"""Copies between a device and main memory that take place beside the steps of a model.

A queue has few operations, so that tests on a CPU can have one whose copies come as late as they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

Bytes: TypeAlias = Tensor
"""A contiguous tensor of uint8 with one axis."""


@runtime_checkable
class Event(Protocol):
    """The end of some copies; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Wait for it."""


@runtime_checkable
class CopyQueue(Protocol):
    """Copies between a device and main memory that take place beside the steps, in the order of their calls.

    Attributes:
        device: the device.
    """

    device: torch.device

    def empty(self, nbytes: int) -> Bytes:
        """Return new memory on the device."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return new main memory that the device can read and write by itself."""

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> Event:
        """Copy each first tensor into the second one, once the device has done what the steps have asked for so far.

        Their memory is not given to others before the copies have ended, even if nobody holds the tensors.
        """

    def hold(self, event: Event) -> None:
        """Let the device do what the steps ask for from now on only after an event."""

    def synchronize(self) -> None:
        """Wait until the device has done all that the steps have asked for. Copies of this queue may go on."""


class CudaCopyQueue:
    """A queue of copies on a stream of its own.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)

    def empty(self, nbytes: int) -> Bytes:
        """See `CopyQueue`. The memory belongs to the stream of the steps."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Bytes:
        """See `CopyQueue`."""
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> Event:
        """See `CopyQueue`. torch notes by itself that the stream uses pinned memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                for one in (source, target):
                    if one.is_cuda:
                        one.record_stream(self._stream)
                target.copy_(source, non_blocking=True)
            ended: torch.cuda.Event = self._stream.record_event()
        return ended

    def hold(self, event: Event) -> None:
        """See `CopyQueue`."""
        torch.cuda.current_stream(self.device).wait_event(cast(torch.cuda.Event, event))

    def synchronize(self) -> None:
        """See `CopyQueue`."""
        torch.cuda.current_stream(self.device).synchronize()

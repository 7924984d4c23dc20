"""Where a model runs and in which dtype: names of the user turned into torch's, and memory that does not suffice."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvkeep.errors import InputError, one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a model can be loaded in, besides ``auto``: the checkpoint's own dtype."""


def parse_dtype(text: str) -> torch.dtype | str:
    """The dtype of a name, or ``auto``.

    Raises:
        InputError: the name is unknown.
    """
    if text == "auto":
        return text
    if text not in DTYPES:
        close = difflib.get_close_matches(text, DTYPES, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"Unknown dtype {text!r}.{hint} Known: auto, {', '.join(DTYPES)}.")
    return DTYPES[text]


def parse_device(text: str) -> torch.device:
    """The device of a name; ``auto`` takes CUDA where there is one, otherwise the CPU.

    Raises:
        InputError: the name is unknown, or this machine has no such device.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device).sum().item()  # fails where there is no such device, and on "meta"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise InputError(f"Device {text!r} cannot be used here. Available: {', '.join(known)}.") from error
    return device


@contextmanager
def enough_memory(device: torch.device) -> Iterator[None]:
    """Turn a failed allocation into an error of kvkeep.

    Raises:
        InputError: what was asked for does not fit into the device's memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"Out of memory on {device}. Lower the budget or --max-rows, set --prefill-chunk, or take a smaller dtype "
            "or model."
        ) from error


def reason_of(error: BaseException) -> str:
    """What a failed step is reported with: the error in one line, and what helps where memory was too small."""
    remedy = "Use fewer rows, a smaller budget or a prefill_chunk, or a smaller dtype or model."
    return f"{one_line(error).rstrip('.')}. {remedy}" if is_out_of_memory(error) else one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on a CPU torch says so only in the text of the error."""
    told = ("allocate memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )

"""A model with its weights, as the options of a command ask for it. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from kvkeep.cli import console, distributed
from kvkeep.models import threads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.generation_config import remark
from kvkeep.models.load import read_weights
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tokenization import Writer


@runtime_checkable
class Weights(Protocol):
    """The options that say how weights are read."""

    @property
    def dtype(self) -> str:
        """Return the value of ``--dtype``."""

    @property
    def device(self) -> str:
        """Return the value of ``--device``."""

    @property
    def load_in(self) -> str | None:
        """Return the value of ``--load-in``."""

    @property
    def threads(self) -> int | None:
        """Return the value of ``--threads``."""


def check_weights(asked: Weights) -> None:
    """Refuse names of dtypes, devices and formats that do not exist, before anything is read.

    Raises:
        InputError: a name is unknown, or cannot be used here.
    """
    parse_dtype(asked.dtype)
    check_format(asked.load_in, parse_device(asked.device))


def writer_of(
    checkpoint: Checkpoint, asked: Weights, adapters: Mapping[str, str] | None = None, *, merge: bool = False
) -> Writer:
    """Read a model's weights and return the model; print a note on its settings that kvkeep leaves out.

    Under torchrun the model is split over its processes.

    Args:
        checkpoint: the model.
        asked: how its weights are read.
        adapters: folders of adapters by their names.
        merge: whether a single adapter is merged into the weights, because all that runs has it.

    Raises:
        KVKeepError: the weights cannot be used.
    """
    split = distributed.processes() > 1
    model = read_weights(
        checkpoint, asked.dtype, asked.device, load_in=asked.load_in, tp=split, adapters=adapters, merge=merge
    )
    threads.use(model, asked.threads)
    if left_out := remark(model):
        console.note(left_out)
    return Writer(checkpoint, model)

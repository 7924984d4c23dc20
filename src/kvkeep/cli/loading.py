"""A model with its weights, as the options of a command ask for it. Importing this module imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvkeep.cli import console, distributed
from kvkeep.cli.options import ModelOptions
from kvkeep.cli.usage_errors import exists
from kvkeep.errors import SnapshotError
from kvkeep.models import threads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.generation_config import remark
from kvkeep.models.load import read_weights
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import available, spec, split
from kvkeep.result_files import in_full
from kvkeep.snapshot.snapshot import Snapshot


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
    """Read a model's weights and return the model; print a note on its generation settings that kvkeep leaves out.

    The number of torch's threads is set as well.

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
    with console.Heartbeat.working(lambda: f"loading the weights of {checkpoint.name} …"):
        model = read_weights(
            checkpoint, asked.dtype, asked.device, load_in=asked.load_in, tp=split, adapters=adapters, merge=merge
        )
    threads.use(model, asked.threads)
    if left_out := remark(model):
        console.note(left_out)
    return Writer(checkpoint, model)


# Where the model of a saved memory lies, in the note of its file, and what a command has to name all the same.

_SOURCE = "model"
"""The entry of a note: a hub name or a full path, or ``None`` for the embedded model."""


def with_source(snapshot: Snapshot, model: str | None) -> Snapshot:
    """Return a copy of a snapshot that names its model in its note, so that commands find the model by the file.

    Args:
        snapshot: the snapshot.
        model: the model as it was typed, which is noted as a full path if there is such a file or folder; ``None``
            for the embedded model.
    """
    source = os.path.abspath(in_full(model)) if model is not None and exists(model) else model
    return replace(snapshot, note={**snapshot.note, _SOURCE: source})


def source_of(snapshot: Snapshot, file: str) -> str | None:
    """Return the model that has made a snapshot, as a command takes it; ``None`` for the embedded model.

    A file that no command has written names a model of the hub in its fingerprint. It does not say where the folder of
    another model lies, and ``None`` stands for that, too.

    Raises:
        SnapshotError: the file's note holds no name.
    """
    if _SOURCE in snapshot.note:
        source = snapshot.note[_SOURCE]
        if source is not None and not (isinstance(source, str) and source.strip()):
            raise SnapshotError(f"{file} names its model by {source!r:.60}, which is no name. Give the MODEL.")
        return source
    made = snapshot.fingerprint.model
    # names of the hub have a slash; a folder has its last name alone
    return made if "/" in made else None


def words_for_memory(asked: ModelOptions, adapters: Mapping[str, str], policy: Policy) -> list[str]:
    """Return the words without which a command refuses a saved memory, as its file does not decide them: a model whose
    files may be pickles, a policy that is not registered, adapters, and the format of the weights.

    Args:
        asked: the options of the command that has made the memory.
        adapters: folders of adapters by their names.
        policy: the memory's policy.
    """
    words = [asked.model, "--allow-pickle"] if asked.model is not None and asked.allow_pickle else []
    if split(name := spec(policy))[0] not in available():
        words += ["--policy", name]
    for adapter, folder in adapters.items():
        words += ["--adapter", f"{adapter}={folder}"]
    return words + (["--load-in", asked.load_in] if asked.load_in else [])

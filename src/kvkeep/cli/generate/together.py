"""A batch job of several processes, which torchrun has started for one model."""

from __future__ import annotations

from dataclasses import replace

from kvkeep.batch.output import Output
from kvkeep.cli import torchrun
from kvkeep.cli.generate.request import Batch
from kvkeep.errors import InputError
from kvkeep.models import tensor_parallel


def together(batch: Batch) -> Batch:
    """The options of a job that several processes run together: the first one writes, the others write nowhere.

    Raises:
        InputError: the processes cannot read the input, cannot compile, or shall start workers of Ray.
    """
    if torchrun.processes() == 1:
        return batch
    if batch.compile:
        raise InputError("--compile does not go together with a model that is split over processes.")
    if batch.workers is not None:
        raise InputError("--ray-workers does not go together with torchrun. Start the command without torchrun.")
    tensor_parallel.join()
    return batch if torchrun.leads() else replace(batch, output="-")


def tell(output: Output) -> None:
    """Tell all processes which lines were done before, as the first one has read it in the output."""
    done, output.made_by = torchrun.told([list(output.done.items()), output.made_by])
    output.done = dict(done)

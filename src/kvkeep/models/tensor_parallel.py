"""A model over the processes that torchrun has started, split by transformers' own plan for its kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedConfig

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.head_sharding import number_of_heads

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process in its environment."""


def join() -> int:
    """Join the processes that torchrun has started, over NCCL with a GPU each or over gloo, and return their number.

    Raises:
        InputError: torchrun has not started this process, there is no GPU for it, or the others cannot be reached.
    """
    if not dist.is_available():
        raise InputError("This build of torch has no torch.distributed, so no model can be split over processes.")
    if dist.is_initialized():
        return dist.get_world_size()
    if missing := [name for name in _TOLD if not os.environ.get(name)]:
        raise InputError(
            f"A model can only be split over processes that torchrun has started, which sets {missing[0]}. Start this "
            "program with torchrun."
        )
    place, backend = None, "gloo"
    if torch.cuda.is_available():
        if (local := int(os.environ["LOCAL_RANK"])) >= (count := torch.cuda.device_count()):
            raise InputError(f"Process {local} of this machine has no GPU: there are {count}. Start {count} processes.")
        torch.cuda.set_device(local)
        place, backend = torch.device("cuda", local), "nccl"
    try:
        dist.init_process_group(backend, device_id=place)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"The other processes of torchrun cannot be reached: {error!s:.200}.") from error
    return dist.get_world_size()


@contextmanager
def left() -> Iterator[None]:
    """Leave the process group when the context ends, if this process has joined one."""
    try:
        yield
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def options(config: PreTrainedConfig, *, device: str, load_in: str | None) -> dict[str, Any]:
    """Join the other processes, and return the arguments with which ``from_pretrained`` splits a model over them.

    Args:
        config: the model's configuration.
        device: the device that was asked for.
        load_in: the format of weights that was asked for.

    Raises:
        UnsupportedModelError: transformers has no plan for the model, or the processes cannot divide its heads equally.
        InputError: there are no other processes, this transformers is too old, or weights are to be quantised or to lie
            on a device that was named.
    """
    if load_in is not None:
        raise InputError(f"`load_in={load_in}` does not go together with a model that is split over processes.")
    if device != "auto" and device != ("cuda" if torch.cuda.is_available() else "cpu"):
        raise InputError(
            f"A model that is split over processes has a device in each of them, so `device={device}` names too few. "
            "Leave it out."
        )
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"transformers has no plan by which {text.model_type!r} models are split over processes. Run it in one "
            "process, or over several devices with a device_map."
        )
    ranks = join()
    number_of_heads(text, ranks)
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    except (ImportError, TypeError) as error:
        raise InputError("Splitting a model over processes needs transformers 5.24 or newer. Update it.") from error

"""A model that is ready to run: loaded, attached and in evaluation mode, with its tokenizer."""

from __future__ import annotations

import os

import torch

from kvkeep.errors import InputError
from kvkeep.models import load as files
from kvkeep.models.load import Model, Tokenizer


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_pickle: bool = False,
    load_in: str | None = None,
    tp: bool = False,
) -> tuple[Model, Tokenizer]:
    """Load a model with kvkeep's attention attached, in evaluation mode, and its tokenizer.

    ``kvkeep.Engine(*kvkeep.load(name))`` is an engine for it.

    Args:
        name_or_path: a hub name or a local folder; by default the embedded model.
        device: ``auto`` (CUDA where there is one, otherwise the CPU) or torch's, e.g. ``cuda:1``.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``, or torch's own.
        allow_pickle: accept weights that are not safetensors; torch then unpickles tensors only.
        load_in: quantise the linear layers while they are read: ``int8`` or ``fp8`` (torchao), ``4bit`` or ``8bit``
            (bitsandbytes, on CUDA).
        tp: split the model over the processes that torchrun has started, each of which calls this; see
            ``docs/tensor-parallel.md``.

    Raises:
        ModelFileError: the folder is missing, incomplete, corrupted or not safetensors, or the hub has no answer.
        UnsupportedModelError: kvkeep cannot run this architecture, or the processes cannot divide its heads equally;
            found before any weight is read.
        InputError: unknown dtype, a device that this machine does not have, a name that is no text, or no processes to
            split the model over.
    """
    if not isinstance(name_or_path, str | os.PathLike | None):
        raise InputError(f"{name_or_path!r:.80} is neither a hub name nor a folder; give one as a text or a path.")
    name = files.embedded() if name_or_path is None else name_or_path
    kind = str(dtype).removeprefix("torch.")
    return files.load(name, kind, str(device), allow_pickle=allow_pickle, load_in=load_in, tp=tp)

"""A model's architecture with weights that were never trained: what a finding about training is compared with."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvkeep.models.device import enough_memory
from kvkeep.models.hf import attach
from kvkeep.models.suitable import auto_class
from kvkeep.models.text import Writer


def with_random_weights(writer: Writer, seed: int) -> Writer:
    """The same architecture, dtype and device with weights drawn as for the start of training.

    Args:
        writer: the model.
        seed: the same seed draws the same weights; the global generator is left as it was.

    Raises:
        InputError: the device's memory is too small for a second model.
    """
    with torch.random.fork_rng(devices=[]), enough_memory(writer.model.device):
        torch.manual_seed(seed)
        config = copy.deepcopy(writer.model.config)
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
        torch.nn.Module.to(model, writer.model.device, writer.model.dtype)
    return replace(writer, model=attach(model.eval()))

"""Saved memories for tests of commands: of a small model of our own, read once in a test run."""

import functools
from pathlib import Path

import model_folders
import torch

import kvkeep
from kvkeep.models.load import quiet

TEXT = "the quick brown fox jumps over the lazy dog and the cat " * 8


@functools.cache
def snapshot(policy: str = "h2o", budget: int = 16) -> kvkeep.Snapshot:
    """The memory of a text, with its token ids."""
    with quiet():
        model, tokenizer = kvkeep.load(model_folders.folder())
    cache = kvkeep.BoundedCache(model.config, policy, budget)
    with torch.inference_mode():
        model(**cache.continue_with(tokenizer(TEXT)["input_ids"]))
    return cache.snapshot()


def save(path: Path, policy: str = "h2o", budget: int = 16) -> Path:
    """Write such a memory, and return the path."""
    snapshot(policy, budget).save(path)
    return path

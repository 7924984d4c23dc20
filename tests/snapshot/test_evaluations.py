"""Evaluations ask later questions in copies of one memory."""

import dataclasses

import model_folders
import pytest
import torch
from snapshot_models import CONFIGS, model

from kvkeep import parse
from kvkeep.evals.forward import Drive
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer


@pytest.mark.parametrize("name", CONFIGS)
def test_copies_of_every_kind_of_memory_go_on_like_the_original(name):
    """Sliding windows, and layers with a state beside the slots or instead of them."""
    with quiet():
        checkpoint = loading.find(model_folders.folder())
    writer = Writer(dataclasses.replace(checkpoint, config=model(name).config), model(name))
    ids = torch.arange(2, 42).view(2, 20)
    drives = [Drive(writer, parse("tova"), [9, 12]) for _ in range(2)]
    for drive in drives:
        drive.feed(ids[:, :14], last_only=True)
    copies = drives[0].copies([1, 0, 1])
    expected = drives[1].feed(ids[:, 14:])
    torch.testing.assert_close(copies.feed(ids[[1, 0, 1], 14:]), expected[[1, 0, 1]], rtol=0, atol=1e-4)
    torch.testing.assert_close(drives[0].feed(ids[:, 14:]), expected, rtol=0, atol=1e-4)

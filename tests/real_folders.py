"""The pretrained models that `make real` makes."""

from pathlib import Path

import pytest

from tools import real_models

NAMES = tuple(real_models.SOURCES)


def folder(name: str) -> Path:
    """Return the folder of a model; skip the test where it was not made."""
    path = real_models.HOME / name
    if not path.is_dir():
        pytest.skip(f"{path} does not exist; `make real` makes it")
    return path


def gguf_file(name: str) -> Path:
    """Return the GGUF file of a model; skip the test where it was not made."""
    path = real_models.HOME / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} does not exist; `make real` makes it")
    return path

"""Data sets of the hub, and saved ones, by the package datasets; the only module that knows it.

No code of a data set is run, and nothing is unpickled: only tables (Parquet, Arrow, JSON, CSV) are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError, pip_install
from kvkeep.models.files import UNREACHABLE, cached_if_unreachable

_READERS = {"Parquet", "Arrow", "Json", "Csv"}
"""The package's classes that read tables. Others would unpickle, or decode pictures and archives."""

_OLDEST = 4
"""The first version that runs no code of a data set."""

_MARKS = ("dataset_info.json", "state.json"), ("dataset_dict.json",)
"""Files of a saved data set, and of several saved splits."""


@dataclass(frozen=True)
class Place:
    """A data set of the hub.

    Attributes:
        path: its name.
        config: the name of one of its sets, if it has several.
        split: the split that is measured.
        revision: the branch, where it is not the main one.
    """

    path: str
    config: str | None
    split: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.path} ({', '.join(filter(None, (self.config, self.split)))})"


def rows(place: Place, otherwise: str) -> list[dict[str, Any]]:
    """The rows of a data set of the hub; downloaded, or from the local cache if the hub cannot be reached.

    Args:
        place: the data set.
        otherwise: a sentence that says what else can be done, for messages.

    Raises:
        InputError: the package is missing or too old, or the data set cannot be read.
    """
    package = _package("Data sets of the hub are read by the package datasets", otherwise)
    with cached_if_unreachable(place.path):
        made: list[dict[str, Any]] = _tried(lambda: _loaded(package, place), str(place), otherwise)
        return made


def is_saved(folder: Path) -> bool:
    """Whether a folder looks like a data set that the package saved (`save_to_disk`)."""
    return any(all(os.path.isfile(folder / name) for name in names) for names in _MARKS)


def saved(folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a saved data set. Of several splits the given one is read, or the only one.

    Raises:
        InputError: the package is missing or too old, or the folder cannot be read.
    """
    otherwise = f"Or save it as JSON lines, {folder.name}.jsonl."
    package = _package(f"{folder} was saved by the package datasets", otherwise)
    found = _tried(lambda: package.load_from_disk(str(folder)), str(folder), otherwise)
    if isinstance(found, dict):
        if split not in found and len(found) != 1:
            raise InputError(f"{folder} has the splits {', '.join(map(str, found))}; {split!r} is measured.")
        found = found[split if split in found else next(iter(found))]
    made: list[dict[str, Any]] = _tried(found.to_list, str(folder), otherwise)
    return made


def _loaded(package: Any, place: Place) -> list[dict[str, Any]]:
    builder = package.load_dataset_builder(place.path, place.config, revision=place.revision)
    if _READERS.isdisjoint(kind.__name__ for kind in type(builder).__mro__):
        raise ValueError(f"it is read by {type(builder).__name__}, and only tables are read here")
    builder.download_and_prepare()
    made: list[dict[str, Any]] = builder.as_dataset(split=place.split).to_list()
    return made


def _tried(work: Callable[[], Any], name: str, otherwise: str) -> Any:
    try:
        return work()
    except MemoryError:
        raise
    except Exception as error:  # the package, Arrow and the hub's client have no common class of errors
        if isinstance(error, ConnectionError) or "OfflineModeIsEnabled" in f"{error!r}":
            raise InputError(
                f"{UNREACHABLE}, and the local cache of the package datasets has no {name}. {otherwise}"
            ) from error
        said = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise InputError(f"{name} cannot be read by the package datasets: {said:.160}. {otherwise}") from error


def _package(why: str, otherwise: str) -> Any:
    if find_spec("datasets") is None:
        raise InputError(f"{why}, which is not installed: {pip_install('datasets')}. {otherwise}")
    package = import_module("datasets")
    with suppress(ValueError):
        if int(str(package.__version__).partition(".")[0]) >= _OLDEST:
            return package
    raise InputError(
        f"{why}. Version {package.__version__} may run code of data sets: {pip_install('datasets')} for "
        f"{_OLDEST} or newer. {otherwise}"
    )

"""Data sets of the hub, and saved ones, by the package datasets; the only module that knows it.

No code of a data set is run, and nothing is unpickled: only tables (Parquet, Arrow, JSON, CSV) are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.errors import InputError, pip_install
from kvkeep.models.files import UNREACHABLE, cached_if_unreachable
from kvkeep.result_files import parse, read_whole

_READERS = {"Parquet", "Arrow", "Json", "Csv"}
"""The package's classes that read tables. Others would unpickle, or decode pictures and archives."""

_OLDEST = 4
"""The first version that runs no code of a data set."""

_MARKS = ("dataset_info.json", "state.json"), ("dataset_dict.json",)
"""Files of a saved data set, and of several saved splits."""


@dataclass(frozen=True)
class HubDataset:
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


def hub_rows(place: HubDataset, otherwise: str) -> list[dict[str, Any]]:
    """Return the rows of a data set of the hub, from the hub or, if it cannot be reached, from the local cache.

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
    """Return whether a folder looks like a data set that the package saved (`save_to_disk`)."""
    # not `Path.is_file`, which raises for a name that no file system takes
    return any(all(os.path.isfile(folder / name) for name in names) for names in _MARKS)


def saved(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a data set that the package datasets has saved in a folder.

    Args:
        folder: the folder.
        split: the split to read, if the folder has several; if it has only one, that one is read, whatever its name.

    Raises:
        InputError: the package is missing or too old, the folder cannot be read, or it has several splits and not this
            one.
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


def _loaded(package: Any, place: HubDataset) -> list[dict[str, Any]]:
    """Return the rows of a split, downloaded or from the cache of the package datasets.

    Raises:
        ValueError: the data set is none of tables; a script of its own might read it.
    """
    builder = package.load_dataset_builder(place.path, place.config, revision=place.revision)
    # any other builder may be a script of the data set, which would run as code
    if _READERS.isdisjoint(kind.__name__ for kind in type(builder).__mro__):
        raise ValueError(f"it is read by {type(builder).__name__}, and only tables are read here")
    builder.download_and_prepare()
    made: list[dict[str, Any]] = builder.as_dataset(split=place.split).to_list()
    return made


def _tried(work: Callable[[], Any], name: str, otherwise: str) -> Any:
    """Return what ``work`` returns.

    Args:
        work: calls the package.
        name: what is read, for messages.
        otherwise: a sentence that says what else can be done.

    Raises:
        InputError: ``work`` has raised an error; want of memory is handed on as it is.
    """
    try:
        return work()
    except MemoryError:  # says nothing about the data
        raise
    except Exception as error:  # the package, Arrow and the hub's client have no common class of errors
        # the package has a class of its own for HF_HUB_OFFLINE, and not always in the same place
        if isinstance(error, ConnectionError) or "OfflineModeIsEnabled" in f"{error!r}":
            raise InputError(
                f"{UNREACHABLE}, and the local cache of the package datasets has no {name}. {otherwise}"
            ) from error
        said = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise InputError(f"{name} cannot be read by the package datasets: {said:.160}. {otherwise}") from error


def _package(why: str, otherwise: str) -> Any:
    """Return the package datasets, after a check that it is there and too new to run code of data sets.

    Args:
        why: begins the message: what needs the package.
        otherwise: ends the message: what else can be done.

    Raises:
        InputError: the package is not installed, or too old.
    """
    if find_spec("datasets") is None:
        raise InputError(f"{why}, which is not installed: {pip_install('datasets')}. {otherwise}")
    package = import_module("datasets")
    with suppress(ValueError):  # a version that is no number may be an old one, too
        if int(str(package.__version__).partition(".")[0]) >= _OLDEST:
            return package
    raise InputError(
        f"{why}. Version {package.__version__} may run code of data sets: {pip_install('datasets')} for "
        f"{_OLDEST} or newer. {otherwise}"
    )


# Public data sets: found by name in a folder or on the hub, and checked row by row. All tasks read them here.

HUB = "hub"
"""The word for the hub in place of a folder."""

_Read = TypeVar("_Read")
_MANY = {"Line": "lines", "Entry": "entries", "Row": "rows"}
_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What a reader raises for a row of another form."""


@dataclass(frozen=True)
class Source:
    """A public data set.

    Attributes:
        names: file names under which it is looked for.
        public: where it comes from, and its format.
        saved: the folder under which it is looked for, as the package datasets saves it.
        hub: its place on the hub; ``None`` if it is not there in tables.
    """

    names: tuple[str, ...]
    public: str
    saved: str
    hub: HubDataset | None


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a data set.

    Attributes:
        name: where they come from, for messages.
        unit: what a row is called there: line, entry or row.
        rows: the rows.
        numbers: the number of each row in its file, from 1.
    """

    name: str
    unit: str
    rows: list[dict[str, Any]]
    numbers: tuple[int, ...]

    def place(self, number: int) -> str:
        """Return where a row comes from, for messages, by its index in `rows`."""
        return f"{self.unit} {self.numbers[number]} of {self.name}"

    def read(self, reader: Callable[[dict[str, Any]], _Read], what: str) -> list[_Read]:
        """Return what a reader makes of each row, in order.

        Args:
            reader: makes something of a row, or raises one of `_WRONG` for a row of another form.
            what: what a row should be, for messages.

        Raises:
            InputError: the reader cannot read a row; the message says which.
        """
        found = []
        for number, row in enumerate(self.rows):
            try:
                found.append(reader(row))
            except _WRONG as error:
                # a KeyError shows the name of the missing field, a ValueError is a sentence of the reader's own
                said = f"it has no {error}" if isinstance(error, KeyError) else "it has another form"
                said = f"{error}" if isinstance(error, ValueError) else said
                raise InputError(f"{self.place(number)} is no {what}: {said:.80}.") from error
        return found


def has(data: str | None, source: Source) -> bool:
    """Return whether a data set is in the data folder; ``None``, no folder, has none.

    For the word ``hub``: whether the source names a place on the hub. The hub itself is not asked.
    """
    if data == HUB:
        return source.hub is not None
    return data is not None and _in(data, source) is not None


def rows(
    data: str | None, source: Source, task: str, fields: Mapping[str, type | tuple[type, ...]] | None = None
) -> DatasetRows:
    """Return the rows of a data set, read from a file, a saved folder or the hub.

    Args:
        data: the folder of data, or ``hub``.
        source: the data set.
        task: who needs it, for messages.
        fields: the fields that every row has to have, and their types.

    Raises:
        InputError: the data set is missing or cannot be read, a row is no object, or a field is missing or of another
            type.
    """
    otherwise = f"{task} also takes a folder with {' or '.join(source.names)} as `data`."
    if data == HUB and source.hub is None:
        raise InputError(f"The hub has no tables of {source.public}. {otherwise}")
    if data == HUB and source.hub is not None:  # the second part is known, but not to a type checker
        found = _objects(str(source.hub), "Row", enumerate(hub_rows(source.hub, otherwise), 1))
    else:
        path = _found(data, source, task)
        if path.name == source.saved:  # a folder of the package datasets
            # LongBench, the only source without a place on the hub, has nothing but a test split
            found = _objects(str(path), "Row", enumerate(saved(path, source.hub.split if source.hub else "test"), 1))
        elif path.suffix == ".jsonl":
            found = _objects(str(path), "Line", _lines(path))
        else:
            content = _whole(path)  # a list of rows, or a single object such as SQuAD's
            found = _objects(str(path), "Entry", enumerate(content if isinstance(content, list) else [content], 1))
    _check(found, fields or {})
    return found


def text(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row that has to be a text, unchanged.

    Raises:
        KeyError: the row has no such field.
        ValueError: the field is no text, or blank.
    """
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} is {value!r:.20}, no text")
    return value


def fingerprint(data: str | None, sources: Sequence[Source]) -> str | None:
    """Return a hash of all files of these data sets in a folder, by which results of other data are told apart.

    Return ``hub`` for data of the hub, which have no hash here; ``None`` if there is no such file.
    """
    if data == HUB:
        return HUB
    found, hashed = False, hashlib.sha256()
    for path in sorted({path for source in sources for path in _files(data, source)}):
        found = True
        # the name within the folder, so that a folder that was moved has the same hash
        name = path.relative_to(str(data)).as_posix()
        hashed.update(name.encode() + b"\0" + hashlib.sha256(_bytes(path)).digest())
    return hashed.hexdigest()[:16] if found else None


def _found(folder: str | None, source: Source, task: str) -> Path:
    """Return the path of a data set in the data folder, or explain how to get it.

    Raises:
        InputError: the folder or the data set is missing.
    """
    wanted = " or ".join(source.names)
    if folder is None:
        online = f", or the word {HUB} to read {source.hub} by the package datasets" if source.hub else ""
        raise InputError(f"{task} needs {wanted}: {source.public}. Give the folder that holds it as `data`{online}.")
    if not os.path.isdir(folder):  # also of a name that no file system takes
        raise InputError(f"{folder:.200} is no folder; `data` is the folder that holds {wanted} for {task}.")
    if (path := _in(folder, source)) is None:
        raise InputError(f"{folder} has no {wanted}, which {task} needs: {source.public}.")
    return path


def _in(folder: str, source: Source) -> Path | None:
    """Return the file of a data set in a folder, or its saved folder; ``None`` if there is neither.

    Something that has the file's name and is no file is returned, too: it is refused when it is read, and not left out
    without a word.
    """
    paths = [path for name in source.names if os.path.lexists(path := Path(folder, name))]
    saved = Path(folder, source.saved)
    return paths[0] if paths else saved if is_saved(saved) else None


def _files(folder: str | None, source: Source) -> list[Path]:
    """Return the files of a data set in a folder, under all names that it may have, also those that would not be read.

    Without a folder, or where there is none, the list is empty.
    """
    if folder is None:
        return []
    saved = Path(folder, source.saved)
    tables = [path for path in saved.rglob("*.arrow") if path.is_file()] if is_saved(saved) else []
    return [*(path for name in source.names if os.path.lexists(path := Path(folder, name))), *tables]


def _objects(name: str, unit: str, numbered: Iterable[tuple[int, Any]]) -> DatasetRows:
    """Return the rows of a data set, after a check that each is a JSON object and that there is at least one.

    Args:
        name: where they come from, for messages.
        unit: what a row is called there: ``Line``, ``Entry`` or ``Row``.
        numbered: each row after its number in the file.

    Raises:
        InputError: a row is no JSON object, or there is none.
    """
    numbers, made = [], []
    for number, row in numbered:
        if not isinstance(row, dict):
            raise InputError(f"{unit} {number} of {name} is no JSON object.")
        numbers.append(number)
        made.append(row)
    if not made:
        raise InputError(f"{name} has no {_MANY[unit]}.")
    return DatasetRows(name, unit, made, tuple(numbers))


def _check(found: DatasetRows, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuse rows that lack a field, or have a value of another type in it.

    Raises:
        InputError: a row is such a one.
    """
    for number, row in enumerate(found.rows):
        for name, kind in fields.items():
            if not isinstance(row.get(name), kind):
                what = f"has another {name!r} than expected" if name in row else f"has no {name!r}"
                unit, wanted = found.unit.lower(), ", ".join(fields)
                raise InputError(f"{found.place(number)} {what}; fields of each {unit}: {wanted}.")


def _whole(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        InputError: the file is no JSON.
    """
    try:
        return parse(_bytes(path))
    except json.JSONDecodeError as error:  # a kind of ValueError that knows the line
        raise InputError(f"{path} is no JSON: {error.msg} in line {error.lineno}.") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}.") from error


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each value of a file with one JSON value per line, with its line number; empty lines are left out.

    Raises:
        InputError: a line is no JSON.
    """
    for number, line in enumerate(_bytes(path).splitlines(), 1):
        if line.strip():
            try:
                yield number, parse(line)
            except ValueError as error:
                raise InputError(f"Line {number} of {path} is no JSON: {error}.") from error


def _bytes(path: Path) -> bytes:
    """Return the content of a data set's file.

    Raises:
        InputError: it is no regular file, or cannot be read.
    """
    if not path.is_file():  # a pipe would never end
        kind = "a folder" if path.is_dir() else "a link to nothing" if path.is_symlink() else "no regular file"
        raise InputError(f"{path} is {kind}. Put the file of the data set there, or remove it.")
    try:
        return read_whole(path) or b""  # None: it was removed since the check
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error

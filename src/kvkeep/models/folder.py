"""A model's folder, looked at before torch and transformers are imported, which takes seconds.

A folder cannot be trusted: its files may be pipes that never end. Nothing here reads weights, or asks the hub.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import NoReturn

from kvkeep.errors import ModelFileError
from kvkeep.result_files import in_full

GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"
"""The end of a GGUF file's name, and its first bytes."""

ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAFE = ".safetensors"


def check(name: str, *, config_file: bool = False) -> None:
    """Refuse the name of a model that does not exist, and a file or folder that is no model; a hub name passes, and so
    do a folder of GGUF files and one without weights.

    Args:
        name: a path, or a hub name.
        config_file: whether the model may be a file that is no GGUF file, but its configuration.

    Raises:
        ModelFileError: the name, the file or the folder is refused.
    """
    path = existing(name)
    if path is None:
        return
    if not config_file:
        check_file(path)
    try:
        is_folder = path.is_dir() and not any(path.glob(f"*{GGUF_SUFFIX}"))
    except OSError:  # whoever reads the folder says why that fails
        return
    if is_folder:
        check_folder(path, allow_pickle=True, weights=False)


def check_file(path: Path) -> None:
    """Refuse a file that is no GGUF file; do nothing for a folder.

    Raises:
        ModelFileError: the file is refused.
    """
    if path.is_file() and not is_gguf_file(path):
        raise ModelFileError(
            f"{path} is a file and no GGUF file; give the folder that holds config.json, weights and tokenizer."
        )


def is_gguf_file(path: Path) -> bool:
    """Return whether a path is a GGUF file: an existing one by its name, or else one with its first bytes."""
    if path.suffix.lower() == GGUF_SUFFIX:
        return path.is_file()
    try:
        with open(path, "rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def existing(name: str) -> Path | None:
    """Return the full path of a file or folder that exists; ``None`` for what can only be a hub name.

    Raises:
        ModelFileError: the name is a path of nothing that exists, or cannot be looked up.
    """
    path = in_full(name)
    try:
        if path.exists():
            return path
    except OSError as error:  # e.g. a name that is too long for the file system
        raise ModelFileError(f"The model {name[:60]}… cannot be looked up: {error.strerror}.") from error
    repository, file = hub_parts(name)
    is_file = not file and name.endswith(GGUF_SUFFIX)
    if is_file or name.startswith((".", "/", "~")) or repository.count("/") > 1:  # a hub name has one slash at most
        raise ModelFileError(f"The model {'file' if is_file else 'folder'} {name} does not exist.{beside(name)}")
    return None


def beside(name: str) -> str:
    """Return a question for a file or folder that is there and has nearly this name; empty if there is none."""
    path = in_full(name)
    try:
        names = [other.name for other in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f" Did you mean {Path(name).with_name(close[0])}?" if close else ""


def hub_parts(name: str) -> tuple[str, str]:
    """Split a hub name into the repository and the GGUF file behind a colon, which may be empty."""
    repository, _, file = name.partition(":")
    return (repository, file) if file and repository.count("/") == 1 else (name, "")


def with_gguf_file(name_or_path: str | os.PathLike[str], file: str) -> str:
    """Return the name of a GGUF file in a folder or a hub repository, as `kvkeep.models.files.locate` takes it."""
    name = os.fspath(name_or_path)
    return str(Path(name) / file) if in_full(name).is_dir() else f"{name}:{file}"


def check_folder(folder: Path, allow_pickle: bool, *, weights: bool = True) -> None:
    """Refuse a folder without a configuration or weights, with pipes or broken links, or with an adapter of PEFT.

    Pickled weights are refused only if ``weights`` is set, there are no safetensors beside them, and ``allow_pickle``
    is not.

    Args:
        folder: the folder.
        allow_pickle: accept weights that are not safetensors.
        weights: whether there have to be weights.

    Raises:
        ModelFileError: the folder is refused.
    """
    _check_regular(folder)
    if (folder / ADAPTER_CONFIG).exists():
        refuse_adapter(str(folder), folder / ADAPTER_CONFIG)
    if not (folder / "config.json").is_file():
        raise ModelFileError(f"The folder {folder} has no config.json, so it is not a model in transformers' format.")
    if not weights or any(folder.glob(f"*{SAFE}")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise ModelFileError(f"The folder {folder} has a config.json but no weights (*{SAFE}).")
    if not allow_pickle:
        raise ModelFileError(refusal(f"The weights in {folder} ({pickles[0]})"))


def refuse_adapter(name: str, path: Path) -> NoReturn:
    """Refuse an adapter of PEFT: transformers would load it, and the model that it names, where peft is installed.

    Args:
        name: a folder, or a hub name.
        path: its ``adapter_config.json``.

    Raises:
        ModelFileError: always.
    """
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None  # the name is only for the message: the adapter is refused all the same
    known = f"{base!r:.100}" if isinstance(base, str) and base else "another model"
    raise ModelFileError(
        f"{name} holds an adapter of PEFT for {known} (adapter_config.json), and no model. Give that model, "
        "and the adapter beside it by a name: `adapter`."
    )


def refusal(subject: str) -> str:
    """Return the message for weights that are pickles; ``subject`` begins it, such as "The weights of NAME"."""
    return (
        f"{subject} are not safetensors but Python pickles, which can run code when they are read. Convert them, or "
        "accept them with `allow_pickle=True` if you trust their source."
    )


def _check_regular(folder: Path) -> None:
    """Refuse pipes, devices and broken links directly in a folder: reading them would fail late, or never end. Locks
    (``.lock``) pass.

    Raises:
        ModelFileError: there is such a file.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_file() and not path.is_dir() and path.suffix != ".lock":
            raise ModelFileError(
                f"{path} is no regular file but a pipe, a device or a link that leads nowhere. Remove it, or download "
                "the model again."
            )

"""The files of a model: where they are, checks before they are used, and clear errors when reading them fails.

A model folder cannot be trusted. Its files may be pipes that never end, and its numbers may ask for more memory than
there is. Nothing here reads weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub
from huggingface_hub.utils._validators import validate_repo_id
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from kvkeep.errors import KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models.device import is_out_of_memory
from kvkeep.models.hub import UNREACHABLE, is_forbidden
from kvkeep.result_files import in_full

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAFE = ".safetensors"
MOST_LAYERS = 1000
MOST_EXPERTS = 20_000
"""Doge has 16 384."""
MOST_LABELS = 1_000_000
_LARGEST = 2**63 - 1
_RUST_PANIC = "PanicException"
"""Raised by tokenizers and safetensors when their Rust code panics; no subclass of `Exception`, nor importable."""
_PARTS = re.compile(r"(?:num|n|encoder|decoder)_(?:\w+_)?(layer|block|expert)s?")


def locate(name_or_path: str | os.PathLike[str]) -> str:
    """The full path of a file or folder that exists; another name is returned unchanged, as a hub name.

    Raises:
        ModelFileError: there is no such folder, and the hub has no such names.
    """
    name = os.fspath(name_or_path)
    path = in_full(name)
    try:
        exists = path.exists()
    except OSError as error:  # e.g. a name that is too long for the file system
        raise ModelFileError(f"The model {name[:60]}… cannot be looked up: {error.strerror}.") from error
    if not exists and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelFileError(f"The model folder {name} does not exist.")
    if not exists:
        with explained(name, "Its name cannot be used"):
            validate_repo_id(name)
    return str(path) if exists else name


def check_folder(folder: Path, allow_pickle: bool, *, weights: bool = True) -> None:
    """Refuse a folder without a configuration or weights, with files that are not regular, or with pickles.

    Args:
        folder: the folder.
        allow_pickle: accept weights that are not safetensors.
        weights: whether there have to be weights.

    Raises:
        ModelFileError: the folder is refused.
    """
    _check_regular(folder)
    check_adapter(str(folder))
    if not (folder / "config.json").is_file():
        raise ModelFileError(f"The folder {folder} has no config.json, so it is not a model in transformers' format.")
    if not weights or any(folder.glob(f"*{SAFE}")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise ModelFileError(f"The folder {folder} has a config.json but no weights (*{SAFE}).")
    if not allow_pickle:
        raise ModelFileError(refusal(f"The weights in {folder} ({pickles[0]})"))


def check_adapter(name: str) -> None:
    """Refuse an adapter of PEFT: transformers would load it, and the model that it names, where peft is installed.

    Args:
        name: a folder, or a hub name.

    Raises:
        ModelFileError: see above.
    """
    path = optional(name, "adapter_config.json")
    if path is None:
        return
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    known = f"{base!r:.100}" if isinstance(base, str) and base else "another model"
    raise ModelFileError(
        f"{name} holds an adapter of PEFT for {known} (adapter_config.json), which kvkeep does not load. Load both "
        "with peft, call merge_and_unload() and save_pretrained(), and give that folder; or attach the PeftModel in "
        "Python."
    )


def check_numbers(name: str, fields: object) -> None:
    """Refuse a configuration with numbers that no model has, before they are used.

    Raises:
        ModelFileError: a number has more than 64 bits.
        UnsupportedModelError: there are more layers, experts or labels than any model has.
    """
    limits = {"layer": MOST_LAYERS, "block": MOST_LAYERS, "expert": MOST_EXPERTS, "num_labels": MOST_LABELS}
    for key, number in _numbers("", fields):
        if abs(number) > _LARGEST:
            raise ModelFileError(f"{name}: the number of {key!r:.60} in its config.json has more than 64 bits.")
        part = _PARTS.fullmatch(key)
        limit = limits.get(part[1] if part else key)
        if limit is not None and number > limit:
            raise UnsupportedModelError(
                f"{name} has {key}={number} in its config.json; kvkeep takes at most {limit}, "
                "more than any model has. The file is damaged, or made to exhaust the memory."
            )


def check_shape(name: str, config: PreTrainedConfig) -> None:
    """Refuse a configuration whose model could be built but not run: without layers, tokens or positions.

    Raises:
        ModelFileError: one of these numbers is not 1 or more.
    """
    inner = config.get_text_config(decoder=True)
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings"):
        number = getattr(inner, key, None)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ModelFileError(
                f"{name}: Its config.json has {key}={number!r:.60}, with which nothing can be generated. Check that "
                "file, or download the model again."
            )


def refusal(subject: str) -> str:
    """The message about weights that are pickles."""
    return (
        f"{subject} are not safetensors but Python pickles, which can run code when they are read. Convert them, or "
        "accept them with `allow_pickle=True` if you trust their source."
    )


def _check_regular(folder: Path) -> None:
    """Refuse pipes, devices and broken links: reading them would fail late, or never end."""
    for path in sorted(folder.iterdir()):
        if not path.is_file() and not path.is_dir() and path.suffix != ".lock":
            raise ModelFileError(
                f"{path} is no regular file but a pipe, a device or a link that leads nowhere. Remove it, or download "
                "the model again."
            )


def optional(name: str, file: str) -> Path | None:
    """The path of a model's file, downloaded from the hub if need be; ``None`` if there is no such file."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    found = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _numbers(key: str, value: Any) -> list[tuple[str, int]]:
    """Every whole number of a configuration, with its key."""
    found, rest = [], [(key, value)]
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            rest.extend((str(name), part) for name, part in value.items())
        elif isinstance(value, list):
            rest.extend((key, part) for part in value)
        elif isinstance(value, int):
            found.append((key, value))
    return found


@contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Turn every error of transformers, tokenizers, safetensors or the hub into a `ModelFileError`.

    Args:
        name: the model, for the message.
        what: what failed, as a sentence without its stop.
    """
    try:
        yield
    except KVKeepError:
        raise
    except BaseException as error:
        if is_out_of_memory(error) or not (isinstance(error, Exception) or type(error).__name__ == _RUST_PANIC):
            raise
        raise _explain(name, what, error) from error


def _explain(name: str, what: str, error: BaseException) -> ModelFileError:
    causes = list(_causes(error))
    for kind, text in _HUB_ERRORS.items():
        if any(isinstance(cause, kind) for cause in causes):
            return ModelFileError((_FORBIDDEN if text is _UNREACHABLE and is_forbidden() else text).format(name=name))
    if "cannot be loaded with `safetensors`" in str(error):  # how transformers reports a hub model without them
        return ModelFileError(refusal(f"The weights of {name}"))
    line = next(filter(None, (line.strip() for line in str(error).splitlines())), type(error).__name__)
    return ModelFileError(
        f"{name}: {what} ({line.rstrip('.'):.300}). Check that file, or download the model again: a partial download "
        "or a Git LFS pointer looks like this."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_UNREACHABLE = (
    f"{UNREACHABLE}, and {{name}} is neither a local folder nor in the local cache. Check the network, or "
    "give a local folder."
)
_FORBIDDEN = (
    f"{UNREACHABLE} since HF_HUB_OFFLINE is set, and {{name}} is neither a local folder nor in the local "
    "cache. Unset the variable where there is a network, or give a local folder."
)
_HUB_ERRORS: dict[type[Exception], str] = {  # special cases before the general ones
    hub.HFValidationError: "{name!r} is neither a local folder nor a hub name (NAMESPACE/NAME).",
    hub.GatedRepoError: "{name} is gated: accept its terms on its page, then log in with `hf auth login`.",
    hub.RepositoryNotFoundError: "{name} is neither a local folder nor a public model on the hub. Check the spelling; "
    "for a private one log in with `hf auth login`.",
    hub.LocalEntryNotFoundError: _UNREACHABLE,
    hub.OfflineModeIsEnabled: _UNREACHABLE,
}

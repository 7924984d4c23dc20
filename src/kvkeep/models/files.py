"""The files of a model folder, checked before anything is made of them.

A folder is somebody else's: its files may be pipes that never end, its index may name files that are not its own, and
its numbers may ask for more memory than there is. Nothing here reads weights.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from kvkeep.errors import ModelFileError, UnsupportedModelError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAFE = ".safetensors"
MOST_LAYERS = 1000
MOST_EXPERTS = 10_000
MOST_LABELS = 1_000_000
PARAMETERS_PER_BYTE = 16
"""Twice as many as there are bits; nobody stores a weight in fewer."""
_LARGEST = 2**63 - 1
_PARTS = re.compile(r"(?:num|n|encoder|decoder)_(?:\w+_)?(layer|block|expert)s?")


def check_folder(folder: Path, allow_pickle: bool) -> None:
    """Refuse a folder that is no model, or whose files cannot be read or are not its own.

    Raises:
        ModelFileError: see above.
    """
    _check_regular(folder)
    check_adapter(str(folder))
    if not (folder / "config.json").is_file():
        raise ModelFileError(f"The folder {folder} has no config.json, so it is not a model in transformers' format.")
    if any(folder.glob(f"*{SAFE}")):
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


def check_index(name: str, config: PreTrainedConfig, allow_pickle: bool) -> None:
    """Refuse an index of weights, or a configuration, that names pickles, or files outside the model's own folder.

    Args:
        name: a folder, or a hub name.
        config: may name a file of weights by itself.
        allow_pickle: whether weights may be pickles.

    Raises:
        ModelFileError: see above.
    """
    check_adapter(name)
    named = getattr(config, "transformers_weights", None)
    if named is not None and not (isinstance(named, str) and named.endswith(SAFE)):
        raise ModelFileError(
            f"{name}: The weights that its config.json names ({named!r:.80}) are no safetensors file, and no other is "
            "read by a name that stands there. Remove transformers_weights from it if the usual files are there, too."
        )
    for file in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME) if allow_pickle else (SAFE_WEIGHTS_INDEX_NAME,):
        path = optional(name, file)
        if path is None:
            continue
        for shard in _shards(path):
            if not shard.endswith(SAFE) and not allow_pickle:
                raise ModelFileError(refusal(f"The weights of {name} ({shard!r:.80}, named by {path.name})"))
            if not _is_inside(path.parent, shard):
                raise ModelFileError(
                    f"{path} names {shard!r:.80} as a file of weights, which is no regular file in the model's own "
                    "folder. Only files of the folder are read; copy it there, or download the model again."
                )


def check_numbers(name: str, fields: object) -> None:
    """Refuse a configuration whose numbers no model has, before they are used.

    Raises:
        ModelFileError: a number is no 64-bit one.
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
    """Refuse numbers with which a model can be built, but not run.

    Raises:
        ModelFileError: see above.
    """
    inner = config.get_text_config(decoder=True)
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings"):
        number = getattr(inner, key, None)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ModelFileError(
                f"{name}: Its config.json has {key}={number!r:.60}, with which nothing can be generated. Check that "
                "file, or download the model again."
            )


def check_size(name: str, parameters: int) -> None:
    """Refuse a folder whose weights are much smaller than its configuration: the rest would be made up, in memory.

    Raises:
        ModelFileError: see above.
    """
    if not Path(name).is_dir():
        return  # the hub's files are downloaded only now
    files = (path for pattern in (f"*{SAFE}", *PICKLES) for path in Path(name).rglob(pattern))
    stored = sum(path.stat().st_size for path in files if path.is_file())
    if parameters > PARAMETERS_PER_BYTE * stored:
        raise ModelFileError(
            f"{name}: Its weights cannot be read (they take {stored} bytes, and its config.json describes {parameters} "
            "numbers). Download the model again: a partial download or a Git LFS pointer looks like this."
        )


def refusal(subject: str) -> str:
    """What is said of weights that are pickles."""
    return (
        f"{subject} are not safetensors but Python pickles, which can run code when they are read. Convert them, or "
        "accept them with --allow-pickle (allow_pickle=True) if you trust their source."
    )


def _check_regular(folder: Path) -> None:
    """Refuse pipes, devices and links that lead nowhere: reading them fails late, or never ends."""
    for path in sorted(folder.iterdir()):
        if not path.is_file() and not path.is_dir() and path.suffix != ".lock":
            raise ModelFileError(
                f"{path} is no regular file but a pipe, a device or a link that leads nowhere. Remove it, or download "
                "the model again."
            )


def optional(name: str, file: str) -> Path | None:
    """A file of a folder or of a model on the hub, downloaded if need be; ``None`` if there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    found = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _shards(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
        ModelFileError: it is no index.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{index} cannot be read ({error}). Download the model again.") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(one, str) for one in names.values()):
        raise ModelFileError(f"{index} does not map tensors to files (weight_map). Download the model again.")
    if not isinstance(found.get("metadata", {}), dict):
        raise ModelFileError(f"{index} has metadata that are no JSON object. Download the model again.")
    return sorted(set(names.values()))


def _is_inside(folder: Path, shard: str) -> bool:
    """Whether a shard's name stays in the folder, and so does the file; one that is missing is found out later.

    In the hub's cache, ``snapshots/REVISION/FILE`` is a link into ``blobs``, beside ``snapshots``.
    """
    parts = re.split(r"[/\\]", shard)
    if "\0" in shard or len(os.fsencode(shard)) > 255 or any(part in ("", ".", "..") for part in parts):
        return False
    path, home = folder / shard, folder.resolve()
    if not os.path.lexists(path):
        return True
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link that leads nowhere, or to itself
        return False
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return target.is_file() and any(target.is_relative_to(place) for place in homes)


def _numbers(key: str, value: Any) -> list[tuple[str, int]]:
    """Every whole number in a configuration, with its key."""
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

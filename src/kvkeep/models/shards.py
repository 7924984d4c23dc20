"""The files of weights that a model names: they are safetensors, lie in its own folder, and are large enough.

A model folder cannot be trusted: its index may name files outside of the folder. Nothing here reads weights.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from kvkeep.errors import ModelFileError
from kvkeep.models.files import PICKLES, SAFE, check_adapter, optional, refusal

PARAMETERS_PER_BYTE = 16
"""No format stores a weight in less than half a bit."""


def check_index(name: str, config: PreTrainedConfig, allow_pickle: bool) -> None:
    """Refuse an index of weights, or a configuration, that names pickles or files outside of the model's folder.

    Args:
        name: a folder, or a hub name.
        config: may name a file of weights too.
        allow_pickle: whether weights may be pickles.

    Raises:
        ModelFileError: such a file is named.
    """
    check_adapter(name)
    named = getattr(config, "transformers_weights", None)
    if named is not None and not (isinstance(named, str) and named.endswith(SAFE)):
        raise ModelFileError(
            f"{name}: The weights that its config.json names ({named!r:.80}) are no safetensors file, and no other "
            "kind is read by name. Remove transformers_weights from that file if the usual files are there, too."
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


def check_size(name: str, parameters: int) -> None:
    """Refuse a folder with far fewer weights than its configuration describes; transformers would make up the rest.

    Raises:
        ModelFileError: the files are too small for so many parameters.
    """
    if not Path(name).is_dir():
        return  # files of the hub are downloaded later
    files = (path for pattern in (f"*{SAFE}", *PICKLES) for path in Path(name).rglob(pattern))
    stored = sum(path.stat().st_size for path in files if path.is_file())
    if parameters > PARAMETERS_PER_BYTE * stored:
        raise ModelFileError(
            f"{name}: Its weights cannot be read (they take {stored} bytes, and its config.json describes {parameters} "
            "numbers). Download the model again: a partial download or a Git LFS pointer looks like this."
        )


def _shards(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
        ModelFileError: the file is not an index of weights.
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
    """Whether a shard's name and its file lie in the folder. A missing file is reported later.

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

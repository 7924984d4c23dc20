"""The files of a model: where they are, checks before they are used, and clear errors when reading them fails.

A model folder cannot be trusted. Its files may be pipes that never end, and its numbers may ask for more memory than
there is. Nothing here reads weights.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, list_repo_files, snapshot_download
from huggingface_hub import errors as hub
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from kvkeep.errors import KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import gguf
from kvkeep.models.device import is_out_of_memory
from kvkeep.models.folder import (
    ADAPTER_CONFIG,
    PICKLES,
    SAFE,
    beside,
    existing,
    hub_parts,
    is_gguf_file,
    refusal,
    refuse_adapter,
)

# Requests to the hub: whether it answers, asked before transformers retries for every file, and one never made.

UNREACHABLE = "The hub cannot be reached"
PATIENCE_S = 2.0
"""How long the hub may take to answer; HF_HUB_ETAG_TIMEOUT, the hub's own variable, replaces it."""
_lock = threading.Lock()
_blocks = 0
"""How many blocks of `cached_if_unreachable` have switched the hub off."""


@contextmanager
def cached_if_unreachable(name: str) -> Iterator[None]:
    """Use only the local cache of the hub in the context, in all threads, if the hub does not answer within seconds.

    Do nothing for a local folder, or if the hub answers.

    Raises:
        ModelFileError: the context has raised one without the hub: the cache lacks a part of the model.
    """
    if Path(name).exists() or (not constants.HF_HUB_OFFLINE and _answers()):
        yield
        return
    change = 0 if is_forbidden() else 1  # what the user has switched off stays off
    _switch(change)
    try:
        yield
    except ModelFileError as error:
        if UNREACHABLE in str(error):
            raise
        raise ModelFileError(
            f"{UNREACHABLE}, and the local cache lacks a part of {name}, or it is damaged. Load the model once with a "
            "network, or give a local folder."
        ) from error
    finally:
        _switch(-change)


def is_forbidden() -> bool:
    """Return whether the user has forbidden every request to the hub (HF_HUB_OFFLINE)."""
    return _blocks == 0 and constants.HF_HUB_OFFLINE


def _switch(change: int) -> None:
    """Count one more (1) or one fewer (-1) block that wants no requests to the hub, and set the hub's own switch, which
    forbids them while there is any; for 0 do nothing.
    """
    global _blocks
    if not change:
        return
    with _lock:
        _blocks += change
        constants.HF_HUB_OFFLINE = _blocks > 0


def _answers() -> bool:
    """Return whether the hub answers at all, with an error or not, within `PATIENCE_S` or HF_HUB_ETAG_TIMEOUT.

    A thread asks, since a search for the hub's address has no time limit of its own.
    """
    patience = PATIENCE_S
    # the environment, since the hub's constant is 10 s if nobody has set it; no number and 0 mean to the hub: not set
    with suppress(KeyError, ValueError):
        patience = float(os.environ["HF_HUB_ETAG_TIMEOUT"]) or PATIENCE_S
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever a client, a proxy or a resolver raises
            get_session().head(constants.ENDPOINT, timeout=patience)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answered.is_set()


@contextmanager
def no_conversion_service() -> Iterator[None]:
    """Keep transformers from asking the hub's service to convert weights, in the context."""
    key = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


MOST_LAYERS = 1000
MOST_EXPERTS = 20_000
"""Doge has 16 384."""
MOST_LABELS = 1_000_000
_LARGEST = 2**63 - 1
_RUST_PANIC = "PanicException"
"""Raised by tokenizers and safetensors when their Rust code panics; no subclass of `Exception`, nor importable."""
_PARTS = re.compile(r"(?:num|n|encoder|decoder)_(?:\w+_)?(layer|block|expert)s?")
"""Names of numbers of parts in configurations, such as ``num_hidden_layers``, ``n_layer`` or ``num_local_experts``."""


def locate(name_or_path: str | os.PathLike[str]) -> str:
    """Return the full path of a file or folder that exists; a hub name is returned unchanged.

    A folder of GGUF files stands for its only one, and a part of a split file for the first part. ``ORG/REPO:FILE``
    stands for a GGUF file of the hub, which is downloaded: FILE is its name, or that of a quantisation in its name such
    as ``Q4_K_M``.

    Raises:
        ModelFileError: a path does not exist, or a GGUF path is a pipe or a device, lacks parts or is a folder of
            several; the name cannot be one of the hub; or the GGUF file is not there, or the hub fails.
    """
    name = os.fspath(name_or_path)
    path = existing(name)
    if path is not None:
        if path.suffix == gguf.SUFFIX and not path.is_file() and not path.is_dir():
            raise ModelFileError(f"{path} is no regular file but a pipe or a device. Give the path of a GGUF file.")
        with explained(name, "Its files cannot be looked up"):
            found = (gguf.in_folder(path) or path) if path.is_dir() else path
            return str(found if found.is_dir() else gguf.parts_of(found)[0])
    repository, file = hub_parts(name)
    with explained(name, "Its name cannot be used"):
        validate_repo_id(repository)
    return str(_gguf_of_hub(repository, file)) if file else name


def is_gguf(name: str) -> bool:
    """Return whether the name of a model is a GGUF file's path."""
    return Path(name).is_file() and is_gguf_file(Path(name))


def _gguf_of_hub(repository: str, wanted: str) -> Path:
    """Download a GGUF file of the hub, all parts of it, and return the path of the first part.

    Raises:
        ModelFileError: the repository has no such file, or the hub fails.
    """
    name = f"{repository}:{wanted}"
    with cached_if_unreachable(repository), explained(repository, f"Its file {wanted!r:.80} cannot be found"):
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(repository, allow_patterns=f"*{gguf.SUFFIX}", local_files_only=True))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{gguf.SUFFIX}")]
        else:
            names = list_repo_files(repository)
    parts = gguf.part_names(gguf.chosen(repository, names, wanted))
    if missing := [part for part in parts if part not in names]:
        raise ModelFileError(f"{repository} lacks {missing[0]}, one of {len(parts)} parts of that file.")
    with cached_if_unreachable(repository), explained(name, "It cannot be downloaded"):
        paths = [cached_file(repository, part) for part in parts]
    return Path(str(paths[0]))


def check_adapter(name: str) -> None:
    """Refuse an adapter of PEFT, see `kvkeep.models.folder.refuse_adapter`.

    Args:
        name: a folder, or a hub name.

    Raises:
        ModelFileError: there is an ``adapter_config.json``.
    """
    if (path := optional(name, ADAPTER_CONFIG)) is not None:
        refuse_adapter(name, path)


def check_numbers(name: str, fields: object) -> None:
    """Refuse a configuration with numbers larger than any model's, before memory is allocated for them.

    Raises:
        ModelFileError: a number has more than 64 bits.
        UnsupportedModelError: there are more layers, experts or labels than any model has.
    """
    limits = {"layer": MOST_LAYERS, "block": MOST_LAYERS, "expert": MOST_EXPERTS, "num_labels": MOST_LABELS}
    for key, number in _numbers("", fields):
        if abs(number) > _LARGEST:
            raise ModelFileError(f"{name}: the number of {key!r:.60} in its {part_of(name)} has more than 64 bits.")
        part = _PARTS.fullmatch(key)
        limit = limits.get(part[1] if part else key)
        if limit is not None and number > limit:
            raise UnsupportedModelError(
                f"{name} has {key}={number} in its {part_of(name)}; kvkeep takes at most {limit}, "
                "more than any model has. The file is damaged, or made to exhaust the memory."
            )


def check_shape(name: str, config: PreTrainedConfig) -> None:
    """Refuse a configuration without layers, tokens or positions: its model could be built, but not run.

    Raises:
        ModelFileError: one of these numbers is not 1 or more.
    """
    inner = config.get_text_config(decoder=True)
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings"):
        number = getattr(inner, key, None)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ModelFileError(
                f"{name}: Its {part_of(name)} has {key}={number!r:.60}, with which nothing can be generated. Check "
                "that file, or download the model again."
            )


def part_of(name: str) -> str:
    """Return the name of the place where a model's configuration stands, for messages."""
    return "header" if is_gguf(name) else "config.json"


def optional(name: str, file: str) -> Path | None:
    """Return the path of a model's file, downloaded from the hub if need be; ``None`` if there is no such file, or the
    hub cannot be reached, or the model is itself a file. The hub's errors about the model pass.
    """
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    if Path(name).is_file():
        return None
    found = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _numbers(key: str, value: Any) -> list[tuple[str, int]]:
    """Return every integer in a configuration, however deep, with the innermost key that it stands under; ``key`` is
    that of the value itself.
    """
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
    """Turn errors of transformers, tokenizers, safetensors and the hub in the context into a `ModelFileError`.

    kvkeep's own errors and failed allocations are raised as they are.

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
    """Return the error that tells a user what failed, and what to do, by an error that was caught and its causes.

    Args:
        name: the model.
        what: what failed, as a sentence without its stop.
        error: the error.
    """
    causes = list(_causes(error))
    for kind, text in _HUB_ERRORS.items():
        if any(isinstance(cause, kind) for cause in causes):
            said = _FORBIDDEN if text is _UNREACHABLE and is_forbidden() else text
            # what is neither a folder nor on the hub may be a folder's name with an error
            return ModelFileError(said.format(name=name) + (beside(name) if "neither" in said else ""))
    if "cannot be loaded with `safetensors`" in str(error):  # how transformers reports a hub model without them
        return ModelFileError(refusal(f"The weights of {name}"))
    line = next(filter(None, (line.strip() for line in str(error).splitlines())), type(error).__name__)
    return ModelFileError(
        f"{name}: {what} ({line.rstrip('.'):.300}). Check that file, or download the model again: a partial download "
        "or a Git LFS pointer looks like this."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
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


# The files of weights that a model names: they are safetensors, lie in its own folder, and are large enough.
#
# A model folder cannot be trusted: its index may name files outside of the folder. Nothing here reads weights.

PARAMETERS_PER_BYTE = 16
"""No format stores a weight in less than half a bit."""


def check_index(name: str, config: PreTrainedConfig, allow_pickle: bool) -> None:
    """Refuse pickled weights, files outside of the model's folder, and adapters of PEFT, before any weights are read.

    Without an index, no files of weights are looked at but the one that the configuration names.

    Args:
        name: a folder, or a hub name.
        config: may name a file of weights too.
        allow_pickle: whether weights may be pickles.

    Raises:
        ModelFileError: such a file is named, or the model is an adapter.
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
        for shard in _shards(_weight_map(path)):
            if not shard.endswith(SAFE) and not allow_pickle:
                raise ModelFileError(refusal(f"The weights of {name} ({shard!r:.80}, named by {path.name})"))
            if not _is_inside(path.parent, shard):
                raise ModelFileError(
                    f"{path} names {shard!r:.80} as a file of weights, which is no regular file in the model's own "
                    "folder. Only files of the folder are read; copy it there, or download the model again."
                )


def check_size(name: str, parameters: int) -> None:
    """Refuse a folder that holds far fewer weights than its configuration describes: transformers would fill in
    random ones.

    Names on the hub are not checked: their files are downloaded later.

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


def check_shards(name: str, config: PreTrainedConfig) -> None:
    """Refuse weights with a tensor in two files, if the index gives it to another one than the last.

    transformers takes each tensor from the last file that has it, whatever the index says. The files have been read, so
    those of the hub are in the cache.

    Raises:
        ModelFileError: there is such a tensor.
    """
    index = optional(name, SAFE_WEIGHTS_INDEX_NAME)
    if index is None or optional(name, SAFE_WEIGHTS_NAME) or getattr(config, "transformers_weights", None):
        return  # all tensors came from one file
    given, last = _weight_map(index), dict[str, str]()
    for shard in filter(lambda shard: shard.endswith(SAFE), _shards(given)):
        path = optional(name, shard)
        assert path is not None  # it has been read
        with safe_open(path, framework="pt") as file:
            here = list(file.keys())
        for tensor in here:
            if tensor in last and given.get(tensor) == last[tensor]:
                raise ModelFileError(
                    f"{name}: The tensor {tensor!r:.120} is in {last[tensor]!r:.80} and again in {shard!r:.80}, and "
                    f"by {index.name} only the first is the model's. Remove the other, or download the model again."
                )
            last[tensor] = shard


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by the tensors' names, from an index such as model.safetensors.index.json.

    Raises:
        ModelFileError: the file is not an index of weights.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{index} cannot be read ({error}). Download the model again.") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelFileError(f"{index} does not map tensors to files (weight_map). Download the model again.")
    if not isinstance(found.get("metadata", {}), dict):
        raise ModelFileError(f"{index} has metadata that are no JSON object. Download the model again.")
    return names


def _shards(given: dict[str, str]) -> list[str]:
    """Return the names of the weight files in an index, in the order in which transformers reads them."""
    return sorted(set(given.values()))


def _is_inside(folder: Path, shard: str) -> bool:
    """Return whether a file of weights, by its name in an index, is a regular file in the model's folder or the hub's
    cache, links followed. A missing file counts as inside, and is reported later.
    """
    parts = re.split(r"[/\\]", shard)
    # no file can have a zero byte in its name, or more than 255 bytes
    if "\0" in shard or len(os.fsencode(shard)) > 255 or any(part in ("", ".", "..") for part in parts):
        return False
    path, home = folder / shard, folder.resolve()
    if not os.path.lexists(path):
        return True
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link that leads nowhere, or to itself
        return False
    # the hub's cache keeps files under `blobs`, to which its snapshot folders link
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return target.is_file() and any(target.is_relative_to(place) for place in homes)

"""Load a model by name or folder: every failure becomes one clear error, and code of the checkpoint never runs.

`find` does what is cheap (configuration, architecture, tokenizer) and refuses what cannot work; `read_weights`
does what is expensive. `load` is both.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from huggingface_hub import errors as hub
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvkeep.cache import BoundedCache
from kvkeep.errors import KVKeepError, ModelFileError, UnsupportedModelError
from kvkeep.models import tiny
from kvkeep.models.device import enough_memory, is_out_of_memory, parse_device, parse_dtype
from kvkeep.models.files import check_folder, check_index, check_numbers, check_shape, check_size, refusal
from kvkeep.models.generation import check_generation_config
from kvkeep.models.hf import attach
from kvkeep.models.quiet import no_conversion_service
from kvkeep.models.suitable import auto_class, generates_text, try_out
from kvkeep.runs import in_full

Model: TypeAlias = PreTrainedModel
"""What rooms above call a model."""

Tokenizer: TypeAlias = PreTrainedTokenizerBase
"""What rooms above call a tokenizer."""

_RUST_PANIC = "PanicException"
"""What tokenizers and safetensors raise when their Rust gives up; it cannot be imported, and is no `Exception`."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that kvkeep can run, before its weights are read.

    Attributes:
        name: hub name or folder.
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        position_limit: tokens that a table of learned positions has room for; ``None`` if there is no such table.
        allow_pickle: whether weights may come from files that are not safetensors.
        parameters: numbers that the configuration describes; 0 if that was not counted.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    position_limit: int | None
    allow_pickle: bool
    parameters: int = 0

    @property
    def trained_length(self) -> int | None:
        """Positions that the model was made for, where its configuration says so; rotary positions go on, badly."""
        return trained_length(self.config)


def load(
    name_or_path: str | os.PathLike[str], dtype: str = "auto", device: str = "auto", *, allow_pickle: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with kvkeep's attention attached, in evaluation mode, and its tokenizer.

    Args:
        name_or_path: a hub name or a local folder.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA where there is one, otherwise the CPU) or a name of torch, e.g. ``cuda:1``.
        allow_pickle: accept weights that are not safetensors; torch then unpickles tensors only.

    Raises:
        ModelFileError: the folder is missing, incomplete, corrupted or not safetensors, or the hub has no answer.
        UnsupportedModelError: kvkeep cannot run this architecture; found before any weight is read.
        InputError: unknown dtype, or a device that this machine does not have.
    """
    parse_dtype(dtype)
    parse_device(device)
    checkpoint = find(name_or_path, allow_pickle=allow_pickle)
    return read_weights(checkpoint, dtype, device), checkpoint.tokenizer


def find(name_or_path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Checkpoint:
    """Read configuration and tokenizer, and refuse a model that kvkeep cannot run.

    Raises:
        ModelFileError: see `load`.
        UnsupportedModelError: see `load`.
    """
    name = locate(name_or_path)
    if Path(name).is_file():
        raise ModelFileError(f"{name} is a file; give the folder that holds config.json, weights and tokenizer.")
    if Path(name).is_dir():
        with explained(name, "Its files cannot be looked up"):
            check_folder(Path(name), allow_pickle)
    config = read_config(name)
    skeleton = build_empty(name, config)
    try_out(skeleton)
    check_generation_config(name)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    tokenizer = _read_tokenizer(name, config)
    return Checkpoint(name, config, tokenizer, position_limit(skeleton), allow_pickle, parameters)


def locate(name_or_path: str | os.PathLike[str]) -> str:
    """A file or folder that exists, written out in full; otherwise what may be a hub name, as it is.

    Raises:
        ModelFileError: it can only be a folder, and there is none.
    """
    name = os.fspath(name_or_path)
    path = in_full(name)
    try:
        exists = path.exists()
    except OSError as error:  # e.g. a name that is too long for the file system
        raise ModelFileError(f"The model {name[:60]}… cannot be looked up: {error.strerror}.") from error
    if not exists and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelFileError(f"The model folder {name} does not exist.")
    return str(path) if exists else name


def read_weights(checkpoint: Checkpoint, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Read the weights of a checkpoint, see `load`.

    Raises:
        ModelFileError: weights are missing, corrupted, of other shapes than config.json says, or not safetensors.
        InputError: unknown dtype, a device that this machine does not have, or one with too little memory.
    """
    kind, place = parse_dtype(dtype), parse_device(device)
    check_index(checkpoint.name, checkpoint.config, checkpoint.allow_pickle)
    check_size(checkpoint.name, checkpoint.parameters)
    with enough_memory(place), explained(checkpoint.name, "Its weights cannot be read"), no_conversion_service():
        from_pretrained = auto_class(checkpoint.config).from_pretrained
        read = cast(Callable[..., tuple[PreTrainedModel, dict[str, Any]]], from_pretrained)
        model, report = read(
            checkpoint.name,
            config=checkpoint.config,
            dtype=kind,
            use_safetensors=None if checkpoint.allow_pickle else True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, with the names of the tensors
            output_loading_info=True,
        )
    _check_complete(checkpoint.name, report)
    with enough_memory(place):
        torch.nn.Module.to(model, place)
    model.eval()
    return attach(model)


def embedded() -> str:
    """The folder of the embedded model.

    Raises:
        ModelFileError: its files are missing or corrupted.
    """
    remedy = "Give a MODEL: a hub name such as Qwen/Qwen3-0.6B, or a local folder."
    try:
        return str(tiny.path())
    except FileNotFoundError as error:
        raise ModelFileError(f"This installation of kvkeep has no embedded model. {remedy}") from error
    except ModelFileError as error:
        raise ModelFileError(f"The embedded model cannot be used: {str(error).rstrip('.')}. {remedy}") from error


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Refuse weights that leave tensors of the model at random numbers, which transformers only logs."""
    problems = {
        "missing_keys": "lack tensors of the model",
        "mismatched_keys": "have other shapes than config.json says",
    }
    for key, problem in problems.items():
        if tensors := sorted(entry if isinstance(entry, str) else entry[0] for entry in report[key]):
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise ModelFileError(
                f"The weights of {name} {problem}: {tensors[0]}{more}. Download the model again, or check that its "
                "config.json belongs to these weights."
            )


def read_config(name: str) -> PreTrainedConfig:
    """The configuration, if it is one of a decoder that transformers itself knows.

    Args:
        name: a hub name, a folder, or a configuration file.

    Raises:
        ModelFileError: it cannot be read.
        UnsupportedModelError: transformers has no such decoder.
    """
    with explained(name, "Its config.json cannot be read"):
        fields, _ = PreTrainedConfig.get_config_dict(name)
        kind = fields.get("model_type")
    check_numbers(name, fields)
    if kind is None:
        raise ModelFileError(f"{name} has no config.json, or it names no model_type; transformers needs it.")
    if not isinstance(kind, str):
        raise ModelFileError(f"{name}: The model_type in its config.json is {kind!r:.60}, which is no name.")
    if kind not in CONFIG_MAPPING:
        why = "brings its own code, which kvkeep never runs" if "auto_map" in fields else "is not known to transformers"
        raise UnsupportedModelError(
            f"{name} is of type {kind!r:.60}, which {why}. Choose a model that transformers has, or update it."
        )
    with explained(name, "Its config.json holds values that cannot be used"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not generates_text(config):
        raise UnsupportedModelError(
            f"{name} is of type {kind!r}, which transformers does not offer as a decoder that generates text."
        )
    check_shape(name, config)
    for part in (config, config.get_text_config(decoder=True)):
        part.return_dict = True  # kvkeep reads a model's output by its names
    return config


def build_empty(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights: enough to see whether kvkeep reaches its attention and cache.

    Raises:
        ModelFileError: the configuration's values cannot be used.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    with explained(name, "Its config.json holds values that cannot be used"), torch.device("meta"):
        skeleton: PreTrainedModel = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=False)
        BoundedCache(config, "full", budget=1)
        return attach(skeleton)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for, where its configuration says so."""
    length: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a learned table has room for: an embedding beside the tokens' with that many rows."""
    limit = trained_length(model.config)
    tokens = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not tokens)
    if limit and any(0 <= table.num_embeddings - limit <= 2 for table in tables):  # OPT has two rows more
        return limit
    return None


def _read_tokenizer(name: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer; without its files transformers makes an empty one for some families, which is refused."""
    with explained(name, "Its tokenizer cannot be read"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, config=config, trust_remote_code=False)
        special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    if not tokenizer.get_vocab().keys() - special:
        raise ModelFileError(f"{name} has no tokenizer (tokenizer.json). Download the model again, with all its files.")
    return tokenizer


@contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Turn whatever transformers, tokenizers, safetensors or the hub raise into an error of kvkeep."""
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
            return ModelFileError(text.format(name=name))
    if "cannot be loaded with `safetensors`" in str(error):  # what transformers says of a hub model that has none
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


_HUB_ERRORS: dict[type[Exception], str] = {  # special cases before the general ones
    hub.HFValidationError: "{name!r} is neither a local folder nor a hub name (NAMESPACE/NAME).",
    hub.GatedRepoError: "{name} is gated: accept its terms on its page, then log in with `hf auth login`.",
    hub.RepositoryNotFoundError: "{name} is neither a local folder nor a public model on the hub. Check the spelling; "
    "for a private one log in with `hf auth login`.",
    hub.LocalEntryNotFoundError: "The hub cannot be reached, and {name} is not in the local cache. Check the network, "
    "or give a local folder.",
}

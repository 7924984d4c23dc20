"""Load a model by its name or folder. Every failure is one clear error, and code of the checkpoint never runs.

`find` reads the configuration and the tokenizer, and refuses a model that cannot work. `read_weights` does the
expensive rest. `load` does both.
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
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models import split, tiny
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.files import check_folder, check_numbers, check_shape, explained, locate
from kvkeep.models.fused import fuse_if_slow
from kvkeep.models.generation import check_generation_config
from kvkeep.models.hf import attach
from kvkeep.models.hub import cached_if_unreachable, no_conversion_service
from kvkeep.models.quantised import check_format, check_readable, options
from kvkeep.models.shards import check_index, check_size
from kvkeep.models.suitable import auto_class, generates_text, try_out

Model: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
"""Names for rooms that do not import transformers."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that kvkeep can run, before its weights are read.

    Attributes:
        name: hub name or folder.
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        position_limit: positions in a table of learned ones; ``None`` if there is no such table.
        allow_pickle: whether weights may come from files that are not safetensors.
        parameters: number of parameters that the configuration describes; 0 if unknown.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    position_limit: int | None
    allow_pickle: bool
    parameters: int = 0

    @property
    def trained_length(self) -> int | None:
        """The number of positions that the model was trained for; ``None`` if its configuration does not say."""
        return trained_length(self.config)


def load(
    name_or_path: str | os.PathLike[str],
    dtype: str = "auto",
    device: str = "auto",
    *,
    allow_pickle: bool = False,
    load_in: str | None = None,
    tp: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with kvkeep's attention attached, in evaluation mode, and its tokenizer.

    Args:
        name_or_path: a hub name or a local folder.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA where there is one, otherwise the CPU) or a name of torch, e.g. ``cuda:1``.
        allow_pickle: accept weights that are not safetensors; torch unpickles nothing but tensors.
        load_in: quantise the linear layers while they are read: ``int8`` or ``fp8`` (torchao), ``4bit`` or ``8bit``
            (bitsandbytes, on CUDA).
        tp: split the model over the processes that torchrun has started.

    Raises:
        ModelFileError: the folder is missing, incomplete, corrupted or not safetensors, or the hub fails.
        UnsupportedModelError: kvkeep cannot run this architecture; raised before any weight is read.
        InputError: unknown dtype or format, or a device that this machine does not have.
    """
    parse_dtype(dtype)
    check_format(load_in)
    parse_device(device)
    checkpoint = find(name_or_path, allow_pickle=allow_pickle)
    return read_weights(checkpoint, dtype, device, load_in=load_in, tp=tp), checkpoint.tokenizer


def find(name_or_path: str | os.PathLike[str], *, allow_pickle: bool = False, weights: bool = True) -> Checkpoint:
    """Read configuration and tokenizer, and refuse a model that kvkeep cannot run.

    Args:
        name_or_path: a hub name or a local folder.
        allow_pickle: see `load`.
        weights: whether a folder without weights is refused.

    Raises:
        KVKeepError: see `load`.
    """
    name = locate(name_or_path)
    if Path(name).is_file():
        raise ModelFileError(f"{name} is a file; give the folder that holds config.json, weights and tokenizer.")
    if Path(name).is_dir():
        with explained(name, "Its files cannot be looked up"):
            check_folder(Path(name), allow_pickle, weights=weights)
    with cached_if_unreachable(name):
        config = read_config(name)
        skeleton = build_empty(name, config)
        with quiet():
            try_out(skeleton)
        check_generation_config(name)
        tokenizer = _read_tokenizer(name, config)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return Checkpoint(name, config, tokenizer, position_limit(skeleton), allow_pickle, parameters)


def read_weights(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    device: str = "auto",
    *,
    load_in: str | None = None,
    tp: bool = False,
) -> PreTrainedModel:
    """The model of a checkpoint with its weights, see `load`.

    Raises:
        ModelFileError: weights are missing, corrupted, of other shapes than config.json says, or not safetensors.
        UnsupportedModelError: it cannot be split, see `kvkeep.models.split.options`.
        InputError: unknown dtype, or a device that this machine does not have or whose memory is too small; or there
            are no processes to split the model over.
    """
    kind, place = parse_dtype(dtype), parse_device(device)
    how = split.options(checkpoint.config, device=device, load_in=load_in) if tp else {}
    with cached_if_unreachable(checkpoint.name):
        model = _read(checkpoint, kind, place, how or options(load_in, checkpoint.config, place))
    model.eval()
    if not how:
        with enough_memory(place):
            fuse_if_slow(torch.nn.Module.to(model, place))  # not split layers: their hooks divide the weights
    return attach(model)


def _read(
    checkpoint: Checkpoint, kind: torch.dtype | str, place: torch.device, quantisation: dict[str, Any]
) -> PreTrainedModel:
    check_readable(checkpoint.name, checkpoint.config)
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
            **quantisation,
        )
    _check_complete(checkpoint.name, report)
    return model


def embedded() -> str:
    """The folder of the embedded model.

    Raises:
        ModelFileError: its files are missing or corrupted.
    """
    remedy = "Give a `model`: a hub name such as Qwen/Qwen3-0.6B, or a local folder."
    try:
        return str(tiny.path())
    except FileNotFoundError as error:
        raise ModelFileError(f"This installation of kvkeep has no embedded model. {remedy}") from error
    except ModelFileError as error:
        raise ModelFileError(f"The embedded model cannot be used: {str(error).rstrip('.')}. {remedy}") from error


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Refuse weights that do not fill all tensors of the model; transformers would only log it."""
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
    """The configuration of a decoder that transformers has.

    Args:
        name: a hub name, a folder, or a configuration file.

    Raises:
        ModelFileError: the configuration cannot be read.
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
        part.return_dict = True  # kvkeep reads a model's outputs by name
    return config


def build_empty(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights, after a check that kvkeep reaches its attention and cache.

    Raises:
        ModelFileError: the configuration's values cannot be used.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    with explained(name, "Its config.json holds values that cannot be used"), torch.device("meta"):
        skeleton: PreTrainedModel = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=False)
        BoundedCache(config, "full", budget=1)
        return attach(skeleton)


def trained_length(config: PreTrainedConfig) -> int | None:
    """The number of positions that a model was trained for; ``None`` if its configuration does not say."""
    length: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def position_limit(model: PreTrainedModel) -> int | None:
    """The number of positions in a table of learned ones; ``None`` if the model has no such table.

    A table of positions is an embedding, other than the tokens', with as many rows as the trained length.
    """
    limit = trained_length(model.config)
    tokens = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not tokens)
    if limit and any(0 <= table.num_embeddings - limit <= 2 for table in tables):  # OPT's has two more
        return limit
    return None


def _read_tokenizer(name: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer. An empty one, which transformers makes for some families without files, is refused."""
    with explained(name, "Its tokenizer cannot be read"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, config=config, trust_remote_code=False)
        special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    if not tokenizer.get_vocab().keys() - special:
        raise ModelFileError(f"{name} has no tokenizer (tokenizer.json). Download the model again, with all its files.")
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

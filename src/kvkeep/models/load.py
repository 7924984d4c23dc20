"""Load a model by its name or folder. Every failure is one clear error, and code of the checkpoint never runs.

`find` reads the configuration and the tokenizer, and refuses a model that cannot work. `read_weights` does the
expensive rest. `load` does both.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvkeep.backends import missing_kernel
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.errors import InputError, ModelFileError, UnsupportedModelError
from kvkeep.head_sharding import number_of_heads
from kvkeep.models import gguf, gguf_models, gguf_tokenization, gguf_weights, quantized_weights
from kvkeep.models.adapters import add, check_folders, check_names
from kvkeep.models.attention import attach
from kvkeep.models.checkpoint import Checkpoint, Model, Tokenizer, position_limit
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.files import (
    cached_if_unreachable,
    check_index,
    check_numbers,
    check_shape,
    check_shards,
    check_size,
    explained,
    is_gguf,
    locate,
    no_conversion_service,
    part_of,
)
from kvkeep.models.folder import check_file, check_folder
from kvkeep.models.fused_modules import PromptHook
from kvkeep.models.generation_config import check_generation_config
from kvkeep.models.prepare import prepare
from kvkeep.models.quantized_weights import check_format, check_readable
from kvkeep.models.support import auto_class, generates_text, try_out
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer

_log = logging.getLogger(__name__)


def load(
    name_or_path: str | os.PathLike[str],
    dtype: str = "auto",
    device: str = "auto",
    *,
    allow_pickle: bool = False,
    load_in: str | None = None,
    tp: bool = False,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    fused: bool | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with kvkeep's attention attached, in evaluation mode, and its tokenizer.

    Args:
        name_or_path: a hub name, a local folder, or a GGUF file.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA where there is one, otherwise the CPU) or a name of torch, e.g. ``cuda:1``.
        allow_pickle: accept weights that are not safetensors; torch unpickles nothing but tensors.
        load_in: quantise weights while they are read: ``int4`` or ``int8`` (on a CPU in the native kernel), ``fp8``
            (torchao; ``int8``, too, on CUDA), ``4bit`` or ``8bit`` (bitsandbytes, on CUDA). Packed weights of a GGUF
            file stay packed on a CPU, unless this is ``unpacked``.
        tp: split the model over the processes that torchrun has started.
        adapters: LoRA adapters by name, each a folder of PEFT, see `Request`.
        fused: whether modules become calls of the native kernel, which decode steps on a CPU are faster with; ``None``:
            unless the environment says ``KVKEEP_FUSED=0``.

    Raises:
        ModelFileError: a folder is missing, incomplete, corrupted or not safetensors, or the hub fails.
        UnsupportedModelError: kvkeep cannot run this architecture; raised before any weight is read.
        InputError: unknown dtype or format, or a device that this machine does not have.
    """
    # `read_weights` parses both again; here they are refused before anything is downloaded
    parse_dtype(dtype)
    check_format(load_in, parse_device(device))
    folders = check_names(adapters or {})
    check_folders(folders)
    checkpoint = find(name_or_path, allow_pickle=allow_pickle)
    model = read_weights(checkpoint, dtype, device, load_in=load_in, tp=tp, adapters=folders, fused=fused)
    return model, checkpoint.tokenizer


def find(name_or_path: str | os.PathLike[str], *, allow_pickle: bool = False, weights: bool = True) -> Checkpoint:
    """Read configuration and tokenizer, and refuse a model that kvkeep cannot run, which an empty copy tells. Weights
    are not read; a GGUF file of the hub is downloaded.

    Args:
        name_or_path: a hub name, a local folder, or a GGUF file.
        allow_pickle: see `load`.
        weights: whether a folder without weights is refused.

    Raises:
        KVKeepError: see `load`.
    """
    name = locate(name_or_path)
    check_file(Path(name))
    if Path(name).is_dir():
        with explained(name, "Its files cannot be looked up"):
            check_folder(Path(name), allow_pickle, weights=weights)
    with cached_if_unreachable(name):
        config = read_config(name)
        skeleton = build_empty(name, config)
        with quiet():
            try_out(skeleton)
        if is_gguf(name):
            gguf_weights.sources(gguf.read(name), skeleton)
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
    adapters: Mapping[str, str] | None = None,
    merge: bool = False,
    fused: bool | None = None,
) -> PreTrainedModel:
    """Load the weights of a checkpoint, and return its model, attached and ready to run.

    Args:
        checkpoint: the checkpoint.
        dtype, device, load_in, tp, adapters, fused: see `load`.
        merge: whether a single adapter is merged into the weights, if they are not quantised.

    Raises:
        ModelFileError: weights are missing, corrupted, of other shapes than config.json says, or not safetensors.
        UnsupportedModelError: the model cannot be split, see `split_options`.
        InputError: unknown dtype, or a device that this machine does not have or whose memory is too small; there are
            no processes to split the model over; or a GGUF file is to be split or quantised anew, or a model with
            adapters to be split.
    """
    kind, place = parse_dtype(dtype), parse_device(device)
    if missing := missing_kernel(place):
        _warn_once(missing)
    from_gguf = is_gguf(checkpoint.name)
    if from_gguf and (load_in not in (None, quantized_weights.UNPACKED) or tp):
        asked = "be split over processes" if tp else f"be loaded in {load_in}"
        remedy = "Its weights keep the file's own format: leave that out, or give a folder with safetensors."
        raise InputError(f"{checkpoint.name} is a GGUF file, which cannot {asked}. {remedy}")
    if adapters and tp:
        raise InputError("Adapters do not go together with a model that is split over processes. Leave one out.")
    how = split_options(checkpoint.config, device=device, load_in=load_in) if tp else {}
    with cached_if_unreachable(checkpoint.name):
        if from_gguf:
            packed = load_in is None and quantized_weights.is_packable(place)
            model = _read_gguf(checkpoint, kind, place, packed=packed)
        else:
            options = how or quantized_weights.options(load_in, checkpoint.config, place)
            model = _read(checkpoint, kind, place, options)
    model.eval()
    if how:
        return attach(model)  # split layers are not fused: their hooks divide the weights
    with enough_memory(place):
        torch.nn.Module.to(model, place)
        # before modules are fused: what is fused reads the weights past adapters
        add(model, adapters or {}, merge=merge and not quantized_weights.is_quantized(model))
        prepare(attach(model), fused)
    return model


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning, once for each message."""
    _log.warning("%s", message)


def _read(
    checkpoint: Checkpoint, kind: torch.dtype | str, place: torch.device, quantisation: dict[str, Any]
) -> PreTrainedModel:
    """Load the model of a checkpoint that is stored as safetensors or pickles, and return it.

    Args:
        checkpoint, kind: the checkpoint, and the dtype or ``auto``.
        place: the device, for messages; the model goes there only later.
        quantisation: more arguments of ``from_pretrained``: to quantise or to split the model.

    Raises:
        KVKeepError: see `read_weights`.
    """
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
            use_safetensors=None if checkpoint.allow_pickle else True,  # None: pickles where there is nothing else
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, with the names of the tensors
            output_loading_info=True,
            **quantisation,
        )
    _check_complete(checkpoint.name, report)
    with explained(checkpoint.name, "Its weights cannot be read"):
        check_shards(checkpoint.name, checkpoint.config)
    _check_left_over(checkpoint.name, model, sorted(report["unexpected_keys"]))
    return model


def _read_gguf(
    checkpoint: Checkpoint, kind: torch.dtype | str, place: torch.device, *, packed: bool
) -> PreTrainedModel:
    """Load the model of a GGUF file, and return it. A sentence about tensors that had to be unpacked is logged.

    Args:
        checkpoint, kind: the file, and the dtype or ``auto``.
        place: the device, for messages; the model goes there only later.
        packed: whether weights stay packed where the native kernel reads their type.

    Raises:
        KVKeepError: see `read_weights`.
    """
    file = gguf.read(checkpoint.name)
    dtype = kind if isinstance(kind, torch.dtype) else file.dtype
    with enough_memory(place), explained(checkpoint.name, "Its weights cannot be read"), quiet():
        skeleton = build_empty(checkpoint.name, checkpoint.config)
        weights = gguf_weights.state_dict(file, skeleton, dtype, packed=packed)
        quantisation = quantized_weights.kept_packed() if packed and file.is_packed else {}
        read = cast(Callable[..., tuple[PreTrainedModel, dict[str, Any]]], type(skeleton).from_pretrained)
        model, report = read(
            None, config=checkpoint.config, state_dict=weights, dtype=dtype, output_loading_info=True, **quantisation
        )
    _check_complete(checkpoint.name, report)
    model.config.name_or_path = checkpoint.name
    if note := gguf_weights.unpacked(file, model):
        _log.warning("%s", note)
    return model


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Refuse weights that do not fill all tensors of the model, by what ``from_pretrained`` reports about them.

    Raises:
        ModelFileError: tensors are missing or have other shapes.
    """
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


def _check_left_over(name: str, model: PreTrainedModel, tensors: Sequence[str]) -> None:
    """Refuse weights of more layers than the model has. Other ``tensors`` that the model did not take are only logged.

    Layers that predict further tokens, which some checkpoints hold behind the others, are named like other tensors.

    Raises:
        ModelFileError: config.json names fewer layers than the weights have.
    """
    if not tensors:
        return
    parts, text = {_unnumbered(part) for part in model.state_dict()}, model.config.get_text_config(decoder=True)
    most = (getattr(text, "num_hidden_layers", None) or 0) + (getattr(text, "num_nextn_predict_layers", None) or 0)
    surplus = [part for part in tensors if _unnumbered(part) in parts and _layer_of(part) >= most]
    if surplus:
        raise ModelFileError(
            f"The weights of {name} have tensors for which the model has no layer: {_shown(surplus)}. Its config.json "
            "belongs to another model or names too few layers: download the model again, or mend num_hidden_layers."
        )
    _log.warning(
        "The weights of %s have tensors that no part of the model takes; the model runs without them: %s.",
        name,
        _shown(tensors),
    )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _unnumbered(name: str) -> str:
    """Replace the numbers in a tensor's name by ``*``."""
    return _NUMBER.sub("*", name)


def _layer_of(name: str) -> int:
    """Return the first number in the name of a tensor, or -1."""
    return int(found[0]) if (found := _NUMBER.findall(name)) else -1


def _shown(tensors: Sequence[str], most: int = 5) -> str:
    """Return the names of tensors, the first few of many."""
    more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    return f"{', '.join(tensors[:most])}{more}"


def read_config(name: str) -> PreTrainedConfig:
    """Read a model's configuration, and refuse one that is not of a decoder known to transformers.

    Args:
        name: a hub name, a folder, or a configuration file.

    Raises:
        ModelFileError: the configuration cannot be read.
        UnsupportedModelError: transformers has no such decoder.
    """
    if is_gguf(name):
        with explained(name, "Its header cannot be read"):
            file = gguf.read(name)
            fields = gguf_models.config_fields(file, gguf_tokenization.end_tokens(file))
    else:
        with explained(name, "Its config.json cannot be read"):
            fields, _ = PreTrainedConfig.get_config_dict(name)
            fields.get("model_type")  # fails for a text or a list
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
    with explained(name, f"Its {part_of(name)} holds values that cannot be used"):
        config: PreTrainedConfig = (
            AutoConfig.for_model(**fields)
            if is_gguf(name)
            else AutoConfig.from_pretrained(name, trust_remote_code=False)
        )
    if not generates_text(config):
        raise UnsupportedModelError(
            f"{name} is of type {kind!r}, which transformers does not offer as a decoder that generates text."
        )
    check_shape(name, config)
    for part in (config, config.get_text_config(decoder=True)):
        part.return_dict = True  # kvkeep reads a model's outputs by name
    return config


def build_empty(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, check that kvkeep can attend for it, and return it, attached. The configuration
    stays as it is.

    Raises:
        ModelFileError: the configuration's values cannot be used.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    with explained(name, f"Its {part_of(name)} holds values that cannot be used"), torch.device("meta"):
        # transformers writes into the configuration that it is given
        skeleton: PreTrainedModel = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=False)
        # refuses a model whose layers no cache can hold
        BoundedCache(config, "full", budget=1)
        return attach(skeleton)


def _read_tokenizer(name: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load and return the tokenizer of a model, and refuse one without ordinary tokens, which transformers makes for
    some families without files.

    Raises:
        ModelFileError: the tokenizer cannot be read, or is empty.
    """
    with explained(name, "Its tokenizer cannot be read"):
        tokenizer: PreTrainedTokenizerBase = (
            gguf_tokenization.tokenizer_of(gguf.read(name))
            if is_gguf(name)
            # mistral-common's, taken where that package is installed, has neither added tokens nor a chat template
            else AutoTokenizer.from_pretrained(name, config=config, trust_remote_code=False, mistral_format=False)
        )
        special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    if not tokenizer.get_vocab().keys() - special:
        raise ModelFileError(f"{name} has no tokenizer (tokenizer.json). Download the model again, with all its files.")
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log, errors apart, and its progress bars, in the context."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# A model that is ready to run: loaded, attached and in evaluation mode, with its tokenizer.


def load_with_tokenizer(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_pickle: bool = False,
    load_in: str | None = None,
    tp: bool = False,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    fused: bool | None = None,
) -> tuple[Model, Tokenizer]:
    """Load a model with kvkeep's attention attached, in evaluation mode, and its tokenizer.

    ``kvkeep.Engine(*kvkeep.load(name))`` is an engine for it.

    Args:
        name_or_path: a hub name, a local folder, or a GGUF file; by default the embedded model.
        device: ``auto`` (CUDA where there is one, otherwise the CPU) or torch's, e.g. ``cuda:1``.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``, or torch's own.
        allow_pickle: accept weights that are not safetensors; torch then unpickles tensors only.
        load_in: quantise weights while they are read: ``int4`` or ``int8`` (on a CPU in the native kernel), ``fp8``
            (torchao; ``int8``, too, on CUDA), ``4bit`` or ``8bit`` (bitsandbytes, on CUDA). Packed weights of a GGUF
            file stay packed on a CPU, unless this is ``unpacked``.
        tp: split the model over the processes that torchrun has started, each of which calls this; see
            ``docs/tensor-parallel.md``.
        adapters: LoRA adapters by name, each a folder of PEFT (extra ``kvkeep[adapters]``). A request names one with
            `Request.adapter`, and runs on the base model without.
        fused: whether modules become calls of the native kernel, which decode steps on a CPU are faster with; ``None``:
            unless the environment says ``KVKEEP_FUSED=0``.

    Raises:
        ModelFileError: the folder is missing, incomplete, corrupted or not safetensors, or the hub has no answer.
        UnsupportedModelError: kvkeep cannot run this architecture, or the processes cannot divide its heads equally;
            found before any weight is read.
        InputError: unknown dtype, a device that this machine does not have, a name that is no text, or no processes to
            split the model over.
    """
    if not isinstance(name_or_path, str | os.PathLike | None):
        raise InputError(f"{name_or_path!r:.80} is neither a hub name nor a folder; give one as a text or a path.")
    name = embedded() if name_or_path is None else name_or_path
    kind = str(dtype).removeprefix("torch.")
    return load(
        name,
        kind,
        str(device),
        allow_pickle=allow_pickle,
        load_in=load_in,
        tp=tp,
        adapters=adapters,
        fused=fused,
    )


# How far a model has read: prompts of many tokens take long, and nothing is returned before their end.


@contextmanager
def watched(model: Model, on_read: Callable[[float], object]) -> Iterator[None]:
    """Call ``on_read`` after each decoder layer, with the layer's share of the prompt's tokens, in the context.

    A layer's call gets its share of the tokens: over all layers the shares add up to the prompt, padding included. Runs
    over one token per row are left out, since most of them write.

    Args:
        model: a decoder.
        on_read: the function.
    """
    parts = _layers(model)

    def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        states = made if isinstance(made, Tensor) else next((part for part in made if isinstance(part, Tensor)), None)
        if states is not None and states.dim() == 3 and states.shape[1] > 1:  # 1: a decode step
            on_read(states.shape[0] * states.shape[1] / len(parts))

    handles = [part.register_forward_hook(PromptHook(hook)) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: Model) -> Sequence[nn.Module]:
    """Return the decoder layers of a model; ``[]`` if they cannot be found."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    return next((list(part) for part in lists if len(part) == count), [])


def with_random_weights(writer: Writer, seed: int) -> Writer:
    """Return a writer with a model of the same architecture, dtype and device with untrained weights, as a control for
    findings.

    Args:
        writer: the model and its tokenizer; it stays as it is.
        seed: the same seed draws the same weights; torch's global generator stays as it was.

    Raises:
        InputError: the device's memory is too small for a second model.
    """
    with torch.random.fork_rng(devices=[]), enough_memory(writer.model.device):  # []: drawn on the CPU alone
        torch.manual_seed(seed)
        # transformers writes into the configuration that it is given
        config = copy.deepcopy(writer.model.config)
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
        torch.nn.Module.to(model, writer.model.device, writer.model.dtype)
    prepare(attach(model.eval()))
    return replace(writer, model=model)


# A model over the processes that torchrun has started, split by transformers' own plan for its kind.

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process in its environment."""


def join_processes() -> int:
    """Join the processes that torchrun has started, over NCCL with a GPU each or over gloo; return their number.

    Processes that have joined already are only counted.

    Raises:
        InputError: torchrun has not started this process, there is no GPU for it, or the others cannot be reached.
    """
    if not dist.is_available():
        raise InputError("This build of torch has no torch.distributed, so no model can be split over processes.")
    if dist.is_initialized():  # by an earlier call, or by the user's program
        return dist.get_world_size()
    if missing := [name for name in _TOLD if not os.environ.get(name)]:
        raise InputError(
            f"A model can only be split over processes that torchrun has started, which sets {missing[0]}. Start this "
            "program with torchrun."
        )
    place, backend = None, "gloo"
    if torch.cuda.is_available():
        if (local := int(os.environ["LOCAL_RANK"])) >= (count := torch.cuda.device_count()):
            raise InputError(f"Process {local} of this machine has no GPU: there are {count}. Start {count} processes.")
        torch.cuda.set_device(local)
        place, backend = torch.device("cuda", local), "nccl"
    try:
        dist.init_process_group(backend, device_id=place)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"The other processes of torchrun cannot be reached: {error!s:.200}.") from error
    return dist.get_world_size()


@contextmanager
def process_group() -> Iterator[None]:
    """Leave torch's process group at the end of the context, if this process is in one by then."""
    try:
        yield
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def split_options(config: PreTrainedConfig, *, device: str, load_in: str | None) -> dict[str, Any]:
    """Join the other processes, and return the arguments with which ``from_pretrained`` splits a model.

    With a single process return no arguments.

    Args:
        config: the model's configuration.
        device: the device that was asked for.
        load_in: the format of weights that was asked for.

    Raises:
        UnsupportedModelError: transformers has no plan for the model, or the processes cannot divide its heads equally.
        InputError: there are no other processes, this transformers is too old, or weights are to be quantised or to lie
            on a device that was named.
    """
    if load_in is not None:
        raise InputError(f"`load_in={load_in}` does not go together with a model that is split over processes.")
    if device != "auto" and device != ("cuda" if torch.cuda.is_available() else "cpu"):
        raise InputError(
            f"A model that is split over processes has a device in each of them, so `device={device}` names too few. "
            "Leave it out."
        )
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"transformers has no plan by which {text.model_type!r} models are split over processes. Run it in one "
            "process, or over several devices with a device_map."
        )
    ranks = join_processes()
    number_of_heads(text, ranks)
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    except (ImportError, TypeError) as error:
        raise InputError("Splitting a model over processes needs transformers 5.24 or newer. Update it.") from error

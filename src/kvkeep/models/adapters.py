"""LoRA adapters with names: PEFT reads them into a model, in which one of them is active, or none.

A model with a single adapter, which every text shall use, has it merged into its weights instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.backends import QuantizedTensor
from kvkeep.errors import InputError, ModelFileError, pip_install
from kvkeep.models.files import explained
from kvkeep.models.quantized_weights import PACKED
from kvkeep.models.weight_hash import count_as, fingerprint
from kvkeep.parameters import ADAPTER_NAME

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""The files of an adapter, as PEFT names them."""

_OBEYED: Mapping[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias"), (bool,)),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), (str, list)),
    "modules_to_save": (list,),
    "layers_to_transform": (int, list),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (dict,)),
}
"""Settings of an adapter that change what it computes, and that PEFT may be told, with the types of their values."""

_PASSING = {
    *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "lora_dropout"),
    *("inference_mode", "init_lora_weights", "loftq_config", "eva_config", "megatron_core", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying"),
}
"""Settings that concern training, files and names, or that have no effect by themselves."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin the training of an adapter that change the base model, too."""

_log = logging.getLogger(__name__)

_named: weakref.WeakKeyDictionary[nn.Module, NamedAdapters] = weakref.WeakKeyDictionary()
"""See `adapters_of`."""
_merged: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""See `merged_into`."""


class NamedAdapters:
    """The adapters of a model by their names. None is active at first, so the model computes what its base does.

    Args:
        model: the model, which has the adapters already; it is not kept alive.
        own: name → its name in PEFT, which may have other characters.
    """

    def __init__(self, model: nn.Module, own: Mapping[str, str]) -> None:
        self._own, self._model = dict(own), weakref.ref(model)
        self._layers = [weakref.ref(module) for module in model.modules() if _is_layer(module)]
        self._lock = threading.RLock()  # engines of several threads may share the model
        self._active: str | None = ""  # no adapter's name
        self._state: list[object] = []
        self.activate(None)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the adapters' names, without PEFT's own, in the order in which they were given."""
        return tuple(self._own)

    def check(self) -> bool:
        """Return whether nobody but kvkeep has switched or scaled the adapters since the last call or `activate`.

        If anybody else has switched or scaled them, the next run activates its adapter again.
        """
        with self._lock:
            here, before = self._now(), self._state
            if here != before:
                self._active, self._state = "", here  # no adapter has this name
            return here == before

    @contextmanager
    def activated(self, name: str | None) -> Iterator[None]:
        """Activate an adapter (``None``: no adapter) for the context, and keep other threads from switching
        meanwhile.
        """
        with self._lock:
            if self._active != name:
                self.activate(name)
            yield

    def activate(self, name: str | None) -> None:
        """Let the model compute with the adapter of this name from now on, in all threads, or without any for
        ``None``.
        """
        own = None if name is None else self._own[name]
        for layer in self._present():
            # PEFT's own setters freeze and unfreeze all weights besides, which takes as long as a step
            layer._disable_adapters = own is None
            if own is not None:
                layer._active_adapter = _active_in(layer, own)
        self._active, self._state = name, self._now()

    def _present(self) -> Iterator[Any]:
        """Yield the layers of PEFT that the model still has."""
        return (layer for reference in self._layers if (layer := cast(Any, reference())) is not None)

    def _now(self) -> list[object]:
        """Return, for each layer with adapters, what decides which one it computes with, and how: whether they are off,
        which are active, and their scaling.
        """
        return [
            (layer.disable_adapters, layer.active_adapters, {**getattr(layer, "scaling", {})})
            for layer in self._present()
        ]

    def weights_hash(self, name: str | None) -> str:
        """Return the hash of the model's weights with an adapter, whichever is active; see `fingerprint`."""
        return fingerprint(self._of(), None if name is None else self._own[name])

    def _of(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        assert model is not None  # whoever asks runs it
        return model


def adapters_of(model: nn.Module) -> NamedAdapters | None:
    """Return the adapters that `add` has put into a model; ``None`` without any, or with adapters from elsewhere."""
    return _named.get(model)


def merged_into(model: nn.Module) -> str | None:
    """Return the name of the adapter that `add` has merged into a model's weights; ``None`` if there is none."""
    return _merged.get(model)


def weights_of_all(model: nn.Module) -> str:
    """Return a hash of a model's weights and of all adapters that `add` has put into it, with their names, whichever is
    active; without such adapters `fingerprint`.
    """
    base = fingerprint(model)
    if (named := adapters_of(model)) is None:
        return base
    found = [(name, named.weights_hash(name)) for name in named.names]
    return hashlib.sha256(repr((named.weights_hash(None), found)).encode()).hexdigest()[:16]


def check_names(given: object) -> dict[str, str]:
    """Return adapters as a dictionary from name to folder, after checking the names.

    Raises:
        InputError: it is no such mapping, or a name cannot be used.
    """
    if not isinstance(given, Mapping):
        raise InputError(
            f'adapters={given!r:.80} is no mapping from names to folders, such as {{"sql": "./sql-lora"}}.'
        )
    for name in given:
        check_name(name)
    return {str(name): str(folder) for name, folder in given.items()}


def check_name(name: object) -> None:
    """Refuse an adapter's name that could be mistaken for a part of a model's name.

    Raises:
        InputError: the name is no text of 1 to 64 letters, digits, ``.``, ``-`` and ``_`` that begins with a letter or
            digit.
    """
    if not isinstance(name, str) or re.fullmatch(ADAPTER_NAME, name, re.ASCII) is None:
        raise InputError(
            f"{name!r:.80} is no name for an adapter: it has 1 to 64 letters, digits, dots, - and _, and begins with a "
            "letter or digit."
        )


def check_folders(folders: Mapping[str, str]) -> None:
    """Refuse adapters, folders by name, that no model can use, before any weights are read.

    Raises:
        InputError: PEFT is not installed.
        ModelFileError: a folder has no adapter of LoRA that can be read.
    """
    for folder in folders.values():
        _settings(folder)
    if folders and find_spec("peft") is None:
        raise InputError(f"Adapters need peft, which is not installed: {pip_install('adapters')}.")


def add(model: PreTrainedModel, folders: Mapping[str, str], *, merge: bool = False) -> None:
    """Read adapters into a model, which is attached, fused or packed only afterwards.

    In half precision an adapter's products are computed in float32, beside those of the base model. None is active at
    first, unless it is merged. No weight of the model takes gradients afterwards.

    Args:
        model: the model, with its weights.
        folders: name → folder.
        merge: add the products of a single adapter to the weights of the model, rounded to their dtype, unless two
            parts of the model share one of them. A step then takes as long as one of the base model. The hash of the
            weights is that of the base model with the adapter beside it.

    Raises:
        InputError: PEFT is not installed, or a name cannot be used.
        ModelFileError: an adapter cannot be read, or belongs to another base model.
    """
    folders = check_names(folders)
    check_folders(folders)
    if not folders:
        return
    # PEFT makes names of modules of them, in which torch allows no dots
    own = {name: f"kvkeep{number}" for number, name in enumerate(folders)}
    with _in_silence():
        for name, folder in folders.items():
            _put(model, folder, own[name], _settings(folder))
    model.requires_grad_(False)
    found = NamedAdapters(model, own)
    if not merge or len(folders) > 1 or _shares_weights(model):
        _named[model] = found
        return
    (name,) = folders
    weights = found.weights_hash(name)
    found.activate(name)
    with _in_silence(), explained(folders[name], "It cannot be merged into the model's weights"):
        _merge(model)
    count_as(model, weights)
    _merged[model] = name


def _put(model: PreTrainedModel, folder: str, own: str, settings: dict[str, Any]) -> None:
    """Load one adapter into a model under its name in PEFT, and warn if it was trained on another model by its name.

    Raises:
        ModelFileError: its settings cannot be used, or its weights cannot be read or do not fit the model.
    """
    import peft

    problem = f"The adapter in {folder} does not fit {model.config.name_or_path or model.config.model_type}"
    remedy = f"It was trained on {_base_of(settings)}. Give the base model that it belongs to."
    weights = _weights(folder, settings)
    obeyed = {name: value for name, value in settings.items() if name in _OBEYED and value is not None}
    try:
        # init_lora_weights: all weights come from the file
        config = peft.LoraConfig(**obeyed, inference_mode=True, init_lora_weights=False)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{folder}: Its {CONFIG} cannot be used ({error!s:.200}). Download it again.") from error
    try:
        peft.inject_adapter_in_model(config, model, own)
        _widen(model, own)
        _unpack(model, own)
        _check_base(model, folder, weights, settings)
        report: Any = peft.set_peft_model_state_dict(model, weights, own)
    # an re.error: `target_modules` may be a regular expression
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, re.error) as error:
        why = [line.strip() for line in str(error).splitlines() if line.strip()]
        shown = next((line for line in why if "size mismatch" in line), why[0] if why else type(error).__name__)
        raise ModelFileError(f"{problem} ({shown.replace(f'.{own}', ''):.240}). {remedy}") from error
    # the report also lists weights of the base model and of other adapters
    missing = [key for key in report.missing_keys if own in key.split(".")]
    if surplus := sorted(report.unexpected_keys):
        raise ModelFileError(f"{problem}: the model has no {surplus[0].replace(f'.{own}', '')}. {remedy}")
    if missing:
        raise ModelFileError(
            f"The adapter in {folder} lacks {min(missing).replace(f'.{own}', '')}, which its {CONFIG} names or the "
            f"model needs. Download it again, or check its base model: it was trained on {_base_of(settings)}."
        )
    trained, name = _last(settings.get("base_model_name_or_path")), _last(model.config.name_or_path)
    if trained and name and trained not in name and name not in trained:
        _log.warning("The adapter in %s was trained on %s, and runs on %s.", folder, _base_of(settings), name)


def _check_base(model: PreTrainedModel, folder: str, weights: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Remove the base model's weights from ``weights``, those of an adapter, after checking that they are the model's
    own. PEFT saves such weights beside changed embeddings.

    Raises:
        ModelFileError: they are others than the model's, which would change it for every other adapter.
    """
    whole = settings.get("modules_to_save") or ()
    base = {name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()}
    for name in [name for name in weights if "lora_" not in name and not set(whole) & set(name.split("."))]:
        given, own = weights.pop(name), base.get(name.replace(".base_layer", ""))
        if own is None or own.shape != given.shape or not _equal(own, given):
            raise ModelFileError(
                f"The adapter in {folder} brings weights of its own for the base model ({name:.200}), perhaps because "
                "its vocabulary was extended. Merge it into its model with peft, and give that folder as the model."
            )


def _equal(own: Tensor, given: Tensor) -> bool:
    """Return whether a model's weight is the given one, in plain form or quantized as it is here; no for a format of
    GGUF files.
    """
    given = given.to(own.dtype)
    if not isinstance(own, QuantizedTensor):
        return torch.equal(own.detach().cpu(), given)
    if own.bits not in PACKED.values():  # in a format of GGUF files, which no weights are rounded to here
        return False
    return torch.equal(own.packed, QuantizedTensor.quantize(given, own.bits).packed)


def _shares_weights(model: PreTrainedModel) -> bool:
    """Return whether a weight that an adapter changes has another place in the model, which it does not change."""
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = (cast(Any, layer) for layer in model.modules() if _is_layer(layer) and hasattr(layer, "get_base_layer"))
    return any(places[id(parameter)] > 1 for layer in layers for parameter in layer.get_base_layer().parameters())


def _widen(model: PreTrainedModel, own: str) -> None:
    """Turn an adapter's weights of half precision into float32, in place, as PEFT's own models do; modules that it
    replaces as a whole stay as they are.
    """
    for layer in filter(_is_layer, model.modules()):
        if not hasattr(layer, "check_set_adapter"):  # a module that is saved whole takes what its model gives it
            for name, parameter in layer.named_parameters():
                if own in name.split(".") and parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()


def _unpack(model: PreTrainedModel, own: str) -> None:
    """Unpack, in place, the quantized weights in the copies of modules that an adapter replaces as a whole, since those
    cannot be written to.
    """
    for layer in model.modules():
        copies = getattr(layer, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and own in copies:
            for weights in (cast(dict[str, Any], module._parameters) for module in copies[own].modules()):
                for name, weight in weights.items():
                    if isinstance(weight, QuantizedTensor):
                        weights[name] = nn.Parameter(weight.dequantize(), False)


def _last(name: object) -> str:
    """Return the last part of a model's name or folder in lower case, by which models are compared; empty if it is a
    commit's hash.
    """
    last = str(name or "").replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
    return "" if re.fullmatch("[0-9a-f]{40}", last) else last


def _base_of(settings: Mapping[str, Any]) -> str:
    """Return the base model of an adapter as messages show it."""
    base = settings.get("base_model_name_or_path")
    return f"{base!r:.100}" if isinstance(base, str) and base else "another model"


def _settings(folder: str) -> dict[str, Any]:
    """Return the settings of the adapter in a folder, after checking that its files are there and that each setting is
    one that PEFT may be given. Its weights are not read.

    Raises:
        ModelFileError: the folder has no adapter of LoRA, or one whose settings cannot be used.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        there = "is a file" if place.exists() else "does not exist"
        raise ModelFileError(
            f"The adapter's folder {folder} {there}. Give the folder that holds {CONFIG} and {WEIGHTS}."
        )
    if not (place / CONFIG).is_file():
        what = "; it holds a whole model" if (place / "config.json").is_file() else ""
        raise ModelFileError(f"The folder {folder} has no {CONFIG}, so it is no adapter of PEFT{what}.")
    if not (place / WEIGHTS).is_file():
        if (place / PICKLE).is_file():
            raise ModelFileError(
                f"The weights of the adapter in {folder} ({PICKLE}) are not safetensors but Python pickles, which can "
                "run code when they are read. Load the adapter with peft where you trust its source, and call "
                "save_pretrained()."
            )
        raise ModelFileError(f"The adapter in {folder} has no weights ({WEIGHTS}).")
    found = _read(place / CONFIG)
    if (kind := found.get("peft_type")) != "LORA":
        raise ModelFileError(f"{folder} is an adapter of the kind {kind!r:.40}, and kvkeep loads those of LoRA.")
    # only the beginning is compared: PEFT takes numbers behind it, as in pissa_niter_16
    if isinstance(start := found.get("init_lora_weights"), str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelFileError(
            f"The adapter in {folder} belongs to a base model that its training has changed (init_lora_weights is "
            f"{start!r:.40}). Convert it with peft's path_initial_model_for_weight_conversion."
        )
    for name, value in found.items():
        if name in _OBEYED:
            _check_value(folder, name, value)
        elif name not in _PASSING and value not in (None, False, [], {}, "none"):  # these switch a setting off
            raise ModelFileError(
                f"The adapter in {folder} has {name}={value!r:.60} in its {CONFIG}, which kvkeep does not know. Merge "
                "it into its model with peft, and give that folder as the model."
            )
    return found


def _check_value(folder: str, name: str, value: object) -> None:
    """Refuse the value of a known setting that PEFT does not take: of another type, or with a float that is infinite
    or NaN. ``None`` passes.

    Raises:
        ModelFileError: the value is refused, or one in it.
    """
    inner: list[object] = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    numbers = name in ("layers_to_transform", "rank_pattern", "alpha_pattern")
    # to Python a bool is an int as well
    fits = isinstance(value, _OBEYED[name]) and not (isinstance(value, bool) and bool not in _OBEYED[name])
    fits = fits and all(isinstance(part, (int, float) if numbers else str) for part in inner)
    # Python reads NaN and Infinity from JSON
    if value is not None and not (fits and all(math.isfinite(n) for n in (value, *inner) if isinstance(n, float))):
        raise ModelFileError(
            f"The adapter in {folder} has {name}={value!r:.60} in its {CONFIG}, which is no value for it. Download the "
            "adapter again."
        )


def _read(path: Path) -> dict[str, Any]:
    """Return the settings in an ``adapter_config.json``.

    Raises:
        ModelFileError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read ({error!s:.200}). Download the adapter again.") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} is no JSON object. Download the adapter again.")
    return found


def _weights(folder: str, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of the adapter in a folder, and return them by their names in a model that PEFT has not wrapped.

    Raises:
        ModelFileError: the file cannot be read, holds integers, NaN or infinite numbers, or has lower ranks than its
            settings say.
    """
    from safetensors.torch import load_file

    with explained(folder, f"Its {WEIGHTS} cannot be read"):
        found = load_file(Path(folder).expanduser() / WEIGHTS)
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ModelFileError(f"The adapter in {folder} has values that are no numbers ({name:.200}).")
    # an r from a file that cannot be trusted must not decide how much memory PEFT allocates
    pattern = settings.get("rank_pattern")
    # 8 is PEFT's default; a matrix of LoRA has the rank as its smaller side
    ranks = [settings.get("r", 8), *(pattern.values() if isinstance(pattern, dict) else ())]
    most = max((min(tensor.shape) for tensor in found.values() if tensor.dim()), default=0)
    if not all(isinstance(rank, int) and 1 <= rank <= most for rank in ranks):
        raise ModelFileError(
            f"The adapter in {folder} has ranks of up to {most} in {WEIGHTS}, and its {CONFIG} says {ranks!s:.60}. "
            "Download it again."
        )
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def _merge(model: PreTrainedModel) -> None:
    """Merge the active adapter into a model's weights, in place, and put the model's own modules back where PEFT's
    are.
    """
    for name, layer in list(model.named_modules()):
        if not _is_layer(layer) or any(_is_layer(above) for above in _above(model, name)):
            continue  # no layer of PEFT, or a part of one, which goes with the whole
        module = cast(Any, layer)
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    if hasattr(model, "peft_config"):
        # PEFT's mark of a model that still has adapters
        del model.peft_config


def _active_in(layer: Any, own: str) -> str | list[str]:
    """Return the value for PEFT's ``_active_adapter`` of a layer: the adapter, or nothing if the layer is saved whole
    and this adapter lacks it.
    """
    if hasattr(layer, "check_set_adapter"):
        return own if own in layer.modules_to_save else []
    return [own]


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that contain the module of this name, except the model itself."""
    while name := name.rpartition(".")[0]:
        yield model.get_submodule(name)


def _is_layer(module: nn.Module) -> bool:
    """Return whether PEFT's adapters are in this module."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(module, "enable_adapters")


@contextmanager
def _in_silence() -> Iterator[None]:
    """Leave out warnings of PEFT, which are about training, while the context lasts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

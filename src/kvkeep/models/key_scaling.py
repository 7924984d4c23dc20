"""How much queries make of each channel of keys, found by one pass of the model over random tokens.

Keys of 4 bits are coded with one step for all channels of a group. A channel with large keys that meets small queries
would widen the step for the others. So keys are divided, and queries multiplied, by

    (mean key² / mean query²) ^ 1/4

of each channel of each head, rounded to a power of two, which leaves products as they are and makes the errors of all
channels alike. Both channels of a rotary pair have the same factor, since the pair is turned by another angle at each
position: what is true of the first positions is then true of all.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.backends import AttentionInputs, choose
from kvkeep.cache.hf_layers import handed, handing_cache
from kvkeep.cache.rotary_probe import Rotations, rotations_for
from kvkeep.errors import UnsupportedModelError
from kvkeep.kv.slot_codec import MOST_EXPONENT
from kvkeep.models.device import device_of
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Phase, Slots

_ROWS, _LENGTH, _SEED = 2, 128, 0

_log = logging.getLogger(__name__)

Exponents = Mapping[int, Int8[Tensor, "Hk D"]]
"""The exponents of each layer with slots, by its number."""

_known: weakref.WeakKeyDictionary[PreTrainedModel, Exponents] = weakref.WeakKeyDictionary()


def key_exponents(model: PreTrainedModel) -> Exponents:
    """Return the exponents of the powers of two by which a model's keys are divided, by layer number.

    They are computed once for each model. Without them, where the model does not run on random tokens, the exponents
    are 0 everywhere, and ``{}`` is returned.

    Args:
        model: the model, attached.
    """
    if model not in _known:
        try:
            _known[model] = _measured(model)
        except Exception as error:  # the code of some model, on tokens that it was not made for
            _log.debug("Keys of 4 bits are not scaled: a pass over random tokens failed (%s).", error)
            _known[model] = {}
    return _known[model]


def _measured(model: PreTrainedModel) -> Exponents:
    """Run random tokens through a model, and return the exponents."""
    config = model.config.get_text_config(decoder=True)
    length = min(_LENGTH, int(getattr(config, "max_position_embeddings", None) or _LENGTH))
    ids = torch.randint(0, config.vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(_SEED))
    observers: dict[int, _Observer] = {}
    cache = handing_cache(model.config, lambda number: observers.setdefault(number, _Observer()))
    with torch.inference_mode():
        model(input_ids=ids.to(device_of(model)), **handed(model, cache), use_cache=True)
    rotations = _rotations(model)
    with torch.inference_mode(False):  # they outlive the mode
        return {number: seen.exponents(rotations.get(number)).clone() for number, seen in observers.items()}


def _rotations(model: PreTrainedModel) -> Rotations:
    """Return the rotations of the layers; none where channels are not paired, or kvkeep does not know how."""
    try:
        return rotations_for(model.config, "keys of 4 bits", turns=False, foresees=False)
    except UnsupportedModelError:
        return {}


class _Observer:
    """Stands in for a layer, and sums up what it is given.

    Attributes:
        columns: columns seen so far.
        key_power: mean square of each channel of each head's keys, the first token of each text left out.
        query_power: the same of the queries of the heads that share its keys.
    """

    key_power: Float[Tensor, "Hk D"]
    query_power: Float[Tensor, "Hk D"]

    def __init__(self) -> None:
        self.columns = 0

    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Note the powers of a whole text, and return the output of attention over itself."""
        self.columns += keys.shape[2]
        grouped = query.unflatten(1, (keys.shape[1], -1))
        self.query_power = grouped[:, :, :, 1:].float().square().mean(dim=(0, 2, 3)).cpu()
        self.key_power = keys[:, :, 1:].float().square().mean(dim=(0, 2)).cpu()
        now = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        slots = Slots(keys, values, now[:, None].int())
        return choose(query.device, query.dtype).attend(AttentionInputs(query, slots, now, options))[0]

    def exponents(self, rotation: Rotation | None) -> Int8[Tensor, "Hk D"]:
        """Return the exponents of the layer's keys, whose mean over the channels of a head is 0 before rounding."""
        keys, queries = (_of_pairs(power, rotation) for power in (self.key_power, self.query_power))
        ratio = (keys.clamp_min(1e-12) / queries.clamp_min(1e-12)).log2() / 4
        found = (ratio - ratio.mean(dim=-1, keepdim=True)).round().nan_to_num(0.0)
        return found.clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)


def _of_pairs(power: Float[Tensor, "Hk D"], rotation: Rotation | None) -> Float[Tensor, "Hk D"]:
    """Return the mean power of each rotary pair in both of its channels. Other channels keep theirs."""
    if rotation is None:
        return power
    n = len(rotation.frequencies)
    dims: Any = list(rotation.dims or range(2 * n))
    means, found = (power[:, dims[:n]] + power[:, dims[n:]]) / 2, power.clone()
    found[:, dims[:n]] = found[:, dims[n:]] = means
    return found

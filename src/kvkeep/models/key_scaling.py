"""How much queries make of each channel of keys, found by one pass of the model over random tokens.

Keys of 4 bits are coded with one step for all channels of a group. A channel with large keys that meets small queries
would widen the step for the others. So keys are divided, and queries multiplied, by

    (mean key² / mean query²) ^ 1/4

of each channel of each head, rounded to a power of two, which leaves products as they are and makes the errors of all
channels alike. The two channels of a rotary pair turn into each other, slowly in some pairs. So the means are over the
tokens as they are and as they would be further on in a text, which costs no further pass.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping

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

_REACH = 2048
"""Positions of which the means are typical. Pairs that have not turned by then differ in their channels: with more
positions these differences are lost, and with fewer the keys of later tokens err more."""

_TINY = 1e-12
"""The least mean square, so that a channel of zeros has a factor."""

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
    rotations, observers = _rotations(model), dict[int, _Observer]()
    cache = handing_cache(model.config, lambda number: observers.setdefault(number, _Observer(rotations.get(number))))
    # the logits of all tokens may take more memory than the rest of the pass
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.inference_mode():
        model(input_ids=ids.to(device_of(model)), **handed(model, cache), use_cache=True, **few)
    return {number: seen.exponents for number, seen in observers.items()}


def _rotations(model: PreTrainedModel) -> Rotations:
    """Return the rotations of the layers; none where channels are not paired, or kvkeep does not know how."""
    try:
        return rotations_for(model.config, "keys of 4 bits", turns=False, foresees=False)
    except UnsupportedModelError:
        return {}


class _Observer:
    """Stands in for a layer, and looks at what it is given.

    Args:
        rotation: the layer's; ``None``: its channels are not paired, or it is not known how.

    Attributes:
        columns: columns seen so far.
        exponents: of the layer's keys. Their mean over the channels of a head is 0 before rounding.
    """

    exponents: Int8[Tensor, "Hk D"]

    def __init__(self, rotation: Rotation | None) -> None:
        self.columns, self._rotation = 0, rotation

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
        """Set the exponents by a whole text, and return the output of attention over itself."""
        self.columns += keys.shape[2]
        with torch.inference_mode(False), torch.no_grad():  # the exponents outlive the pass
            # without the first token of a text, which attention treats apart from all others
            self.exponents = self._exponents(query[:, :, 1:].float(), keys[:, :, 1:].float())
        now = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        slots = Slots(keys, values, now[:, None].int())
        return choose(query.device, query.dtype).attend(AttentionInputs(query, slots, now, options))[0]

    def _exponents(self, query: Float[Tensor, "B Hq n D"], keys: Float[Tensor, "B Hk n D"]) -> Int8[Tensor, "Hk D"]:
        steps = range(0, _REACH, _LENGTH) if self._rotation is not None else [0]
        of_keys, of_queries = (torch.stack([self._power(x, step) for step in steps]).mean(dim=0) for x in (keys, query))
        of_queries = of_queries.unflatten(0, (keys.shape[1], -1)).mean(dim=1)
        ratio = (of_keys.clamp_min(_TINY) / of_queries.clamp_min(_TINY)).log2() / 4
        found = (ratio - ratio.mean(dim=-1, keepdim=True)).round().nan_to_num(0.0)
        exponents: Int8[Tensor, "Hk D"] = found.clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)
        return exponents

    def _power(self, x: Float[Tensor, "B H n D"], by: int) -> Float[Tensor, "H D"]:
        """Return the mean square of each channel of vectors as they would be so many positions later."""
        if self._rotation is not None and by:
            x = self._rotation.ahead(x, torch.full(x.shape[:2], by, device=x.device))
        found: Tensor = x.square().mean(dim=(0, 2))
        return found

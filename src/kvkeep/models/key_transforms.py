"""What is done to a model's keys before they are coded with 4 bits, found by one pass of the model over random tokens.

Keys are coded with one step for all channels of a group. A channel with large keys that meets small queries would widen
the step for the others. So keys are divided, and queries multiplied, by

    (variance of the keys / mean query²) ^ 1/4

of each channel of each head, rounded to a power of two, which leaves products as they are and makes the errors of all
channels alike. The variance counts, and not the mean square, since most of the mean is taken out by the reflections:
they turn the directions in which the keys of a head have the largest mean squares into those that the offsets of codes
take, which have no part in the step. See `kvkeep.kv.slot_codec.KeyTransform`.

The two channels of a rotary pair turn into each other, slowly in some pairs. So all means are over the tokens as they
are and as they would be further on in a text, which costs no further pass.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.backends import AttentionInputs, choose
from kvkeep.cache.hf_layers import handed, handing_cache
from kvkeep.cache.rotary_probe import Rotations, rotations_for
from kvkeep.errors import UnsupportedModelError
from kvkeep.kv.slot_codec import KeyTransform
from kvkeep.kv_bits import MOST_EXPONENT, group_size, n_normals
from kvkeep.models.device import device_of
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Phase, Slots

_ROWS, _LENGTH, _SEED = 2, 128, 0
"""Random texts, the tokens of each, and what they are drawn from."""

_REACH = 2048
"""Positions of which the means are typical. Pairs that have not turned by then differ in their channels: with more
positions these differences are lost, and with fewer the keys of later tokens err more."""

_LEAST_VARIANCE = 1 / 64
"""The least variance of a channel by its mean square: a channel that never changed would get too large for offsets."""

_TINY = 1e-12
"""The least mean square, so that a channel of zeros has a factor."""

_log = logging.getLogger(__name__)

Transforms = Mapping[int, KeyTransform]
"""Of the keys of one row in each layer with slots, by its number."""

_known: weakref.WeakKeyDictionary[PreTrainedModel, Transforms] = weakref.WeakKeyDictionary()


def key_transforms(model: PreTrainedModel) -> Transforms:
    """Return what is done to a model's keys before they are coded with 4 bits: for each layer's number a transform of
    one row, the same for all texts.

    It is found once for each model. Where the model does not run on random tokens, nothing but
    `kvkeep.kv.slot_codec.hadamard` is done, and ``{}`` is returned.

    Args:
        model: the model, attached.
    """
    if model not in _known:
        try:
            _known[model] = _measured(model)
        except Exception as error:  # the code of some model, on tokens that it was not made for
            _log.debug("Keys of 4 bits are not transformed: a pass over random tokens failed (%s).", error)
            _known[model] = {}
    return _known[model]


def _measured(model: PreTrainedModel) -> Transforms:
    """Run random tokens through a model, and return the transforms that suit them, by layer number."""
    config = model.config.get_text_config(decoder=True)
    length = min(_LENGTH, int(getattr(config, "max_position_embeddings", None) or _LENGTH))
    ids = torch.randint(0, config.vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(_SEED))
    rotations, observers = _rotations(model), dict[int, _Observer]()
    cache = handing_cache(model.config, lambda number: observers.setdefault(number, _Observer(rotations.get(number))))
    # the logits of all tokens may take more memory than the rest of the pass
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.inference_mode():
        model(input_ids=ids.to(device_of(model)), **handed(model, cache), use_cache=True, **few)
    return {number: seen.transform for number, seen in observers.items()}


def _rotations(model: PreTrainedModel) -> Rotations:
    """Return the rotary rotations of a model's layers by number; ``{}`` if kvkeep cannot tell how channels are
    paired.
    """
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
        transform: of the layer's keys. The mean of the exponents over the channels of a head is 0 before rounding.
    """

    transform: KeyTransform

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
        """Set ``transform`` by the queries and keys of a batch of whole texts without padding, and return the output of
        attention over the texts themselves.
        """
        self.columns += keys.shape[2]
        with torch.inference_mode(False), torch.no_grad():  # the transform outlives the pass
            # without the first token of a text, which attention treats apart from all others
            self.transform = self._transform(query[:, :, 1:].float(), keys[:, :, 1:].float())
        now = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        slots = Slots(keys, values, now[:, None].int())
        return choose(query.device, query.dtype).attend(AttentionInputs(query, slots, now, options))[0]

    def _transform(self, query: Float[Tensor, "B Hq n D"], keys: Float[Tensor, "B Hk n D"]) -> KeyTransform:
        """Return the exponents that balance the queries and keys of all rows, and the normals for keys so scaled, as
        the transform of one row.
        """
        squares = self._over(keys, lambda x: x.transpose(2, 3) @ x / x.shape[2])
        means = self._over(keys, lambda x: x.mean(dim=2))
        of_queries = self._over(query, lambda x: x.square().mean(dim=2)).unflatten(0, (keys.shape[1], -1)).mean(dim=1)
        of_channels = squares.diagonal(dim1=1, dim2=2)
        of_keys = of_channels
        if n_normals(keys.shape[3]):  # the reflections take most of the means out
            of_keys = torch.maximum(of_channels - means.square(), of_channels * _LEAST_VARIANCE)
        ratio = (of_keys.clamp_min(_TINY) / of_queries.clamp_min(_TINY)).log2() / 4
        # a factor that all channels share changes the step as it changes the keys
        found = (ratio - ratio.mean(dim=-1, keepdim=True)).round().nan_to_num(0.0)
        exponents = found.clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)[None]
        return KeyTransform(exponents, _normals(_coded(squares, KeyTransform(exponents)))[None].to(keys.device))

    def _over(self, x: Float[Tensor, "B H n D"], mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean of something over the rows, and over vectors as they are and as they would be later."""
        steps = range(0, _REACH, _LENGTH) if self._rotation is not None else [0]
        total = functools.reduce(torch.add, (mean(self._later(x, step)).mean(dim=0) for step in steps))
        return total / len(steps)

    def _later(self, x: Float[Tensor, "B H n D"], by: int) -> Float[Tensor, "B H n D"]:
        """Return vectors as they would be so many positions later."""
        if self._rotation is None or not by:
            return x
        return self._rotation.ahead(x, torch.full(x.shape[:2], by, device=x.device))


def _coded(squares: Float[Tensor, "Hk D D"], transform: KeyTransform) -> Float[Tensor, "Hk D D"]:
    """Return the mean products of the channels of keys as they are coded without reflections, from those of keys."""
    half = transform.keys(squares[None])  # the channels of one of the two keys
    return transform.keys(half.transpose(2, 3))[0]


def _normals(squares: Float[Tensor, "Hk D D"]) -> Float[Tensor, "Hk n D"]:
    """Return the normals of `KeyTransform`, whose squares are 2, for the mean products of channels of each head.

    The first reflection turns the direction in which keys have the largest mean square into that of the channels of the
    first group; the next one that of the largest among all orthogonal to it into that of the second.
    """
    D = squares.shape[-1]
    _, vectors = torch.linalg.eigh(squares.double().cpu().nan_to_num(0.0))  # the largest last
    normals: list[Tensor] = []
    for number in range(n_normals(D)):
        source, size = vectors[:, :, -1 - number], group_size(D)
        target = torch.zeros_like(source)
        target[:, number * size : (number + 1) * size] = size**-0.5
        for normal in normals:  # to where the reflections before this one turn it
            source = source - normal * (normal * source).sum(dim=-1, keepdim=True)
        # of the two signs that which has the longer, more exact normal
        sign = torch.where((source * target).sum(dim=-1, keepdim=True) > 0, -1.0, 1.0)
        across = source * sign - target
        normals.append(across * (2**0.5 / across.norm(dim=-1, keepdim=True)))
    return torch.stack(normals, dim=1).float() if normals else torch.zeros(len(squares), 0, D)

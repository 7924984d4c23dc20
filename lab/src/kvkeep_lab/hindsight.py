"""Caches that know a whole text before it begins (H2O, arXiv:2306.14048, Figure 2).

A first pass over whole texts adds up the attention that every key receives from all rows, later ones included. A second
pass uses these totals:

    totals = hindsight.measure(model, ids)  # model: attached; ids: (texts, tokens)
    oracle = hindsight.H2OGlobal(totals=totals, recent=8)  # Figure 2d: h2o, but it knows the future
    cache = BoundedCache(model.config, oracle, budget=16, prefill_chunk=1, sequences=range(len(ids)))
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
    cache = hindsight.without(model, totals.heaviest(0.2))  # Figure 2c: a fifth of the keys is hidden from later rows
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits

``prefill_chunk=1`` decodes token by token. The controls are ``totals.lightest(0.2)`` and ``totals.drawn(0.2, seed=0)``.
This is research equipment: no policy has these totals while it runs, so nothing here is in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import noise
from kvkeep.attention_probe import LayerStep, OnePass, positions_of, probe_cache
from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import AttentionInputs, choose, reference
from kvkeep.cache.hf_layers import PhasedCache, handed
from kvkeep.errors import InputError, ShapeError
from kvkeep.kv import ranking
from kvkeep.policies._mass import HeavyHitters
from kvkeep.types import EMPTY, Report, Slots, State, View


@runtime_checkable
class Attached(Protocol):
    """A decoder of transformers to which `kvkeep.attach` was applied."""

    config: Any
    device: torch.device

    def __call__(self, *, input_ids: Tensor, **given: Any) -> Any:
        """Run the model, with its cache among what is given."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Some keys of each text, layer and KV head.

    Attributes:
        chosen: layer → mask over true positions.
    """

    chosen: Mapping[int, Bool[Tensor, "N Hk P"]]

    def others(self) -> Keys:
        """Return all other keys, those past the end of a text included."""
        return Keys({layer: ~keys for layer, keys in self.chosen.items()})


@dataclass(frozen=True, eq=False)
class Totals:
    """The attention that every key of a text receives from all of its rows under the full cache.

    Attributes:
        mass: layer → column sums of the attention probabilities by true position, averaged over the query heads of a
            group; 0 past the end of a text.
        lengths: number of tokens of each text.
    """

    mass: Mapping[int, Float[Tensor, "N Hk P"]]
    lengths: Int[Tensor, " N"]

    def heaviest(self, share: float) -> Keys:
        """Return the keys with the largest totals: ``floor(share · length)`` of each head; of equals the newer.

        Raises:
            InputError: the share is outside [0, 1].
        """
        return self._largest(self.mass, share)

    def lightest(self, share: float) -> Keys:
        """Return as many keys with the smallest totals.

        Raises:
            InputError: the share is outside [0, 1].
        """
        return self._largest({layer: -mass for layer, mass in self.mass.items()}, share)

    def drawn(self, share: float, *, seed: int = 0) -> Keys:
        """Return as many random keys, keyed by (seed, text, layer, head, position).

        Raises:
            InputError: the share is outside [0, 1].
        """
        return self._largest({layer: _draw(mass, layer, seed) for layer, mass in self.mass.items()}, share)

    def of(self, view: View) -> Float[Tensor, "B Hk S"]:
        """Return the totals of the tokens in a layer's slots.

        A row's text has the number of its sequence id; if one text alone was measured, it is that of every row.

        Raises:
            InputError: the layer, head, text or token was not measured.
        """
        mass = self.mass.get(view.layer)
        if mass is None:
            raise InputError(f"Layer {view.layer} was not measured, only {list(self.mass)}. Measure this very model.")
        texts = view.sequences if len(mass) > 1 else torch.zeros_like(view.sequences)
        self._check(mass, view, texts)
        rows = mass.to(view.positions.device).index_select(0, texts)
        return rows.gather(-1, view.positions.long().clamp(min=0))

    def _largest(self, values: Mapping[int, Float[Tensor, "N Hk P"]], share: float) -> Keys:
        if not 0.0 <= share <= 1.0:
            raise InputError(
                f"share={share} is outside [0, 1]; it is the share of a text's keys, e.g. 0.2 for a fifth."
            )
        n = (share * self.lengths.double() + 1e-9).long()[:, None]
        return Keys({layer: ranking.keep(value, self._positions(value), n) for layer, value in values.items()})

    def _positions(self, like: Float[Tensor, "N Hk P"]) -> Int[Tensor, "N Hk P"]:
        columns = torch.arange(like.shape[-1], device=like.device)
        return columns.masked_fill(columns >= self.lengths[:, None, None], EMPTY).expand_as(like)

    def _check(self, mass: Float[Tensor, "N Hk P"], view: View, texts: Int[Tensor, " B"]) -> None:
        N, heads, _ = mass.shape
        asked = sorted(texts.tolist())
        if N > 1 and (asked[-1] >= N or len(set(asked)) < len(asked)):
            raise InputError(
                f"{N} texts were measured, and the rows of the cache ask for those numbered {asked}. Tell each row its "
                "text: BoundedCache(..., sequences=range(n))."
            )
        if view.positions.shape[1] != heads:
            raise InputError(f"{heads} KV heads were measured, the cache has {view.positions.shape[1]}: another model.")
        over = view.seen - self.lengths.to(texts.device)[texts]
        if int(over.max()) > 0:
            raise InputError(f"A text goes on for {int(over.max())} tokens that were not measured; measure all of it.")


def _draw(like: Float[Tensor, "N Hk P"], layer: int, seed: int) -> Float[Tensor, "N Hk P"]:
    text, head, position = (torch.arange(n, device=like.device) for n in like.shape)
    return noise.uniform(seed, text[:, None, None], torch.tensor(layer, device=like.device), head[:, None], position)


@final
@dataclass(frozen=True, kw_only=True)
class H2OGlobal(HeavyHitters):
    """H2O with the global statistic: the totals replace the mass so far (policies.md §4.4).

    A static mask of the heaviest keys, as in the official `h2o_hf/utils_lm_eval/modify_llama.py`, leaves slots empty
    for heavy hitters that are still to come; here the heaviest so far use these slots. Once all have come, both are the
    same. For the static mask, hide ``totals.heaviest(share).others()`` with `without`.

    Attributes:
        totals: the first pass over the texts that the cache will get, numbered by sequence ids.
    """

    totals: Totals = field(repr=False)

    statistic: ClassVar[Nothing] = Nothing()

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the total of each token.

        Raises:
            InputError: see `Totals.of`.
        """
        return {"mass": self.totals.of(view)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the totals."""
        return state["mass"]


# The probes of both passes.

BLOCK_BYTES = 64 * 2**20
"""Most bytes of logits that exist at a time where keys are hidden, but at least those of one row."""


class MassTotals(OnePass):
    """Full attention that adds up the mass of each key.

    Attributes:
        mass: column sums by true position, averaged over the query heads of a group; 0 past the end of a text.
    """

    mass: Float[Tensor, "B Hk T"]

    def attend(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Attend causally, and keep the sums."""
        positions, backend = step.positions, choose(step.query.device, step.query.dtype)
        slots = Slots(step.keys, step.values, positions[:, None])
        out, report = backend.attend(AttentionInputs(step.query, slots, positions, step.options, Mass()))
        mass = report.mass.masked_fill((positions < 0)[:, None], 0.0)
        place = positions.clamp(min=0)[:, None].expand_as(mass)
        self.mass = torch.zeros_like(mass).scatter_add_(-1, place, mass)
        return out


class HiddenKeys(OnePass):
    """Attention in which some keys are hidden from all rows but their own and the next few.

    Args:
        hidden: which keys, by text and true position.
        recent: rows after a hidden key's own that still see it.
    """

    def __init__(self, hidden: Bool[Tensor, "N Hk P"], recent: int) -> None:
        super().__init__()
        self._hidden, self._recent = hidden, recent

    def attend(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Attend causally, a block of rows at a time, in float64.

        Raises:
            ShapeError: keys were chosen for other texts or another model.
        """
        query, positions, options = step.query, step.positions, step.options
        B, Hq, T, _ = query.shape
        hidden = self._by_column(positions, step.keys.shape[1])[:, :, None]
        keys, values, out = step.keys.double(), step.values.double(), []
        for rows in torch.arange(T).split(max(1, BLOCK_BYTES // (8 * B * Hq * T))):
            now = positions[:, rows]
            old = now[:, None, :, None] - positions[:, None, None, :] > self._recent
            sees = reference.visible(now, positions[:, None], options.window) & ~(hidden & old)
            logits = reference.logits(query[:, :, rows].double(), keys, sees, options)
            p = reference.softmax(logits, options.sinks).masked_fill((now < 0)[:, None, None, :, None], 0.0)
            out.append(torch.einsum("bhgts,bhse->bhgte", p, values).flatten(1, 2))
        return torch.cat(out, dim=2).to(query.dtype)

    def _by_column(self, positions: Int[Tensor, "B T"], heads: int) -> Bool[Tensor, "B Hk T"]:
        """Return which columns hold a hidden key.

        Raises:
            ShapeError: keys were chosen for other texts or another model.
        """
        N, Hk, P = self._hidden.shape
        if len(positions) != N or Hk != heads or int(positions.max()) >= P:
            raise ShapeError(
                f"Keys were chosen for {N} texts of at most {P} tokens and {Hk} KV heads; the model was given "
                f"{len(positions)} of up to {int(positions.max()) + 1} and has {heads}. Measure these texts first."
            )
        place = positions.clamp(min=0)[:, None].expand(-1, Hk, -1)
        return self._hidden.to(positions.device).gather(-1, place)


def measure(model: Attached, ids: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None = None) -> Totals:
    """Run whole texts under full attention, the first pass, and return the totals.

    Args:
        model: the model.
        ids: token ids of the texts, padded on the left if they differ in length.
        real: mask of the tokens; ``None`` if nothing is padded.

    Cost:
        One forward pass, and ``4 · layers · B · Hk · T`` bytes for the sums.
    """
    cache, layers = probe_cache(model.config, lambda index: MassTotals())
    lengths = torch.full(ids.shape[:1], ids.shape[1]) if real is None else real.sum(dim=1)
    padding = {} if real is None else {"attention_mask": real.long(), "position_ids": positions_of(real).clamp(min=0)}
    with torch.inference_mode():
        model(input_ids=ids, **handed(model, cache), logits_to_keep=1, **padding)
    return Totals({index: layer.mass.clone() for index, layer in layers.items()}, lengths.to(model.device))


def without(model: Attached, keys: Keys, *, recent: int = 0) -> PhasedCache:
    """Return a cache for one forward pass over whole texts in which some keys are hidden.

    This is the ablation of H2O's Figure 2c: the logits of the hidden keys are minus infinity for every later row.

    Args:
        model: the model that will run with the cache.
        keys: the hidden keys, e.g. ``totals.heaviest(0.2)``; row ``i`` of the batch is text ``i``.
        recent: number of rows after a hidden key's own that still see it.
    """
    return probe_cache(model.config, lambda index: HiddenKeys(keys.chosen[index], recent))[0]

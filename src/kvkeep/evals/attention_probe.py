"""How evaluations run a model: the options of a bounded cache, and batches that are fed piece by piece."""

from __future__ import annotations

import abc
import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.attention_stats import Mass
from kvkeep.backends import choose, reference
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import BoundedLayer, handed, handing_part
from kvkeep.cache.layer import Layer
from kvkeep.errors import BudgetError, ShapeError, UnsupportedOperationError
from kvkeep.head_profile import Profile
from kvkeep.kv.slot_codec import check_bits
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.rotary import rotation_for
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots, Stepper

BATCH_TOKENS = 16_384
"""Most prompt tokens that run through the model at once."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a `BoundedCache` beside policy and budget; by default the policy's own.

    Attributes:
        positions: ``true`` or ``slot``; ``None`` for the policy's own mode.
        layer_budget: how the budget is spread over the layers; ``None`` for the policy's own rule.
        head_budget: how the budget is divided among heads; ``None`` for the policy's own rule.
        kv_bits: bits of keys and values in the slots; ``None`` for the model's dtype.
        prefill_chunk: tokens of a prompt that a layer takes at once; ``None`` for all.

    Raises:
        BudgetError: there is no such rule for layers, or a number is out of range.
    """

    positions: str | None = None
    layer_budget: str | tuple[float, ...] | None = None
    head_budget: str | None = None
    kv_bits: str | None = None
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer_budget, str):
            budgets.per_layer(self.layer_budget, budget=1, layers=1)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise BudgetError(f"The prefill chunk {self.prefill_chunk} takes no token; give 1 or more.")

    def cache(self, checkpoint: Checkpoint, policy: Policy, numbers: Sequence[int], *, first: int = 0) -> BoundedCache:
        """An unused cache for one batch.

        Args:
            checkpoint: the model.
            policy: the eviction policy.
            numbers: tokens kept per layer and head, one number per row.
            first: identity of the first row for policies with randomness; the others count up from it.
        """
        return BoundedCache(
            checkpoint.config,
            policy,
            list(numbers),
            prefill_chunk=self.prefill_chunk,
            sequences=list(range(first, first + len(numbers))),
            layer_budget=self.layer_budget,
            head_budget=self.head_budget,
            positions=self.positions,
            kv_bits=self.kv_bits,
        )

    def differences(self, checkpoint: Checkpoint, policy: Policy) -> str:
        """The options that differ from the policy's own on this model, e.g. ``positions=slot,layer-budget=ramp:0.2``.

        Raises:
            UnsupportedModelError: slot positions were asked for, and the model cannot have them.
        """
        rule, own = policy.defaults.layer_budget, "its own" if policy.spreads else "uniform"
        found = {
            "positions": (_mode(checkpoint, self.positions, policy), _mode(checkpoint, None, policy)),
            "layer-budget": (_rule(self.layer_budget or rule), _rule(rule)),
            "head-budget": (_shared(self.head_budget or own), own),
            "kv-bits": (str(check_bits(self.kv_bits)), str(None)),
            "prefill-chunk": (str(self.prefill_chunk), str(None)),
        }
        return ",".join(f"{name}={asked}" for name, (asked, own) in found.items() if asked != own)


PLAIN = Setup()
"""The policy's own options."""


class Drive:
    """Feeds one batch through a model with a cache of its own.

    Args:
        writer: the model.
        policy: the eviction policy.
        budgets: tokens kept per layer and head, one per row.
        first: identity of the first row for policies with randomness; the others count up from it.
        setup: the cache's other options.

    Attributes:
        cache: the cache.
        budgets: tokens kept per layer and head, one per row.
    """

    cache: BoundedCache

    def __init__(self, writer: Writer, policy: Policy, budgets: Sequence[int], *, first: int = 0, setup: Setup = PLAIN):
        self.model = writer.model
        self.budgets = tuple(budgets)
        self.cache = setup.cache(writer.checkpoint, policy, budgets, first=first)
        self._real: Tensor | None = None

    @torch.inference_mode()
    def feed(
        self, ids: Int[Tensor, "B n"], real: Bool[Tensor, "B n"] | None = None, *, last_only: bool = False
    ) -> Float[Tensor, "B m V"]:
        """Run ``n`` new columns through the model.

        Args:
            ids: token ids.
            real: which of them are tokens; ``None``: all, and all columns before them.
            last_only: compute the logits of the last column only.

        Returns:
            Logits of all ``n`` columns, or of the last one.
        """
        ids = ids.to(self.model.device)
        out = self.model(
            input_ids=ids,
            **handed(self.model, self.cache),
            use_cache=True,
            logits_to_keep=int(last_only),
            **({} if real is None else self._padding(real.to(ids.device))),
        )
        logits: Tensor = out.logits
        return logits

    def copies(self, rows: Sequence[int]) -> Drive:
        """The same model with copies of the memory of some rows; a row may be given several times.

        Both go on independently: nothing that is fed to one of them changes the other.
        """
        memories = {row: self.cache.snapshot(row) for row in set(rows)}
        copied = [memories[row] for row in rows]
        other = copy.copy(self)
        other.budgets = tuple(self.budgets[row] for row in rows)
        other.cache = BoundedCache.from_snapshots(self.model.config, copied, policy=self.cache.policy)
        seen = torch.tensor([memory.seen for memory in copied], device=self.model.device)
        width = int(seen.max())
        other._real = torch.arange(width, device=seen.device) >= width - seen[:, None]
        return other

    def _padding(self, real: Bool[Tensor, "B n"]) -> dict[str, Tensor]:
        self._real = real if self._real is None else torch.cat([self._real, real], dim=1)
        positions = self._real.long().cumsum(dim=1)[:, -real.shape[1] :] - 1
        return {"attention_mask": self._real.long(), "position_ids": positions.clamp(min=0)}


def batches(lengths: Sequence[int]) -> list[slice]:
    """Batches of rows: as many as have `BATCH_TOKENS` columns together, but at least one row each."""
    size = max(1, BATCH_TOKENS // max(lengths))
    return [slice(start, start + size) for start in range(0, len(lengths), size)]


def left_padded(rows: Sequence[Int[Tensor, "_"]]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """One batch of rows of different lengths, padded on the left, and which columns are tokens."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]


def _mode(checkpoint: Checkpoint, asked: str | None, policy: Policy) -> str:
    return "true" if rotation_for(checkpoint.config, asked, own=policy.defaults.positions) is None else "slot"


def _shared(rule: str) -> str:
    """The name of a rule for heads; a profile is named by its content, since a file may be made anew."""
    name, _, file = rule.partition(":")
    if name != "profile":
        return rule
    content = json.dumps(Profile.load(file).as_dict(), sort_keys=True)
    return f"{name}:{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _rule(how: str | tuple[float, ...]) -> str:
    """The name of a rule with its parameter; weights, one for each layer, are shown as a hash."""
    if not isinstance(how, str):
        return f"calibrated:{hashlib.sha256(repr(how).encode()).hexdigest()[:8]}"
    name, _, number = how.partition(":")
    return name if name == "uniform" else f"{name}:{float(number or budgets.RULES[name]):g}"


# What layers are given and what they hold: a `Recorder` wraps a layer and remembers both, a `Tape` is its record.


@dataclass(frozen=True, eq=False)
class LayerTape:
    """All that one layer was given for texts of equal length.

    Attributes:
        query: queries of all tokens.
        keys: keys of all tokens.
        values: values of all tokens.
        options: what the model's attention asks for.
        held: the tokens that the layer held before each generated token; these are the last ``R``.
    """

    query: Float[Tensor, "B Hq n D"]
    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n E"]
    options: AttentionOptions
    held: Bool[Tensor, "B Hk R n"] | None = None

    @property
    def length(self) -> int:
        """Tokens of each text."""
        return self.keys.shape[2]

    def weights(self, first: int) -> Float[Tensor, "B Hk G R n"]:
        """The full cache's attention of the rows from ``first`` on, in float64."""
        now, columns = self._positions(first)
        return self._softmax(first, reference.visible(now, columns[None], self.options.window))

    def bounded(self) -> Float[Tensor, "B Hk G R n"]:
        """Attention of the generated tokens over what the layer held and themselves, in float64; 0 for other keys."""
        assert self.held is not None
        first = self.length - self.held.shape[2]
        now, columns = self._positions(first)
        held = self.held | (now[0, :, None] == columns)
        return self._softmax(first, held & reference.visible(now, columns[None], self.options.window))

    def feed(self, layer: Stepper, start: int, stop: int) -> None:
        """Give a layer the tokens from ``start`` to ``stop``: a prompt if they are the first, else generated ones."""
        at = slice(start, stop)
        phase = Phase.PREFILL if start == 0 else Phase.DECODE
        layer.step(self.query[:, :, at], self.keys[:, :, at], self.values[:, :, at], options=self.options, phase=phase)

    def _positions(self, first: int) -> tuple[Int[Tensor, "1 R"], Int[Tensor, "1 n"]]:
        columns = torch.arange(self.length, device=self.keys.device)[None]
        return columns[:, first:], columns

    def _softmax(self, first: int, sees: Bool[Tensor, "#B #Hk R n"]) -> Float[Tensor, "B Hk G R n"]:
        logits = reference.logits(self.query[:, :, first:].double(), self.keys.double(), sees, self.options)
        return reference.softmax(logits, self.options.sinks)


class Recorder:
    """Takes the steps of a layer and remembers what it is given, and what it holds before each generated token.

    Args:
        layer: takes the steps in turn.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []
        self._held: list[Int[Tensor, "B Hk S"]] = []

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
        """Remember; then as `Layer.step`."""
        if phase is Phase.DECODE:
            self._held.append(self._layer.store.positions.clone())
        self._given.append((query.clone(), keys.clone(), values.clone()))
        self._options = options
        return self._layer.step(query, keys, values, options=options, phase=phase, real=real)

    def tape(self) -> LayerTape:
        """The record so far."""
        query, keys, values = (_joined(parts) for parts in zip(*self._given, strict=True))
        held = [members(positions, keys.shape[2]) for positions in self._held]
        return LayerTape(query, keys, values, self._options, torch.stack(held, dim=2) if held else None)


def record(cache: BoundedCache) -> dict[int, Recorder]:
    """Put a recorder around every layer of a cache that has slots; by the layer's number in the model."""
    recorders = {}
    for index, outer in enumerate(map(handing_part, cache.layers)):
        if isinstance(outer, BoundedLayer):
            outer.stepper = recorders[index] = Recorder(outer.layer)
    return recorders


@torch.inference_mode()
def tapes(model: Any, ids: Int[Tensor, "B n"]) -> dict[int, LayerTape]:
    """Run texts under the full cache and record every layer, by its number in the model."""
    cache = BoundedCache(model.config, "full", ids.shape[1])
    recorders = record(cache)
    model(input_ids=ids.to(model.device), **handed(model, cache), use_cache=True, logits_to_keep=1)
    return {index: recorder.tape() for index, recorder in recorders.items()}


def members(positions: Int[Tensor, "B Hk S"], length: int) -> Bool[Tensor, "B Hk n"]:
    """Which tokens of a text stand in the slots (-1 = empty)."""
    marks = torch.zeros(*positions.shape[:2], length + 1, dtype=torch.bool, device=positions.device)
    return marks.scatter_(-1, positions.long() % (length + 1), True)[..., :length]  # -1 goes to the spare place


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


# Steppers that take whole texts at once and hold nothing afterwards, for passes with hindsight.

BLOCK_BYTES = 64 * 2**20
"""Most bytes of logits that exist at a time where keys are hidden, but at least those of one row."""


def positions_of(real: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """True positions, -1 for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real, EMPTY)


class WholeText(abc.ABC):
    """Takes whole texts in one step and has no slots.

    Attributes:
        columns: columns of the texts; 0 before the step.
    """

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
        """Attend over the whole texts.

        Raises:
            UnsupportedOperationError: there was a step before.
        """
        if self.columns:
            raise UnsupportedOperationError("A pass with hindsight takes whole texts at once; make a new cache.")
        self.columns = query.shape[2]
        if real is None:
            real = torch.ones(query.shape[0], self.columns, dtype=torch.bool, device=query.device)
        return self.attend(query, keys, values, positions_of(real), options)

    @abc.abstractmethod
    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attention of the texts over themselves."""


class Adding(WholeText):
    """Full attention that adds up the mass of each key.

    Attributes:
        mass: column sums by true position, averaged over the query heads of a group; 0 past the end of a text.
    """

    mass: Float[Tensor, "B Hk T"]

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Causal attention; keep the sums."""
        backend, slots = choose(query.device, query.dtype), Slots(keys, values, positions[:, None])
        out, report = backend.attend(query, slots, positions, statistic=Mass(), options=options)
        mass = report.mass.masked_fill((positions < 0)[:, None], 0.0)
        place = positions.clamp(min=0)[:, None].expand_as(mass)
        self.mass = torch.zeros_like(mass).scatter_add_(-1, place, mass)
        return out


class Hiding(WholeText):
    """Attention in which some keys are hidden from all rows but their own and the next few.

    Args:
        hidden: which keys, by text and true position.
        recent: rows after a hidden key's own that still see it.
    """

    def __init__(self, hidden: Bool[Tensor, "N Hk P"], recent: int) -> None:
        super().__init__()
        self._hidden, self._recent = hidden, recent

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Causal attention, a block of rows at a time, in float64.

        Raises:
            ShapeError: keys were chosen for other texts or another model.
        """
        B, Hq, T, _ = query.shape
        hidden = self._by_column(positions, keys.shape[1])[:, :, None]
        keys, values, out = keys.double(), values.double(), []
        for rows in torch.arange(T).split(max(1, BLOCK_BYTES // (8 * B * Hq * T))):
            now = positions[:, rows]
            old = now[:, None, :, None] - positions[:, None, None, :] > self._recent
            sees = reference.visible(now, positions[:, None], options.window) & ~(hidden & old)
            logits = reference.logits(query[:, :, rows].double(), keys, sees, options)
            p = reference.softmax(logits, options.sinks).masked_fill((now < 0)[:, None, None, :, None], 0.0)
            out.append(torch.einsum("bhgts,bhse->bhgte", p, values).flatten(1, 2))
        return torch.cat(out, dim=2).to(query.dtype)

    def _by_column(self, positions: Int[Tensor, "B T"], heads: int) -> Bool[Tensor, "B Hk T"]:
        """Which columns hold a hidden key."""
        N, Hk, P = self._hidden.shape
        if len(positions) != N or Hk != heads or int(positions.max()) >= P:
            raise ShapeError(
                f"Keys were chosen for {N} texts of at most {P} tokens and {Hk} KV heads; the model was given "
                f"{len(positions)} of up to {int(positions.max()) + 1} and has {heads}. Measure these texts first."
            )
        place = positions.clamp(min=0)[:, None].expand(-1, Hk, -1)
        return self._hidden.to(positions.device).gather(-1, place)

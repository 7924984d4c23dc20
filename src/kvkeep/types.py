"""The vocabulary of the library: axis letters, and the records that packages pass to each other. No logic beyond sums.

Axis letters, the same in every signature:

=====  ==========================================================
``B``  rows of the batch
``Hq`` query heads
``Hk`` key-value heads
``G``  query heads per key-value head, ``Hq / Hk``
``T``  new tokens in this step
``S``  slots (keys that can be attended)
``D``  head dimension of keys; ``E`` of values (equal in most models)
=====  ==========================================================
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.head_sharding import ALONE, Heads

State: TypeAlias = dict[str, Tensor]
"""A policy's state: name → float32. The state of slots, ``(B, Hk, S)``, moves with them; KV heads may have some, too,
``(B, Hk, …)``, see `kvkeep.Policy.summaries`."""

Budget: TypeAlias = int | Int[Tensor, "B #Hk"]
"""Slots that may stay occupied: one number, or one per row (and head)."""

EMPTY = -1
"""The position of a slot that holds no token, below every true one: a head's smallest position names a free slot.

Keys and values that were left in an empty slot must not matter."""


class Phase(enum.Enum):
    """The kind of tokens that a step brings. The caller names it; it is never guessed from a tensor's width."""

    PREFILL = "prefill"
    """A prompt or a piece of one, of any length, one token included."""

    DECODE = "decode"
    """One generated token of each row."""

    PROBE = "probe"
    """Tokens that attend and are reported, but not stored: a text is read again to find out which tokens matter."""


class Slots(NamedTuple):
    """Keys, values and positions side by side, as attention reads them.

    Attributes:
        keys: keys of the slots.
        values: values of the slots.
        positions: true positions, `EMPTY` where there is no token. One head's positions if all heads agree.
    """

    keys: Float[Tensor, "B Hk S D"]
    values: Float[Tensor, "B Hk S E"]
    positions: Int[Tensor, "B #Hk S"]


class Fresh(Slots):
    """The queries' own keys and values alone, none of them padding: query ``t`` sees the first ``t + 1``."""


class Ranges(NamedTuple):
    """The range of each head in the pool of its row.

    Attributes:
        starts: the first entry.
        sizes: the number of entries.
        width: the most entries of a head, where positions and the policy's state lie in the pool, too; 0: they lie side
            by side.
    """

    starts: Int[Tensor, "B Hk"]
    sizes: Int[Tensor, "B Hk"]
    width: int = 0


class Queries(NamedTuple):
    """New queries before their rotation, and their true positions, `EMPTY` for padding."""

    vectors: Float[Tensor, "B Hq T D"]
    positions: Int[Tensor, "B T"]


@dataclass(frozen=True, eq=False)
class Top:
    """Attention to the largest probabilities of each query head's row and to the row's own token, and no others.

    Attributes:
        n: number of probabilities beside the own token's, one per row of the batch.
        renormalise: whether the probabilities that are used are scaled to a sum of 1.
    """

    n: Int[Tensor, " B"]
    renormalise: bool


@runtime_checkable  # as all protocols: the tests check annotations while they run
class OutputProjection(Protocol):
    """The projection of what a layer's heads put out into the layer's output: `kvkeep.models.attention`."""

    def lengths(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """Return the Euclidean norm of the layer's output if all query heads of a group put out ``x``."""

    def sizes(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """Return the L1 norm of the layer's output if one query head puts out ``x``, as a mean over the group."""


@dataclass(frozen=True)
class AttentionOptions:
    """Arguments of a model's attention beside queries, keys and values.

    Attributes:
        scaling: factor on the logits, usually ``D ** -0.5``.
        window: sliding window in tokens, the query included; ``None`` for full attention.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); ``None`` for off.
        sinks: one learned extra logit per query head that takes mass but has no value (gpt-oss).
        top: use only the largest probabilities. Policies ask for it, models never do. Statistics see the probabilities
            that are used.
        output: projection of the heads' outputs, for policies that look at it. Attention does not.

    Raises:
        InputError: the window holds no token.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " Hq"] | None = None
    top: Top | None = None
    output: OutputProjection | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:  # to some kernels 0 is no window at all
            raise InputError(
                f"window={self.window} hides even a query's own token. Give 1 or more, or None for full attention."
            )


@runtime_checkable
class Turning(Protocol):
    """A rotary embedding: `kvkeep.rotary.Rotation`; or `kvkeep.rotary.TextRotation`, which can only be undone."""

    @property
    def frequencies(self) -> Float[Tensor, " F"]:
        """Return the frequencies in radians per position, on the CPU."""

    def on(self, device: torch.device) -> Float[Tensor, " F"]:
        """Return the frequencies on a device. They are copied there only once."""

    @property
    def scaling(self) -> float:
        """Return the factor on rotated vectors."""

    def paired(self, x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
        """Return vectors with the first dims of all rotated pairs in front, then the second ones, then the others."""

    def undo(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return the vectors as they were before the rotation to their positions."""


@dataclass(frozen=True)
class Earlier:
    """What earlier layers say of a layer's tokens, which all heads hold in the same slots.

    Attributes:
        state: the policy's state that they have handed on; 0 for a token that the first layer does not hold.
        alive: whether the layer before still holds each token.
    """

    state: Mapping[str, Float[Tensor, "B S"]]
    alive: Bool[Tensor, "B S"]


@dataclass(frozen=True)
class View:
    """One layer's slots after the new tokens were added, as a policy sees them. Read-only.

    Attributes:
        positions: true position of each slot's token, ``-1`` where the slot is empty. Slots are unordered.
        keys: keys as the model rotated them.
        values: values.
        seen: tokens that each row has seen so far, new ones included, padding excluded.
        budget: slots that may stay occupied after this step.
        new: real tokens that each row received in this step; under `Phase.PROBE`, tokens that it read again.
        prompt: tokens that each row had seen at the end of the last piece of its prompt; 0 if there was none.
        phase: the kind of this step's tokens.
        layer: index of the layer in the model.
        sequences: identity of each row for counter-based randomness; moves with the row, not with its index.
        earlier: what earlier layers say of these tokens, for a policy that `cascades`; ``None`` in the first layer.
        pins: bounds of the spans that no policy may evict, see `kvkeep.kv.ranking.pinned`; ``None``: no row has any.
        rotation: the model's rotary embedding, for a policy that `unrotates`; ``None`` if the model has none.
        turned: whether ``keys`` are rotated. They are not under slot positions.
        queries: a prompt's new queries and their positions, for a policy that `asks`.
        output: projection of the heads' outputs while a prompt is read, for a policy that `projects`; ``None`` if the
            layer belongs to no model.
        heads: asks for the numbers of the layer's other KV heads, where several processes share them. The tensors above
            have this process's heads alone.
    """

    positions: Int[Tensor, "B Hk S"]
    keys: Float[Tensor, "B Hk S D"]
    values: Float[Tensor, "B Hk S E"]
    seen: Int[Tensor, " B"]
    budget: Budget
    new: Int[Tensor, " B"]
    prompt: Int[Tensor, " B"]
    phase: Phase
    layer: int
    sequences: Int[Tensor, " B"]
    pins: Int[Tensor, "B bounds"] | None = None
    rotation: Turning | None = None
    turned: bool = True
    queries: Queries | None = None
    output: OutputProjection | None = None
    earlier: Earlier | None = None
    heads: Heads = ALONE

    @functools.cached_property
    def unrotated(self) -> Float[Tensor, "B Hk S D"]:
        """Return the keys of all slots as they were before rotation, for a policy that names `unrotates`.

        They are the keys themselves if they are not rotated, or the model has no rotary embedding. Empty slots hold
        arbitrary values.
        """
        if self.rotation is None or not self.turned:
            return self.keys
        shared = self.positions.stride(1) == 0  # all heads hold the same tokens, as before a prompt's first cut
        return self.rotation.undo(self.keys, self.positions[:, :1] if shared else self.positions)

    @property
    def is_decode(self) -> bool:
        """Return whether this step's new tokens were generated, and are no prompt's."""
        return self.phase is Phase.DECODE

    @property
    def reads(self) -> Bool[Tensor, " B"]:
        """Return whether each row received tokens of a prompt in this step."""
        return self.new > 0 if self.phase is Phase.PREFILL else torch.zeros_like(self.new, dtype=torch.bool)

    @property
    def writes(self) -> Bool[Tensor, " B"]:
        """Return whether each row received a generated token in this step."""
        return self.new > 0 if self.phase is Phase.DECODE else torch.zeros_like(self.new, dtype=torch.bool)


@dataclass(frozen=True)
class Report:
    """The statistic that attention reports to the policy about this step.

    Attributes:
        sums: the statistic's fields, reduced over this step's query rows: name → ``(B, Hk, S)``.
    """

    sums: Mapping[str, Float[Tensor, "B Hk S"]]

    @property
    def mass(self) -> Float[Tensor, "B Hk S"]:
        """Return the attention mass of each key, summed over the selected queries."""
        return self.sums["mass"]

    @property
    def low(self) -> Float[Tensor, "B Hk S"]:
        """Return in how many of the counted rows each key received less than its share."""
        return self.sums["low"]

    @property
    def hit(self) -> Float[Tensor, "B Hk S"]:
        """Return the newest counted row, numbered from 1, in which each key was among the highest; 0 for none."""
        return self.sums["hit"]


@runtime_checkable
class Stepper(Protocol):
    """Takes the steps of one layer: a `Layer`, a wrapper around one, or a stand-in without slots."""

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
        """Return the attention output for new tokens; see `kvkeep.Layer.step`."""


# Bytes, counted on real tensors.


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the tensors' sizes in bytes. Views that share memory count each."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class MemoryUsage:
    """What a cache holds, in bytes; reports of layers add up.

    Attributes:
        allocated_bytes: everything: keys, values, positions, policy state, counters.
        occupied_bytes: the part of keys, values, positions and state that belongs to slots with a token.
        state_bytes: the policy's state and the counters, a part of ``allocated_bytes``.
        full_bytes: keys and values of every token seen, which a full cache would hold (padding not counted), and the
            states of layers without slots.
    """

    allocated_bytes: int = 0
    occupied_bytes: int = 0
    state_bytes: int = 0
    full_bytes: int = 0

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def compression(self) -> float:
        """Return the full bytes per allocated byte, e.g. 4.0 for a quarter of the memory; 1.0 if none is."""
        return self.full_bytes / self.allocated_bytes if self.allocated_bytes else 1.0

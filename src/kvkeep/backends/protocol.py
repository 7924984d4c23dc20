"""What a backend does: the work of a layer's step on slots.

The rules that every backend follows are defined in one place each: empty slots in `kvkeep.types.EMPTY`, protection in
`kvkeep.scores.protect`, expiry in `kvkeep.scores.expire`, the order of eviction in `kvkeep.scores`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends import again
from kvkeep.rotary.ranks import Rotation
from kvkeep.statistic import Statistic
from kvkeep.types import AttentionOptions, Budget, Report, Slots


@dataclass(frozen=True, eq=False)
class Limits:
    """How many slots may stay occupied after a step, and which ones are protected.

    Attributes:
        seen: tokens of each row seen so far, the new one included.
        sinks: number of first positions that are protected.
        recent: number of newest positions that are protected.
        stay: slots that may stay occupied.
        window: sliding window of the layer; expired slots are emptied first.
    """

    seen: Int[Tensor, " B"]
    sinks: int = 0
    recent: Budget = 0
    stay: Budget = 2**31 - 1
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Ring:
    """How a decode step updates the state of a policy that marks the rows in which a token received little.

    All heads of a row hold equally many tokens. In the ring (see `kvkeep.statistic.ring`) the row's bit is set for a
    token that is low in this row, and cleared for the others. A burst brings a head that holds ``n`` tokens, more than
    the budget, down to ``max(n - k·drop, least)`` with the smallest ``k`` that is enough. So ``due`` of the last rows
    belong to the window of the next burst. Where ``m`` is the mass of this row and ``t`` the second sum, the first sum
    becomes ``m + t·[window > 1]`` and the second ``m·[due > 0] + t·[due > 1]``. A padded token has no bit and no mass,
    and is compared with 0 instead of 1.

    Attributes:
        words: the states that hold the bits.
        mass: receives ``m``, so that the caller can tell how much attention the tokens of a burst carried.
        window: number of rows in a window.
        least: number of tokens that a burst leaves at least.
        drop: a burst drops a multiple of this number.
        budget: slots that may stay occupied.
    """

    words: tuple[Float[Tensor, "B Hk S"], ...]
    mass: Float[Tensor, "B Hk S"]
    window: Budget
    least: Budget
    drop: Budget
    budget: Budget


@dataclass(frozen=True, eq=False)
class Added:
    """How a decode step updates the state of a policy whose state is a sum: ``state = decay·state + mass``.

    The state of the new token starts at 0. A row whose token is padding changes nothing.

    Attributes:
        states: the policy's sums, at most two; all receive the same mass.
        is_score: whether the first sum is the score; otherwise the position is.
        ring: bits beside two sums. The two sums are then updated as `Ring` says, and the step evicts nothing.
        lost: the victim's mass, and the mass of all slots that hold a token until then, are added here, where there are
            sums; ``None``: nowhere. With a ring there is no victim.
    """

    states: tuple[Float[Tensor, "B Hk S"], ...]
    is_score: bool
    ring: Ring | None = None
    lost: Float[Tensor, "B Hk 2"] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the step changes."""
        ring = () if self.ring is None else (*self.ring.words, self.ring.mass)
        return (*self.states, *ring) if self.lost is None else (*self.states, *ring, self.lost)


class Backend(abc.ABC):
    """Attends over slots, and fills and empties them in place. Stateless: one object serves every layer.

    Attributes:
        name: the name for ``KVKEEP_BACKEND``.
        fuses: whether `step` ever does anything.
        tallies: whether `step` knows `Added.ring`.
        pools: whether it reads and writes slots in a pool (`kvkeep.ranges.PoolSlots`) where they lie.
        small: whether the functions of `kvkeep.backends.native.small_ops` run beside it.
    """

    name: ClassVar[str]
    fuses: ClassVar[bool] = False
    tallies: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    small: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
    ) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend over occupied slots and reduce the policy's statistic in the same pass.

        Args:
            query: new queries.
            slots: keys, values and positions, unordered. With ``T == 1`` the query's own key is among the slots. With
                ``T > 1`` the last ``T`` slots must be the queries' own, in their order, and keys and values of empty
                slots must be finite. Positions may be those of one head if all heads agree.
            now: true positions of the queries. Rows of padding (position -1) get an undefined, finite output.
            statistic: what to report.
            options: scaling, window, soft cap and sinks of the model.

        Returns:
            The output in the query's dtype, and the report, its fields of shape ``(B, Hk, S)`` in float32.
        """

    def reread(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        length: Int[Tensor, "B #Hk"],
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hk S"]:
        """The largest share of attention that each key would receive if the prompt were read again after itself.

        A query of the second reading attends to all occupied slots and to what it attended to in the first one. The
        first token's queries and those of padding do not count; sliding windows end in the first reading.

        Args:
            query: the prompt's queries, as they were in the first reading.
            slots: keys, values and positions, as in `attend`.
            now: true positions of the queries.
            length: how many positions later the second reading comes.
            rotation: turns the queries ahead; ``None`` if the model does not rotate them.
            options: scaling, window, soft cap and sinks of the model.

        Returns:
            Probabilities in float32; 0 for empty slots.
        """
        return again.reread(query, slots, now, length=length, rotation=rotation, options=options)

    @abc.abstractmethod
    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Put one token per row into an empty slot of each head, in place, and return the slot.

        The backend may take any empty slot. A padded token (position -1) leaves its slot empty. Slots may have any
        strides, and another dtype than the token, which is then rounded.
        """

    @abc.abstractmethod
    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty expired slots, in place; see `kvkeep.scores.expire`."""

    @abc.abstractmethod
    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Whether some head may hold more than its limit; always true where the host would wait for the answer."""

    @abc.abstractmethod
    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: Limits) -> None:
        """Empty, in place, one slot of every head that holds more than its limit; ``limits.window`` is not used.

        The victim is that of `kvkeep.scores.weakest` after `kvkeep.scores.protect`.
        """

    def step(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        slots: Slots,
        new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
        now: Int[Tensor, "B 1"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
        added: Added,
        limits: Limits,
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Append, attend, add the report to the policy's sums, expire and evict, fused and in place.

        With `Added.ring` no slot is emptied. Returns ``None``, and does nothing, if the backend cannot do it.
        """
        return None

    def at_ranks(self, rotation: Rotation) -> Backend:
        """This backend for slot positions: attention rotates each key to its rank among the tokens of its head.

        Args:
            rotation: the model's rotary embedding.

        Returns:
            A backend whose `attend` and `append` take queries and keys unrotated. Its `step` takes them as the model
            rotated them.
        """
        return AtRanks(self, rotation)


class AtRanks(Backend):
    """Attention under slot positions by any backend: all keys are rotated before it starts.

    Args:
        backend: does the work.
        rotation: the model's rotary embedding.
    """

    name = "at_ranks"

    def __init__(self, backend: Backend, rotation: Rotation):
        self.backend, self.rotation = backend, rotation

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
    ) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """See `Backend.attend`; query and keys are unrotated."""
        query, keys = self.rotation.at_ranks(query, slots.keys, slots.positions, now)
        return self.backend.attend(query, slots._replace(keys=keys), now, statistic=statistic, options=options)

    def reread(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        length: Int[Tensor, "B #Hk"],
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hk S"]:
        """See `Backend.reread`; each head reads the tokens that it holds after themselves."""
        query, keys = self.rotation.at_ranks(query, slots.keys, slots.positions, now)
        held, there = (slots.positions >= 0).sum(dim=-1), slots._replace(keys=keys)
        return self.backend.reread(query, there, now, length=held, rotation=self.rotation, options=options)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """See `Backend.append`; keys are unrotated."""
        return self.backend.append(slots, keys, values, now)

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """See `Backend.expire`."""
        self.backend.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """See `Backend.is_over`."""
        return self.backend.is_over(positions, limit)

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: Limits) -> None:
        """See `Backend.evict`."""
        self.backend.evict(positions, score, limits)

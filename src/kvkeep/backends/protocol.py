"""What a backend does: the work of a layer's step on slots.

The rules that every backend follows are defined in one place each: empty slots in `kvkeep.types.EMPTY`, protection in
`kvkeep.kv.ranking.protect`, expiry in `kvkeep.kv.ranking.expire`, the order of eviction in `kvkeep.kv.ranking`.
"""

from __future__ import annotations

import abc
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import Statistic
from kvkeep.backends import again
from kvkeep.backends.added import Added, Limits
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Budget, Report, Slots


@runtime_checkable
class Repeat(Protocol):
    """A decode step whose slots, state and limits are known: it is told the tokens."""

    def takes(
        self, query: Float[Tensor, "B Hq 1 D"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> bool:
        """Whether these have the shapes, dtypes and device of the tokens before."""

    def __call__(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        now: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """`Backend.step` with tokens that it `takes`."""


class Backend(abc.ABC):
    """Attends over slots, and fills and empties them in place. Stateless: one object serves every layer.

    Attributes:
        name: the name for ``KVKEEP_BACKEND``.
        fuses: whether `step` ever does anything.
        tallies: whether `step` knows `Added.ring`.
        pools: whether it reads and writes slots in a pool (`kvkeep.kv.pooled_store.PoolSlots`) where they lie.
        codes: whether it reads and writes slots that hold codes (`kvkeep.kv.slot_codec.CodedSlots`) where they lie.
        small: whether the functions of `kvkeep.backends.native.small_ops` run beside it.
    """

    name: ClassVar[str]
    fuses: ClassVar[bool] = False
    tallies: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    codes: ClassVar[bool] = False
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

    def attend_twice(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
        length: Int[Tensor, "B #Hk"],
        rotation: Rotation | None,
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """The results of `attend` and of `reread`. A kernel that does both knows what each query saw the first time."""
        out, report = self.attend(query, slots, now, statistic=statistic, options=options)
        return out, report, self.reread(query, slots, now, length=length, rotation=rotation, options=options)

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
        """Empty expired slots, in place; see `kvkeep.kv.ranking.expire`."""

    @abc.abstractmethod
    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Whether some head may hold more than its limit; always true where the host would wait for the answer."""

    @abc.abstractmethod
    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: Limits) -> None:
        """Empty, in place, one slot of every head that holds more than its limit; ``limits.window`` is not used.

        The victim is that of `kvkeep.kv.ranking.weakest` after `kvkeep.kv.ranking.protect`.
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

    def repeat(
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
    ) -> Repeat | None:
        """The same `step` for other tokens, as long as all else stays where and what it is; ``None``: there is none."""
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

    def attend_twice(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
        length: Int[Tensor, "B #Hk"],
        rotation: Rotation | None,
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """See `Backend.attend_twice` and `reread`."""
        query, keys = self.rotation.at_ranks(query, slots.keys, slots.positions, now)
        held, there = (slots.positions >= 0).sum(dim=-1), slots._replace(keys=keys)
        return self.backend.attend_twice(
            query, there, now, statistic=statistic, options=options, length=held, rotation=self.rotation
        )

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

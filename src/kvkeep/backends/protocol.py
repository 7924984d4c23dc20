"""What a backend does: the work of a layer's step on slots.

Three rules hold for every backend and stand in one place each: an empty slot has the position `types.EMPTY`, and what
it was left with does not matter; `scores.protect` says what never goes; `scores.weakest` says what goes first.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.statistic import Statistic
from kvkeep.types import AttentionOptions, Budget, Report, Slots


@dataclass(frozen=True, eq=False)
class Limits:
    """What may stay after a step.

    Attributes:
        seen: tokens of each row seen, the new one included.
        sinks: first positions that are protected.
        recent: newest ones that are.
        stay: slots that may stay occupied.
        window: sliding window; what no later query can see goes first.
    """

    seen: Int[Tensor, " B"]
    sinks: int = 0
    recent: Budget = 0
    stay: Budget = 2**31 - 1
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Added:
    """What a decode step does to the policy's state, where that is a sum: ``state = decay·state + mass``.

    The state of the new token starts at 0. A row whose token is padding changes nothing.

    Attributes:
        states: the policy's sums, at most two, which all receive the same.
        is_score: whether the first sum is the score; otherwise the position is.
    """

    states: tuple[Float[Tensor, "B Hk S"], ...]
    is_score: bool


class Backend(abc.ABC):
    """Attends over slots, and fills and empties them in place. Stateless: one object serves every layer.

    Attributes:
        name: what ``KVKEEP_BACKEND`` calls it.
        fuses: whether `step` can be worth asking.
    """

    name: ClassVar[str]
    fuses: ClassVar[bool] = False

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
        """Attend over occupied slots and reduce the policy's statistic on the way.

        Args:
            query: new queries.
            slots: keys, values and positions, unordered; with ``T > 1`` the last ``T`` must be the queries' own in
                their order, and keys and values of empty slots must be finite; with ``T == 1`` the query's own key is
                among the slots. Positions may be those of one head when all heads agree.
            now: true positions of the queries, -1 for padding: such rows return an undefined, finite output.
            statistic: what to report.
            options: scaling, window, soft cap and sinks of the model.

        Returns:
            The output in the query's dtype, and the report, its fields of shape ``(B, Hk, S)`` in float32.
        """

    @abc.abstractmethod
    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Put one token per row into an empty slot of each head, in place, and say which slot it was.

        Which of several empty slots it is, is left open. A padded token (position -1) leaves its slot empty. The
        slots may have another dtype than the token, which is then rounded, and any strides.
        """

    @abc.abstractmethod
    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty, in place, the slots that no later query can see through a sliding window of ``window`` tokens."""

    @abc.abstractmethod
    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Whether some head may hold more than its limit; where asking means waiting, the answer is yes."""

    @abc.abstractmethod
    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: Limits) -> None:
        """Empty, in place, the weakest slot of every head that holds more than its limit; ``limits.window`` is unused.

        The order is that of `scores.weakest` after `scores.protect`.
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
        """Append, attend, add the report to the policy's sums and evict, in one go and in place.

        ``None``, and nothing is done, where the backend cannot.
        """
        return None

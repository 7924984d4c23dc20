"""What a fused decode step needs beside attention: the slots that stay, and the policy's state that it updates."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.types import Budget


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

    All heads of a row hold equally many tokens. In the ring (see `kvkeep.attention_stats.ring`) the row's bit is set
    for a token that is low in this row, and cleared for the others. A burst brings a head that holds ``n`` tokens,
    more than the budget, down to ``max(n - k·drop, least)`` with the smallest ``k`` that is enough. So ``due`` of the
    last rows belong to the window of the next burst. Where ``m`` is the mass of this row and ``t`` the second sum, the
    first sum becomes ``m + t·[window > 1]`` and the second ``m·[due > 0] + t·[due > 1]``. A padded token has no bit
    and no mass, and is compared with 0 instead of 1.

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

"""Sparsity that persists (H2O, App. D.16): a core of keys that every row supports, and little outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.errors import InputError
from kvkeep.research.theory.loops import Vector
from kvkeep.research.theory.submodular import Set


def support(row: Vector, tau: float) -> Set:
    """``supp_τ``: the entries that are larger than τ."""
    return frozenset(j for j, p in enumerate(row) if p > tau)


@dataclass(frozen=True)
class Good:
    """The smallest α with which some rows are (α, τ, k)-good in the sense of Definition D.33.

    The definition wants α below 1, and a core that is not empty.
    """

    core: Set
    """``S_0``."""
    alpha: float
    union: Set
    """What the supports of all rows have outside of the core, together."""
    rows: int

    @property
    def allowed(self) -> float:
        """``α k n``, the size that Claim D.34 allows for the union."""
        return self.alpha * len(self.core) * self.rows if self.core else 0.0


def goodness(rows: Sequence[Vector], tau: float, core: Set | None = None) -> Good:
    """Measure Definition D.33 on rows of one length.

    Args:
        rows: non-negative vectors.
        tau: the threshold.
        core: ``S_0``; the largest possible one, the intersection of all supports, if not given.
    """
    supports = [support(row, tau) for row in rows]
    common = frozenset.intersection(*supports)
    core = common if core is None else core
    if not core <= common:
        raise InputError(f"the core {sorted(core)} is not in every support; in all of them are {sorted(common)}")
    outside = [found - core for found in supports]
    most = max(len(found) for found in outside)
    alpha = most / len(core) if core else float("inf") if most else 0.0
    return Good(core, alpha, frozenset().union(*outside), len(rows))

"""The measurements, in the order in which the page shows them."""

from __future__ import annotations

from kvkeep.analysis.groups.cooccurrence import Cooccurrence
from kvkeep.analysis.groups.heavy import HeavyHitters
from kvkeep.analysis.groups.sparsity import Sparsity
from kvkeep.analysis.measure import Measurement

MEASUREMENTS: tuple[type[Measurement], ...] = (
    Sparsity,
    HeavyHitters,
    Cooccurrence,
)

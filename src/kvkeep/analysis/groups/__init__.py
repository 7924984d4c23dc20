"""The measurements, in the order in which the page shows them."""

from __future__ import annotations

from kvkeep.analysis.groups.cooccurrence import Cooccurrence
from kvkeep.analysis.groups.entropy import Entropy
from kvkeep.analysis.groups.heavy import HeavyHitters
from kvkeep.analysis.groups.persistence import Persistence
from kvkeep.analysis.groups.recall_depth import RecallDepth
from kvkeep.analysis.groups.repetition import RepetitivePatterns
from kvkeep.analysis.groups.residual import Residual
from kvkeep.analysis.groups.retained import Retained
from kvkeep.analysis.groups.score_change import ScoreChange
from kvkeep.analysis.groups.sparsity import Sparsity
from kvkeep.analysis.groups.value_prior import ValuePrior
from kvkeep.analysis.measure import Measurement

MEASUREMENTS: tuple[type[Measurement], ...] = (
    Sparsity,
    HeavyHitters,
    Cooccurrence,
    RepetitivePatterns,
    Persistence,
    ScoreChange,
    Residual,
    Retained,
    ValuePrior,
    Entropy,
    RecallDepth,
)

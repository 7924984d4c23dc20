"""The measurements, in the order in which the page shows them."""

from __future__ import annotations

from kvkeep.analysis.groups.budgets import Budgets
from kvkeep.analysis.groups.cooccurrence import Cooccurrence
from kvkeep.analysis.groups.diversity import Diversity
from kvkeep.analysis.groups.entropy import Entropy
from kvkeep.analysis.groups.heavy import HeavyHitters
from kvkeep.analysis.groups.local_global import LocalGlobal
from kvkeep.analysis.groups.mlp_units import MlpUnits
from kvkeep.analysis.groups.persistence import Persistence
from kvkeep.analysis.groups.position_bias import PositionBias
from kvkeep.analysis.groups.recall_depth import RecallDepth
from kvkeep.analysis.groups.removal import Removal
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
    Removal,
    LocalGlobal,
    Diversity,
    PositionBias,
    MlpUnits,
    RepetitivePatterns,
    Persistence,
    ScoreChange,
    Residual,
    Retained,
    ValuePrior,
    Entropy,
    RecallDepth,
    Budgets,
)

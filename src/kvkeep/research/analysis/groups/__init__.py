"""The measurements, in the order of the page."""

from __future__ import annotations

from kvkeep.research.analysis.groups.budgets import Budgets
from kvkeep.research.analysis.groups.cooccurrence import Cooccurrence
from kvkeep.research.analysis.groups.diversity import Diversity
from kvkeep.research.analysis.groups.entropy import Entropy
from kvkeep.research.analysis.groups.heavy import HeavyHitters
from kvkeep.research.analysis.groups.local_global import LocalGlobal
from kvkeep.research.analysis.groups.mlp_units import MlpUnits
from kvkeep.research.analysis.groups.persistence import Persistence
from kvkeep.research.analysis.groups.position_bias import PositionBias
from kvkeep.research.analysis.groups.recall_depth import RecallDepth
from kvkeep.research.analysis.groups.removal import Removal
from kvkeep.research.analysis.groups.repetition import RepetitivePatterns
from kvkeep.research.analysis.groups.residual import Residual
from kvkeep.research.analysis.groups.retained import Retained
from kvkeep.research.analysis.groups.score_change import ScoreChange
from kvkeep.research.analysis.groups.sparsity import Sparsity
from kvkeep.research.analysis.groups.value_prior import ValuePrior
from kvkeep.research.analysis.measure import Measurement

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

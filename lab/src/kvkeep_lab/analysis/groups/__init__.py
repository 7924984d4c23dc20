"""The measurements, in the order of the page."""

from __future__ import annotations

from kvkeep_lab.analysis.groups.budgets import Budgets
from kvkeep_lab.analysis.groups.cooccurrence import Cooccurrence
from kvkeep_lab.analysis.groups.diversity import WrittenDiversity
from kvkeep_lab.analysis.groups.entropy import Entropy
from kvkeep_lab.analysis.groups.heavy import MassByRank
from kvkeep_lab.analysis.groups.local_global import LocalGlobal
from kvkeep_lab.analysis.groups.mlp_units import MlpUnits
from kvkeep_lab.analysis.groups.persistence import Persistence
from kvkeep_lab.analysis.groups.position_bias import PositionBias
from kvkeep_lab.analysis.groups.recall_depth import RecallDepth
from kvkeep_lab.analysis.groups.removal import Removal
from kvkeep_lab.analysis.groups.repetition import RepetitivePatterns
from kvkeep_lab.analysis.groups.residual import Residual
from kvkeep_lab.analysis.groups.retained import Retained
from kvkeep_lab.analysis.groups.score_change import ScoreChange
from kvkeep_lab.analysis.groups.sparsity import Sparsity
from kvkeep_lab.analysis.groups.value_prior import ValuePrior
from kvkeep_lab.analysis.measure import Measurement

MEASUREMENTS: tuple[type[Measurement], ...] = (
    Sparsity,
    MassByRank,
    Cooccurrence,
    Removal,
    LocalGlobal,
    WrittenDiversity,
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

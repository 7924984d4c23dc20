"""The claims of H2O that are checked here, about in the order of its appendix."""

from __future__ import annotations

from kvkeep.research.theory import (
    claims_h2o_dynamic,
    claims_h2o_eviction,
    claims_h2o_newton,
    claims_h2o_regression,
    claims_h2o_sets,
)
from kvkeep.research.theory.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *claims_h2o_eviction.CLAIMS,
    *claims_h2o_sets.CLAIMS,
    *claims_h2o_dynamic.CLAIMS,
    *claims_h2o_regression.CLAIMS,
    *claims_h2o_newton.CLAIMS,
)

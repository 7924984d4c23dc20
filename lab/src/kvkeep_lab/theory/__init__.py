"""The papers' algorithms and theorems, as code that runs and as claims that are checked. No model is involved."""

from __future__ import annotations

from kvkeep_lab.theory import (
    claims_ahakv,
    claims_h2o,
    claims_h2o_dynamic,
    claims_h2o_regression,
    claims_scissorhands,
)
from kvkeep_lab.theory.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *claims_h2o.CLAIMS,
    *claims_h2o_dynamic.CLAIMS,
    *claims_h2o_regression.CLAIMS,
    *claims_scissorhands.CLAIMS,
    *claims_ahakv.CLAIMS,
)
"""All claims that are checked, paper by paper; their names are unique."""

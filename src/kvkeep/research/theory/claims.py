"""All claims of the three papers that are checked here."""

from __future__ import annotations

from kvkeep.research.theory import claims_ahakv, claims_h2o, claims_scissorhands
from kvkeep.research.theory.claim import Claim

CLAIMS: tuple[Claim, ...] = (*claims_h2o.CLAIMS, *claims_scissorhands.CLAIMS, *claims_ahakv.CLAIMS)
"""Paper by paper; names are unique."""

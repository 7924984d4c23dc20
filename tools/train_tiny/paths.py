"""Where the package keeps its model, and the repository the log of its training."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "kvkeep" / "models" / "tiny"
LOG = Path(__file__).parent / "log.csv"

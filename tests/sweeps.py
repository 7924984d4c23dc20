"""Long lists of cases: `make test` runs some of each, `make test-all` the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Returns the parameters of a test; those that are not chosen are marked as slow."""
    return [case if chosen(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

"""Long lists of cases: `make test` runs some of each, `make test-all` the rest; ``pytest FILE -m ""`` runs all.

``make test-all SHARE=6`` runs a sixth of the rest, for machines that have not the time; always the same sixth, of which
SHARE=12 is a half.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import pytest

MANY = 4
"""A test with so many cases is a long list."""

ONE_IN = 10
"""Of a long list `make test` runs about so many."""


def thin(items: Iterable[pytest.Item], share: int = 1) -> list[pytest.Item]:
    """Marks most cases of long lists as slow. The first case and those that a hash of their names chooses stay.

    Of those that are slow then, and of long lists that were slow before, one in ``share`` is to run; the others are
    returned.
    """
    lists, spare = defaultdict(list), []
    for item in items:
        lists[item.nodeid.partition("[")[0], item.get_closest_marker("slow") is None].append(item)
    for (_, fast), cases in lists.items():
        for case in cases[1:] if len(cases) >= MANY else ():
            number, chosen = divmod(crc32(case.nodeid.encode()), ONE_IN)
            if chosen and fast:
                case.add_marker(pytest.mark.slow)
            if number % share and (chosen or not fast):
                spare.append(case)
    return spare


def sweep(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Returns the parameters of a test; those that are not chosen are marked as slow."""
    return [case if chosen(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

"""Long lists of cases: `make test` runs some of each, `make test-all` the rest; ``pytest FILE -m ""`` runs all.

A list whose cases take milliseconds, and each another way through the code, is marked `whole`: `make test` runs it all.

Tests that take about half a second or more are marked `long`: `make test-long` runs them, and CI both.

Tests on pretrained models (`real`) are divided into shares in the same way.

``make test-all SHARE=3/14`` runs the third of fourteen shares of the slow tests, for machines that have not the time
for all. The name of a test alone decides in which share it is, so it is the same one on every machine, and in a run of
a single file; the fourteen shares together are all slow tests.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest

SHARED = ("slow", "real")
"""Marks of tests that are divided into shares."""

MANY = 3
"""A test with so many cases is a long list."""

WHOLE = "whole"
"""Mark of long lists that stay as they are."""

ONE_IN = 20
"""Of a long list `make test` runs about so many."""


@dataclass(frozen=True)
class Share:
    """One of several shares of the slow tests.

    Attributes:
        number: of the share, from 1.
        of: shares that there are.
    """

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Return the share of a text such as ``3/14``.

        Raises:
            ValueError: it names none.
        """
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text} is no share; give one such as 3/14")
        return cls(int(found[1]), int(found[2]))

    def has(self, name: str) -> bool:
        """Return whether a test of this name belongs to the share."""
        return _hash(name) // ONE_IN % self.of == self.number - 1

    def others(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """Return the tests, of those that are divided, that belong to other shares."""
        return [item for item in items if any(map(item.get_closest_marker, SHARED)) and not self.has(item.nodeid)]


def add_option(parser: pytest.Parser) -> None:
    """Add the option that names a share."""
    parser.addoption(
        "--share", type=Share.parse, default=Share(), help="run a share of the slow or real tests, such as 3/14"
    )


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of long lists as slow, and drop the slow tests of other shares than the one that is asked for."""
    thin(items)
    share: Share = config.getoption("--share")
    if spare := share.others(items):
        config.hook.pytest_deselected(items=spare)
        dropped = {id(item) for item in spare}
        items[:] = [item for item in items if id(item) not in dropped]


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark most cases of long lists as slow, but for `WHOLE` ones. The first case and those that a hash of their names
    chooses stay.
    """
    lists = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, (*SHARED, WHOLE))):
            lists[item.nodeid.partition("[")[0]].append(item)
    for cases in lists.values():
        for case in cases[1:] if len(cases) >= MANY else ():
            if _hash(case.nodeid) % ONE_IN:
                case.add_marker(pytest.mark.slow)


def is_one_in(name: str, number: int) -> bool:
    """Return whether a test is among those, about one in ``number``, that a hash of their names chooses."""
    return _hash(name) // ONE_IN % number == 0


def _hash(name: str) -> int:
    return crc32(name.encode())


def sweep(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Returns the parameters of a test; those that are not chosen are marked as slow."""
    return [case if chosen(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

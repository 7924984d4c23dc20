"""A browser for the tests of the chat page."""

import pytest

from .browsing import launched


@pytest.fixture(scope="module")
def chromium():
    with launched() as browser:
        yield browser

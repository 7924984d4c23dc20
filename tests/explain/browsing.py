"""Chromium for the tests of the page: what a page is opened with, and questions to it."""

import importlib.util
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WITHOUT = (
    "playwright is not installed"
    if importlib.util.find_spec("playwright") is None
    else "no Chromium here; Debian has the package chromium"
    if CHROMIUM is None
    else ""
)
"""Why there is no browser."""
needs_browser = [
    pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "there is one"),
    pytest.mark.filterwarnings("ignore"),  # of playwright
]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WAIT_MS = 10_000


def until(page, truth):
    """Wait for something to be true; the page forbids the strings that playwright itself would evaluate."""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(50)
    raise AssertionError(truth)


def settled(page):
    """Wait until what was asked for is drawn: a move is drawn in the next frame."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")


def moment(page):
    return page.evaluate("kvkeep.page.state.moment")

"""The live page in a browser, for tests."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@contextmanager
def browser(server, width=1280, scheme="light"):
    """A page in Chromium, which may ask no other address and must not fail."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        wrong, asked = [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        yield page
        assert not wrong
        assert not [url for url in asked if not url.startswith((server.url, "data:"))]
        chromium.close()


def ask(page, text):
    """Send a message, and wait for the end of its answer; the page does one thing at a time."""
    page.wait_for_selector("#send:enabled")
    page.fill("#text", text)
    page.press("#text", "Enter")
    limit = time.monotonic() + 60
    while page.input_value("#text"):
        assert not page.locator("#said.wrong").count(), page.inner_text("#said")
        assert time.monotonic() < limit, "the message was not sent"
        page.wait_for_timeout(5)
    page.wait_for_selector("#send:enabled")

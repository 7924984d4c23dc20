"""The chat page in a browser, for tests."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
WAIT_MS = 20_000
WATCH = "addEventListener('securitypolicyviolation', (e) => (window.broken ??= []).push(e.effectiveDirective))"


@contextmanager
def launched():
    """Chromium, or a skip that says what to install."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; Debian has the package chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@contextmanager
def opened(chromium, server, width=1280, height=800, scheme="light", **settings):
    """The page, which may ask no other address, must not fail, and holds to its Content-Security-Policy.

    Settings are those of new conversations.
    """
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    wrong, asked = [], []
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
    context.on("request", lambda request: asked.append(request.url))
    context.add_init_script(WATCH)
    chosen = {"max_tokens": "6", "temperature": "0", **settings}
    storing = f"localStorage['kvkeep:settings'] ??= {json.dumps(json.dumps(chosen))}"
    context.add_init_script(f"if (location.protocol === 'http:') {storing}")  # an empty page has no storage
    page = context.new_page()
    page.goto(server.url)
    yield page
    assert page.evaluate("window.broken") is None
    context.close()
    assert not wrong, wrong
    assert not [url for url in asked if not url.startswith((server.url, "data:"))]


def ready(page):
    """Wait until no answer is being written."""
    page.wait_for_selector("#text")
    page.wait_for_selector("#send:visible")


def ask(page, text):
    """Send a message, and wait for the end of its answer."""
    before = page.locator("article").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.locator("article").nth(before + 1).wait_for()
    ready(page)


def stream(*texts, end=True, **last):
    """The body of a streamed answer."""
    chunks = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, *([last] if last else [])]]
    return "".join(lines) + ("data: [DONE]\n\n" if end else "")


def answers(page, *texts, **options):
    """Let the page get these pieces of text as its next answers, whatever it asks."""
    page.unroute("**/v1/chat/completions")
    body = stream(*texts, **options)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


def fits(page):
    """Whether nothing makes the page scroll sideways."""
    return page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")

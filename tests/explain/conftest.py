"""A browser, the page of the record, and a page in the browser."""

import pytest

from explain.browsing import CHROMIUM, FLAGS, WAIT_MS
from explain.records import record


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(record().to_html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """Opens a page, and fails if it reports an error or asks for anything but itself."""
    noise, pages = [], []

    def open_(path=file, fragment="", **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}} | options)
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else noise.append(request.url))
        page.goto(f"file://{path}{fragment}")
        page.wait_for_selector("html[data-ready]")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert noise == []

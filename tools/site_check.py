"""Check the built site: every link, and its pages in a real browser at two widths.

python tools/site_check.py site [PICTURES]            (`make docs-check`; needs Chromium, e.g. Debian's package)
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Page, sync_playwright

WIDTHS = (390, 1280)
LOOKED_AT = (
    *("", "tutorials/first-run/", "reference/api/", "reference/command-line/", "reference/compared/"),
    *("policies/", "sessions/", "benchmarks/"),
)
"""Pages that are opened in the browser."""
ASKED = {"scissorhands": "policies", "kvkeep serve": "command-line", "BoundedCache": "api"}
"""Words typed into the search → a part of the address that has to be found."""
WAIT_MS = 30_000
COMMANDS = ".language-sh pre > code, .language-bash pre > code"
CUT_OFF = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText.slice(0, 60))"
CODE = ("code", "script", "style")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Links(HTMLParser):
    """The links and the anchors of a page, and its text outside of code."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.prose: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's ids and addresses."""
        self._code += tag in CODE
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.targets.append(value)

    def handle_endtag(self, tag: str) -> None:
        """Note where code ends."""
        self._code -= tag in CODE

    def handle_data(self, data: str) -> None:
        """Note text that is no code."""
        if not self._code:
            self.prose.append(data)


def dead_links(site: Path) -> list[str]:
    """Links of all pages that lead to no file or no anchor of the site, and Markdown that became no link."""
    pages = {path: Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    base = urlsplit(next(target for target in pages[site / "index.html"].targets if target.startswith("https://"))).path
    found = []
    for path, links in pages.items():
        found += [f"{path.relative_to(site)} shows Markdown: {text.strip()}" for text in links.prose if "](" in text]
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or not target:
                continue
            folder = site if parts.path.startswith("/") else path.parent
            inner = parts.path.removeprefix(base) if parts.path.startswith("/") else parts.path
            file = (folder / unquote(inner)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            wrong = not file.is_file() or (
                parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors
            )
            if wrong:
                found.append(f"{path.relative_to(site)} links to {target}, which is not there")
    return found


def opened(page: Page, address: str, noise: list[str]) -> list[str]:
    """What is wrong with a page in the browser: errors, requests to other hosts, and what is cut off at the right."""
    noise.clear()
    page.goto(address, wait_until="networkidle")
    width = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    wide = [f"{width} pixels wider than the window"] if width > 0 else []
    wide += [f"a command is cut off: {text}" for text in page.eval_on_selector_all(COMMANDS, CUT_OFF)]
    return [f"{address} at {page.viewport_size['width']}: {what}" for what in (*noise, *wide)]


def searched(page: Page, root: str, words: str, part: str) -> list[str]:
    """What is wrong with the search."""
    page.goto(root, wait_until="networkidle")
    if page.viewport_size["width"] < 1000:
        page.click("label[for=__search].md-header__button")
    page.locator("input[name=query]").press_sequentially(words, delay=20)
    try:
        page.wait_for_selector(".md-search-result__item", timeout=WAIT_MS, state="attached")
    except PlaywrightError as error:
        return [f"the search for {words!r} finds nothing: {error.message.splitlines()[0]}"]
    found = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    return [] if any(part in link for link in found) else [f"the search for {words!r} finds no {part}: {found[:3]}"]


def browsed(root: str, pictures: Path | None) -> list[str]:
    """What is wrong with the site in a browser at two widths."""
    program = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if program is None:
        return [f"There is no browser here: install one of {', '.join(CHROMIUM)}."]
    found: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            noise: list[str] = []
            listen(page, root, noise)
            for name in LOOKED_AT:
                found += opened(page, root + name, noise)
                if pictures is not None:
                    page.screenshot(path=pictures / f"{name.strip('/').replace('/', '-') or 'home'}-{width}.png")
            for words, part in ASKED.items():
                found += searched(page, root, words, part)
            if pictures is not None:
                page.screenshot(path=pictures / f"search-{width}.png")
            page.close()
        browser.close()
    return found


def listen(page: Page, root: str, noise: list[str]) -> None:
    """Note errors of the console, and requests that fail or leave the site."""

    def ask(request: Any) -> None:
        if not request.url.startswith((root, "data:", "blob:")):
            noise.append(f"asks for {request.url}")

    page.on("console", lambda message: noise.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", ask)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def main(site: Path, pictures: Path | None) -> int:
    """Check the site, and print what is wrong."""
    if not (site / "index.html").is_file():
        print(f"{site} holds no site. Build it first: make docs.")
        return 2
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    found = [*dead_links(site), *browsed(f"http://127.0.0.1:{server.server_port}/", pictures)]
    server.shutdown()
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages: no dead link, no error, the search works")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path((sys.argv[1:] or ["site"])[0]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None))

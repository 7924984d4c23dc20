"""Draw the picture of docs/explain.md and README: a page of kvkeep explain in Chromium.

PYTHONPATH=src python tools/explain_picture.py [docs/explain.png]         (needs Chromium and the package playwright)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import kvkeep
from kvkeep.models.tiny.recall import question

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
SIZE = {"width": 1060, "height": 520}
WAIT_MS = 30_000


def picture(target: Path) -> None:
    """Write the picture."""
    asked = question(1, kind="colour", depth=0.3, n_facts=8, tokens=500)
    found = kvkeep.explain(None, asked.prompt, policies=["h2o", "snapkv", "local"], budget=0.2, prefill_chunk=128)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = Path(folder) / "page.html"
        page_file.write_text(found.to_html(), encoding="utf-8")
        path = next(filter(None, map(shutil.which, CHROMIUM)))
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"file://{page_file}")
        page.wait_for_selector("html[data-ready]", timeout=WAIT_MS)
        page.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/explain.png"))

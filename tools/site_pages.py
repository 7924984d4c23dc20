"""Hooks of mkdocs: pages of the site that stand elsewhere in the repository, and links that lead out of ``docs/``.

The README is the home page. Notebooks become pages with the outputs that they are stored with.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "README.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""File of the repository → page of the site."""
NOTEBOOKS = ROOT / "examples" / "notebooks"
HOUSE = "house/index.html"
"""Where docs/index.md lies, since the README is the home page."""

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_BADGE = re.compile(r"^\[!\[[^]]*\]\(https://.*\n", flags=re.MULTILINE)
"""A line with a badge, which the site leaves out: its picture would be fetched from elsewhere."""
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand elsewhere."""
    house = files.get_file_from_path("index.md")
    assert house is not None
    house.dest_uri = HOUSE
    for source, page in ELSEWHERE.items():
        text = _BADGE.sub("", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=relink(text, ROOT, page, config["extra"]["repository"])))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        page = f"tutorials/{notebook.stem.replace('_', '-')}.md"
        shown = relink(from_notebook(json.loads(notebook.read_text())), NOTEBOOKS, page, config["extra"]["repository"])
        files.append(File.generated(config, page, content=shown))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files outside of ``docs/`` to their page, or to the repository."""
    if page.file.generated_by is not None:
        return markdown
    return relink(
        markdown, (ROOT / "docs" / page.file.src_uri).parent, page.file.src_uri, config["extra"]["repository"]
    )


def relink(text: str, folder: Path, page: str, repository: str) -> str:
    """Return the text of a file in ``folder`` with links that work on ``page`` of the site. Code stays as it is."""

    def lead(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if ":" in target:
            return match[0]
        file = Path(os.path.normpath(folder / target))
        return f"{opening}{_address(file, page, repository)}{anchor or ''}{closing}"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(lead, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(lead, text[end:])])


def _address(file: Path, page: str, repository: str) -> str:
    """The link from a page to a file of the repository."""
    name = file.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        inside = ELSEWHERE[name]
    elif name.startswith("docs/"):
        inside = name.removeprefix("docs/")
    elif file.parent == NOTEBOOKS and file.suffix == ".ipynb":
        inside = f"tutorials/{file.stem.replace('_', '-')}.md"
    else:
        return f"{repository}/{'tree' if file.is_dir() else 'blob'}/main/{name}"
    return os.path.relpath(inside, Path(page).parent).replace(os.sep, "/")


def from_notebook(notebook: dict[str, Any]) -> str:
    """The cells of a notebook as a page: text as it is, code and its stored output in fences."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown = "".join("".join(output["text"]) for output in cell.get("outputs", []))
        if shown:
            parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"

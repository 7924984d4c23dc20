"""Run the notebooks of examples/notebooks and store their outputs.

python tools/notebooks.py            (by hand, after a notebook or its answer has changed; a test runs the cells)
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def code_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[str]:
    """Run all cells in one namespace, in the current folder, and return what each of them printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_of(notebook):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
        printed.append(said.getvalue())
    return printed


def store(notebook: dict[str, Any], printed: list[str]) -> None:
    """Put what was printed beside the cells."""
    for number, (cell, text) in enumerate(zip(code_of(notebook), printed, strict=True), start=1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def main() -> None:
    """Run every notebook in an empty folder, and write it again."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            store(notebook, run(notebook))
            os.chdir(FOLDER)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()

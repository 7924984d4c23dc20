"""Two texts from folders of texts: one to choose rules and options by, one only for tables.

    python bench/split_texts.py novels essays --output DIR      # DIR/dev.txt and DIR/test.txt
    kvkeep eval MODEL --tasks recall --documents text-test --text DIR/test.txt --context 1000 --facts 8 --ask later

A file belongs to one half for ever: the first byte of the SHA-256 of its name decides, odd or even. Of each file
12 000 characters are taken, a quarter into it, behind titles and prefaces. Kinds of facts, values and wordings are
split as well, see ``kvkeep.models.tiny.documents``; persons have the same names in both halves.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

CHARACTERS = 12_000
"""Characters taken of each file."""


def half(name: str) -> str:
    """Return the half to which a file of this name belongs, ``dev`` or ``test``."""
    return "dev" if hashlib.sha256(name.encode()).digest()[0] % 2 else "test"


def halves(folders: Iterable[Path]) -> dict[str, str]:
    """Return the text of each half, from the text files of some folders."""
    parts: dict[str, list[str]] = {"dev": [], "test": []}
    for path in sorted(path for folder in folders for path in folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[half(path.name)].append(text[len(text) // 4 :][:CHARACTERS])
    return {name: "\n\n".join(texts) for name, texts in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    for folder in asked.folders:
        if not any(folder.glob("*.txt")):
            parser.error(f"{folder} has no texts; give folders with files whose names end in .txt")
    asked.output.mkdir(parents=True, exist_ok=True)
    for name, text in halves(asked.folders).items():
        (asked.output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{asked.output / name}.txt: {len(text)} characters")


if __name__ == "__main__":
    main()

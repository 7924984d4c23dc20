"""Print the length of the sentences of every page: the median, the longest twentieth, and sentences of over 35 words.

python tools/sentences.py            a line for each page
python tools/sentences.py --long     the long sentences as well
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = 35


def pages() -> list[Path]:
    """The pages that people read; the changelog is a list, not prose."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab" / "log").glob("*.md")]
    return sorted(path for path in found if path.name != "CHANGELOG.md")


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables and headings. A name in backticks is a word."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r"\s*(\||#|!!!|:::|\[!\[)", line)]
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", " x ", "\n".join(lines))
    found = re.split(r"[.!?:;]\**\s|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", words)
    return [one.strip() for one in found if len(one.split()) > 1]


def lengths(text: str) -> list[int]:
    """The words of each sentence, sorted."""
    return sorted(len(one.split()) for one in sentences(text))


def main(show: bool) -> None:
    """Print the table."""
    for page in pages():
        text = page.read_text()
        if counts := lengths(text):
            long = [" ".join(one.split()) for one in sentences(text) if len(one.split()) > LONG]
            name = page.relative_to(ROOT)
            print(f"{name!s:44} median {counts[len(counts) // 2]:3}  longest {counts[-1]:3}  over {LONG}: {len(long)}")
            for one in long if show else ():
                print(f"    {one}")


if __name__ == "__main__":
    main("--long" in sys.argv)

"""The script of the process that fills in chat templates, one JSON line after another; see `templates`.

Its memory is bounded, and it imports neither kvkeep nor torch.
"""

import json
import sys
from contextlib import suppress

from transformers.utils.chat_template_utils import render_jinja_template

_LONGEST_BYTES, _GROWTH = 2**20, 4
"""Limits of a text: this many characters, plus this many times the characters that were given."""


def _limit_memory(more_bytes: int) -> None:
    """Limit the memory that this process may still allocate, if the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def _answer(line: str) -> dict[str, str]:
    """The text of a template, or its error."""
    try:
        asked = json.loads(line)
        rendered = render_jinja_template([asked.pop("messages")], **asked)
        text = rendered[0][0]
        if len(text) > _LONGEST_BYTES + _GROWTH * len(line):
            raise ValueError(f"it makes {len(text)} characters of {len(line)}")
        return {"text": text}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _serve(more_bytes: int) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    _limit_memory(more_bytes)
    for line in sys.stdin:
        print(json.dumps(_answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

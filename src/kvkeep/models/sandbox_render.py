"""The script of the process that fills in chat templates, one JSON line after another; see `chat_templates`.

Its memory is bounded, and it does not import torch.
"""

import json
import sys

from transformers.utils.chat_template_utils import render_jinja_template

from kvkeep.models.sandbox_limits import serve

_LONGEST, _GROWTH = 2**20, 4
"""Limits of a text: this many characters, plus this many times the characters that were given."""


def _answer(line: str) -> dict[str, str]:
    """Render a chat template from a line of JSON. Return the ``text``, or an ``error``."""
    try:
        asked = json.loads(line)
        rendered = render_jinja_template([asked.pop("messages")], **asked)
        text = rendered[0][0]
        if len(text) > _LONGEST + _GROWTH * len(line):
            raise ValueError(f"it makes {len(text)} characters of {len(line)}")
        return {"text": text}
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    serve(_answer, int(sys.argv[1]))

"""What policies keep of a pretrained model's answers about 1 000 tokens, asked inside the prompt and later.

    python bench/split_texts.py FOLDER … --output TEXTS
    python bench/pretrained.py MODEL --text TEXTS/test.txt --output DIR          # the tables of docs/choose-a-policy.md
    python bench/pretrained.py MODEL --text TEXTS/test.txt --output DIR --all    # days: all that evict, 200 questions

Runs one `kvkeep eval`, on the half of facts and wordings that no rule was chosen by; the same command goes on where it
stopped, and prints what there is if it is interrupted. `--limit` is the number of questions in a cell; eight are about
one text. Policies that the model cannot run are left out, and named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import kvkeep
from kvkeep.cache.layer_layout import Layout
from kvkeep.errors import KVKeepError
from kvkeep.models.load import find
from kvkeep.policies import CONVERSATION, DEFAULT, FALLBACK, LATER
from kvkeep.policies.registry import available

MAIN = (
    *("full", DEFAULT, LATER, FALLBACK, "keydiff:document", "snapkv", "tova", "h2o", "ahakv", "scissorhands"),
    *("streaming_llm", "local"),
)
"""The rules of the tables in the docs, after the full cache."""

BUDGETS = {False: "10%,20%,50%", True: "5%,10%,20%,50%"}
"""Budgets of the main tables, and of all policies."""

TOKENS = 1000


def policies(model: str, *, every: bool) -> list[str]:
    """Return the policies to run on a model, of those of the tables, and with ``every`` of all others that evict."""
    others = [CONVERSATION, *(name for name, made in available().items() if made.evicts and name not in MAIN)]
    found, config = [], find(model).config
    smallest = TOKENS * int(BUDGETS[every].partition("%")[0]) // 100
    for name in [*MAIN, *(others if every else ())]:
        try:
            policy = kvkeep.parse(name)
            Layout.of(config, policy).spread(smallest)
        except KVKeepError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    words = [sys.executable, "-m", "kvkeep", "eval", options.model, "--tasks", "recall", "--documents", "text-test"]
    words += ["--text", options.text, "--context", str(TOKENS), "--facts", "8", "--ask", "inside,later"]
    words += ["--limit", str(options.limit or (200 if options.all else 104)), "--budgets", BUDGETS[options.all]]
    words += ["--policies", ",".join(policies(options.model, every=options.all)), "--output", str(options.output)]
    raise SystemExit(subprocess.run(words).returncode)


if __name__ == "__main__":
    main()

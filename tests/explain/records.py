"""A record that tests share: a text with a fact, three policies, the embedded model."""

import functools
import json
import re

from kvkeep.explain.explain import explain
from kvkeep.explain.explanation import unpacked
from kvkeep.models.tiny.recall import question

POLICIES = ("h2o", "snapkv:window=8", "local")
CHUNK = 32


def text(tokens=300):
    return question(3, kind="word", n_facts=4, tokens=tokens).prompt


@functools.cache
def record():
    return explain(None, text(), policies=POLICIES, budget=0.25, prefill_chunk=CHUNK, max_new_tokens=6)


def shown(page):
    """The data of a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


def tables(run):
    """The tables of a run, as numbers."""
    return {name: unpacked(value) for name, value in run.items() if isinstance(value, dict)}

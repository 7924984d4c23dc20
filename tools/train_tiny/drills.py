"""Short rows of pairs to look up, from the simplest form to a question about two keys.

Documents in full wording alone do not teach looking up: after six million tokens the model still picked among
values of the right kind. In steps it takes half a million: a thing and its value side by side ("brush red"), then
a sentence between them, then an owner as second key, then a question. Each step finds what the next one needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
from tokenizers import Tokenizer

from kvkeep.models.tiny.recall import Lexicon, draw_value

Row = tuple[np.ndarray, np.ndarray]
LEVELS = 4
_FORMS = ((" {thing}", ""), (" The {thing} is", "."), (" {owner}'s {thing} is", "."), (" {owner}'s {thing} is", "."))
_QUESTION = " What is {owner}'s {thing}?<|end|><|assistant|>"
_VALUE, _REST = 8.0, 0.7
_SHARES = (1, 1, 3, 3)


class Drill:
    """Writes rows of one level: some pairs, then the same pairs in random order, their values weighted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def row(self, rng: random.Random, lexicon: Lexicon, length: int, most: int) -> Row:
        """One row of a random level with at most ``most`` pairs."""
        level = rng.choices(range(LEVELS), _SHARES)[0]
        keys = _keys(rng, lexicon, level, rng.randint(2, most))
        values = [draw_value(lexicon.kind(rng.choice(("colour", "place", "word"))), lexicon, rng) for _ in keys]
        ids, weights = self._tokenizer.encode("<|begin|>").ids, [0.0]

        def add(text: str, weight: float) -> None:
            new = self._tokenizer.encode(text).ids
            ids.extend(new)
            weights.extend([weight] * len(new))

        before, after = _FORMS[level]
        if level == LEVELS - 1:
            add("<|user|>", _REST)
        for (owner, thing), value in zip(keys, values, strict=True):
            add(before.format(owner=owner, thing=thing) + f" {value}{after}", _REST)
        opening = ""
        while len(ids) < length:
            for i in rng.sample(range(len(keys)), len(keys)):
                owner, thing = keys[i]
                ask = opening + _QUESTION if level == LEVELS - 1 else before
                add(ask.format(owner=owner, thing=thing), _REST)
                add(f" {values[i]}", _VALUE)
                add("<|end|>" if level == LEVELS - 1 else after, _REST)
                opening = "<|user|>"
        return np.array(ids[:length], dtype=np.int64), np.array(weights[:length], dtype=np.float32)


def _keys(rng: random.Random, lexicon: Lexicon, level: int, n: int) -> Sequence[tuple[str, str]]:
    """Pairs of owner and thing; where there are owners, half of the rows need both keys."""
    if level < 2 or rng.random() < 0.5:
        return list(zip(rng.sample(lexicon.names, n), rng.sample(lexicon.things, n), strict=True))
    side = max(2, round(n**0.5))
    grid = product(rng.sample(lexicon.names, side), rng.sample(lexicon.things, side))
    return rng.sample(list(grid), min(n, side * side))

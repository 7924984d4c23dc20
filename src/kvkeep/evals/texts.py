"""Running text for all tasks but recall: windows of a file, or of the package's own sentences."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import cycle, islice

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals.task import Options
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tiny.recall import draw_facts, own_filler
from kvkeep.models.tiny.wordings import HELD_OUT
from kvkeep.models.tokenization import encode

SHORTEST = 16
"""Tokens of the shortest text that says anything."""

_FILLER_PER_FACT = 3
_FACTS = 16


def windows(checkpoint: Checkpoint, options: Options, *, rows: int, length: int) -> Int[Tensor, "rows length"]:
    """Return texts of equal length, each after the model's begin token if there is one.

    Args:
        checkpoint: the model.
        options: the text, and a seed that chooses windows of a long text, or the package's own sentences.
        rows: number of texts; fewer if the file is shorter.
        length: tokens of each text; fewer if the whole file is shorter.

    Raises:
        InputError: the file has fewer tokens than `SHORTEST`.
    """
    begin = _begin(checkpoint)
    body = length - len(begin)
    if options.text is None:
        texts = [_own_tokens(checkpoint, options.seed * 1_000_003 + row, body) for row in range(rows)]
    else:
        texts = _cut(_tokens(checkpoint, options.text), rows, body, options.seed)
    return torch.stack([torch.cat([begin, text]) for text in texts])


def describe(options: Options) -> str:
    """Return the name of the text in results: ``own``, or a hash."""
    if options.text is None:
        return "own"
    return f"sha256:{hashlib.sha256(options.text.encode()).hexdigest()[:16]}"


def notes(options: Options) -> list[str]:
    """Notes about the text."""
    if options.text is not None:
        return []
    return [
        "perplexity, agreement and mass use the package's own plain sentences, which say little about other texts; "
        "give one as `text`."
    ]


def own_sentences(seed: int) -> Iterator[str]:
    """Yield an endless text of shuffled neutral sentences with a fact after every third; facts repeat in turn."""
    rng = random.Random(seed)
    facts = cycle(draw_facts(HELD_OUT, rng, _FACTS, [kind.name for kind in HELD_OUT.kinds]))
    filler = iter(own_filler(rng))
    while True:
        yield from islice(filler, _FILLER_PER_FACT)
        fact = next(facts)
        yield fact.say(rng.choice(fact.kind.statements))


def _own_tokens(checkpoint: Checkpoint, seed: int, length: int) -> Int[Tensor, " length"]:
    sentences = own_sentences(seed)
    text = " ".join(islice(sentences, 1 + length // 4))
    while len(ids := _tokens(checkpoint, text)) < length:
        text = " ".join([text, *islice(sentences, 1 + length // 8)])
    return ids[:length]


def _cut(ids: Int[Tensor, " n"], rows: int, length: int, seed: int) -> list[Int[Tensor, " length"]]:
    """Consecutive windows; the next seed starts where this one ends, and after the last window comes the first."""
    if len(ids) < SHORTEST:
        raise InputError(
            f"The text has only {len(ids)} tokens; less than {SHORTEST} say nothing about a cache. Give a "
            "longer `text`."
        )
    length = min(length, len(ids))
    starts = range(0, len(ids) - length + 1, length)
    chosen = [starts[(seed * rows + row) % len(starts)] for row in range(min(rows, len(starts)))]
    return [ids[start : start + length] for start in (chosen if rows < len(starts) else starts)]


def _tokens(checkpoint: Checkpoint, text: str) -> Int[Tensor, " n"]:
    ids = encode(checkpoint, text, raw=True)[0]
    begin = checkpoint.tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[0] == begin else ids


def _begin(checkpoint: Checkpoint) -> Int[Tensor, " n"]:
    begin = checkpoint.tokenizer.bos_token_id
    return torch.tensor([] if begin is None else [begin], dtype=torch.int64)

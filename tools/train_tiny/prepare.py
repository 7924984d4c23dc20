"""Reads the data once: trains the tokenizer and writes token files, so that training starts at once."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from kvkeep.models.tiny.recall import draw_facts

from . import corpus, tokenizer
from .model import CONTEXT
from .paths import PACKAGE
from .pools import KINDS, MATERIALS_ALLOWED, NAMES, THINGS_ALLOWED, VALUES, Lexicon, with_values
from .words import collect

SEED = 20


def recall_sentences(n: int, seed: int) -> list[str]:
    """Facts and questions, so that the tokenizer knows the words recall documents are made of."""
    rng = random.Random(seed)
    kinds = tuple(with_values(kind, VALUES) for kind in KINDS)
    lexicon = Lexicon(tuple(NAMES), MATERIALS_ALLOWED, THINGS_ALLOWED, kinds)
    found = []
    for _ in range(n):
        (fact,) = draw_facts(lexicon, rng, 1, [kind.name for kind in kinds])
        found.append(" " + fact.say(rng.choice(fact.kind.statements + fact.kind.questions)))
    return found


def prepare(data: Path, work: Path, *, onward: bool = False) -> None:
    """Write ``tokenizer.json`` (``onward``: the package's), the words and the token files into the work folder."""
    work.mkdir(parents=True, exist_ok=True)
    training, validation = corpus.novels(data, held_out=False), corpus.novels(data, held_out=True)
    stories = corpus.stories(data)
    random.Random(SEED).shuffle(stories)
    kept, stories = stories[:100], stories[100:]
    if onward:
        words = Tokenizer.from_file(str(PACKAGE / "tokenizer.json"))
    else:
        words = tokenizer.train(tokenizer.sample(training, stories, recall_sentences(20_000, SEED), SEED))
    words.save(str(work / "tokenizer.json"))
    tokenizer.save(words, work / "tokenizer", context=CONTEXT)
    collect(training, words).save(work / "words.json")
    for name, texts, share in (
        ("novels", training, 0.25),
        ("stories", stories, 1.0),
        ("validation_novels", validation, 0.25),
        ("validation_stories", kept, 1.0),
    ):
        encoded = corpus.encode(texts, words, sentence_share=share)
        corpus.save(encoded, work / f"{name}.npz")
        print(f"{name}: {len(texts)} texts, {len(encoded.tokens):,} tokens, {len(encoded.starts):,} sentences")
    filler = {"novels": [s for t in validation for s in corpus.sentences(t[50_000:90_000])]}
    filler["stories"] = [s for t in kept for s in corpus.sentences(t)]
    (work / "validation_filler.json").write_text(json.dumps(filler))


def load_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer that ``prepare`` trained."""
    return Tokenizer.from_file(str(work / "tokenizer.json"))

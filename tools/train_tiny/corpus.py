"""The texts: novels and stories, split by author, as sentences and as rows of tokens."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HELD_OUT_AUTHORS = ("Hardy", "Woolf", "Doyle", "Burnett", "Jerome", "Schreiner")
"""Validation authors; an author's books stay out together, whichever collection they come from."""

BEGIN, END = "<|begin|>", "<|end|>"
NOVEL_SHARE_BYTES = 420_000
"""At most this much of a novel is used, so that long novels do not dominate."""

_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]?[A-Z])")


def author(path: Path) -> str:
    """The author in a novel's file name, for both naming schemes (``Hardy_Tess_1891``, ``ENG18711_Hardy``)."""
    first, second = path.stem.split("_")[:2]
    return second if first.startswith("ENG") else first


def clean(text: str) -> str:
    """Plain quotes and dashes, one blank line between paragraphs, no line breaks inside them."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    for old, new in {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "..."}.items():
        text = text.replace(old, new)
    paragraphs = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
    return "\n".join(p for p in paragraphs if p)


def novels(data: Path, *, held_out: bool) -> list[str]:
    """The novels of the training or of the validation authors; front matter is skipped."""
    texts = []
    for path in sorted((data / "novels").glob("*.txt")):
        if (author(path) in HELD_OUT_AUTHORS) == held_out:
            text = clean(path.read_text(encoding="utf-8", errors="ignore"))
            start = min(5000, len(text) // 10)
            texts.append(text[start : start + NOVEL_SHARE_BYTES])
    return texts


def recase(story: str, capitalised: set[str]) -> str:
    """Capitals for a lower-cased story: after a stop, in ``I``, and in words that have one elsewhere."""
    story = re.sub(r"(?<!')\b[a-z]+", lambda m: m[0].capitalize() if m[0] in capitalised else m[0], story)
    return re.sub(r"(^|[.!?]\s+[\"']?|\n[\"']?|[\s(]\")([a-z])", lambda m: m[1] + m[2].upper(), story)


def names_in(text: str) -> set[str]:
    """Words that are nearly always capitalised in the middle of a sentence, lower-cased."""
    counts: Counter[str] = Counter(re.findall(r"(?<=[a-z,] )[A-Za-z]+", text))
    return {w.lower() for w in counts if w[0].isupper() and counts[w] > 5 * counts[w.lower()]} | {"i"}


def stories(data: Path) -> list[str]:
    """The stories: the cased file, and from the lower-cased file those that are not in it, re-cased."""
    cased = (data / "tinystories/cased.txt").read_text(encoding="utf-8")
    capitalised = names_in(cased)
    found = [clean(s) for s in cased.split("<|endoftext|>")]
    known = {re.sub(r"[^a-z]", "", s.lower())[:60] for s in found}
    lower = (data / "tinystories/lowercased.txt").read_text(encoding="utf-8")
    lower = lower.replace("â€œ", '"').replace("â€\u009d", '"').replace("â€™", "'")
    for story in re.split(r"(?<!\n)\n(?!\n)", lower):
        if len(story) > 200 and story.isascii() and re.sub(r"[^a-z]", "", story)[:60] not in known:
            found.append(recase(clean(story), capitalised))
    return [s for s in found if len(s) > 100]


def sentences(text: str) -> list[str]:
    """The sentences of a text, none of them longer than 400 characters or shorter than 20."""
    parts = (s.strip() for p in text.split("\n") for s in _SENTENCE.split(p))
    return [s for s in parts if 20 <= len(s) <= 400]


@dataclass(frozen=True)
class Corpus:
    """Tokens of running text, and tokens of sentences that serve as filler between facts."""

    tokens: np.ndarray
    filler: np.ndarray
    starts: np.ndarray

    def row(self, rng: random.Random, length: int) -> np.ndarray:
        """``length`` consecutive tokens of running text."""
        at = rng.randrange(len(self.tokens) - length)
        return self.tokens[at : at + length]

    def fill(self, rng: random.Random, length: int) -> list[np.ndarray]:
        """Consecutive sentences of at most ``length`` tokens together."""
        at = rng.randrange(len(self.starts) - 400)
        found: list[np.ndarray] = []
        while length >= (size := int(self.starts[at + 1] - self.starts[at])):
            found.append(self.filler[self.starts[at] : self.starts[at + 1]])
            length -= size
            at += 1
        return found


def encode(texts: list[str], tokenizer: Tokenizer, *, sentence_share: float) -> Corpus:
    """Tokenise texts; a share of each also goes, sentence by sentence, into the filler."""
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    rows, filler = [], []
    for encoding in tokenizer.encode_batch([" " + t for t in texts]):
        rows.append(np.array([begin, *encoding.ids, end], dtype=np.uint16))
    for text in texts:
        part = text[: int(len(text) * sentence_share)] if len(text) > 20_000 else text
        filler += [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch([" " + s for s in sentences(part)])]
    starts = np.cumsum([0, *(len(s) for s in filler)])
    return Corpus(np.concatenate(rows), np.concatenate(filler), starts)


def save(corpus: Corpus, path: Path) -> None:
    """Write a corpus to one file."""
    np.savez(path, tokens=corpus.tokens, filler=corpus.filler, starts=corpus.starts)


def load(path: Path) -> Corpus:
    """Read a corpus written by :func:`save`."""
    with np.load(path) as file:
        return Corpus(file["tokens"], file["filler"], file["starts"])

"""Words of the training texts that serve as things, materials, values and names in recall documents."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvkeep.models.tiny.recall import HELD_OUT


@dataclass(frozen=True)
class Words:
    """Ordinary words of one token each; rarer ones and proper names of two to five.

    The evaluation's names and things are words of several tokens that were never a key: so are the rare ones.
    """

    common: tuple[str, ...]
    rare: tuple[str, ...]
    names: tuple[str, ...]

    def save(self, file: Path) -> None:
        """Write the words as JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Words:
        """Read what `save` wrote."""
        return cls(**{name: tuple(words) for name, words in json.loads(file.read_text()).items()})


def collect(texts: Sequence[str], tokenizer: Tokenizer) -> Words:
    """The words of some texts, without those that the evaluation asks for."""
    small: Counter[str] = Counter()
    capital: Counter[str] = Counter()
    for text in texts:
        small.update(re.findall(r"\b[a-z]{4,11}\b(?!')", text))
        capital.update(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,10}\b", text))  # not where a sentence begins
    taken = {word.lower() for pool in (HELD_OUT.names, HELD_OUT.things, HELD_OUT.materials) for word in pool}

    def pieces(word: str) -> int:
        return len(tokenizer.encode(f" {word}").ids)

    rare = [w for w, n in sorted(small.items()) if 4 <= n <= 300 and w not in taken and 2 <= pieces(w) <= 5]
    names = [
        w
        for w, n in sorted(capital.items())
        if n >= 3 and not small[w.lower()] and w.lower() not in taken and 2 <= pieces(w) <= 5
    ]
    return Words(tuple(plain_words(tokenizer)), tuple(rare), tuple(names))


def plain_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words of four letters and more that are one token, in the order of their frequency."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [token[1:] for token, _ in vocabulary if re.fullmatch("Ġ[a-z]{4,}", token)]

"""The model card, written from the figures that ``evaluate`` measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .corpus import HELD_OUT_AUTHORS

FILLERS = {"novels": "novels of held-out authors", "stories": "held-out stories", "own": "the package's own sentences"}

AIMS = {"words": 0.95, "numbers": 0.80, "corrected": 0.85, "worst tenth": 0.88}


def write_card(results: dict[str, Any], path: Path) -> None:
    """Write the card."""
    parts = (_head(results), _recall(results), _text(results), _samples(results), _attention(results), _SOURCES)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f}"


def _aims(results: dict[str, Any]) -> str:
    """What the training aims at and what was reached, at the worst of the context lengths."""
    tables = [table for key, table in results["recall"].items() if key.startswith("novels/")]
    tables = [{**table, "worst tenth": min(table["deciles"])} for table in tables]
    reached = {name: min(table[name] for table in tables) for name in AIMS}
    missed = [name for name, aim in AIMS.items() if reached[name] < aim]
    lines = [f"{name} {_percent(reached[name])} % (aim {_percent(aim)} %)" for name, aim in AIMS.items()]
    verdict = "The aims are reached." if not missed else f"Not reached: {', '.join(missed)}; training goes on."
    return f"Worst of the three lengths, between novels: {', '.join(lines)}. {verdict}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def _head(results: dict[str, Any]) -> str:
    return f"""---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# The embedded model of kvkeep

A small language model on which remembering matters: {results["parameters"] / 1e6:.1f} million parameters, trained to
find a fact anywhere in their 2 048 tokens of context. It is there for demos, tests and measurements of cache
eviction, not for anything else: it knows next to nothing, and outside of stories, old novels and questions about
facts in its context it talks nonsense.

- Architecture: `LlamaForCausalLM`, 6 layers, 256 wide, 4 query heads and 2 KV heads of 64, SwiGLU of 640, tied
  embeddings, RoPE with theta 100 000, byte-level BPE of 4 096 tokens (every digit is one), bfloat16.
- Chat template: `<|begin|><|user|> question<|end|><|assistant|> answer<|end|>`.
- Training: {results["tokens_trained"] / 1e6:.1f} million tokens on two to four CPU cores: novels, stories, and recall
  documents that the script writes itself. `python -m tools.train_tiny all --data DIR --work DIR` trains a model
  like it; this one was stopped and resumed while its documents and stages were still being changed
  (`lab/log/embedded-model.md` says how), so the same command will not give the same weights.

![loss and recall during training](training.png)

All figures below: `python -m tools.train_tiny evaluate --data DIR --work DIR`, full cache, greedy."""


def _recall(results: dict[str, Any]) -> str:
    rows, tenths = [], []
    for key, table in results["recall"].items():
        filler, tokens = key.split("/")
        kinds = [_percent(table["kinds"][kind]) for kind in ("colour", "place", "word", "owner")]
        shares = [_percent(table[name]) for name in ("words", "numbers", "corrected", "guess")]
        rows.append([FILLERS[filler], tokens, str(table["questions"]), shares[0], *kinds, *shares[1:]])
        tenths.append([FILLERS[filler], tokens, *(_percent(share) for share in table["deciles"])])
    first = _table(
        [
            "filler",
            "tokens",
            "questions",
            "words",
            "colour",
            "place",
            "word",
            "owner",
            "four digits",
            "corrected",
            "guess",
        ],
        rows,
    )
    second = _table(["filler", "tokens", *(f"{i}0 %" for i in range(10))], tenths)
    return f"""## Recall

One question at the end of a text about one of the 16 facts in it, exact answers in percent. Names, things and
wordings were kept out of the training (a wording's single words may have been in other sentences). `words`: so many
questions whose answer is a word, by kind in the next columns; `corrected`: as many about a fact that was stated with
another word before; `four digits`: a quarter as many; `guess`: the chance of a guess among the text's values of the
same kind.

{_aims(results)}

{first}

Word answers by where in the text the fact stands:

{second}"""


def _text(results: dict[str, Any]) -> str:
    rows = []
    for key, value in results["text"].items():
        name, tokens = key.split("/")
        rows.append([FILLERS[name], tokens, f"{value['nats']:.2f}", f"{value['perplexity']:.1f}"])
    return f"""## Text

{_table(["text", "tokens of context", "nats per token", "perplexity"], rows)}

Held-out authors: {", ".join(HELD_OUT_AUTHORS)}; none of their books was trained on."""


def _samples(results: dict[str, Any]) -> str:
    quotes = []
    for sample in results["samples"]:
        lines = "\n".join(f"> {line}" for line in sample["text"].split("\n"))
        quotes.append(f"Seed {sample['seed']}:\n\n{lines}")
    joined = "\n\n".join(quotes)
    return f"""## Three samples, unedited

150 tokens at temperature 0.7 from the 40 most likely tokens (`torch.manual_seed` as given).

{joined}"""


def _attention(results: dict[str, Any]) -> str:
    names = ("below_1_percent", "top_1_percent", "top_5_percent", "top_20_percent", "first_token")
    rows = [[str(i), *(_percent(layer[n]) for n in names)] for i, layer in enumerate(results["attention"])]
    mean = [_percent(sum(layer[n] for layer in results["attention"]) / len(rows)) for n in names]
    head = ["layer", "below 1 % of the row's maximum", "mass on top 1 %", "top 5 %", "top 20 %", "on the first token"]
    return f"""## Attention

In percent, mean over heads, on two recall texts and two passages of held-out novels of 2 048 tokens. Mass is the sum
of attention probabilities that a key receives over all rows; keys are ranked by it. The other two leave out the first
64 rows, which see few tokens.

{_table(head, [*rows, ["mean", *mean]])}"""


_SOURCES = """## Data and licences

- Novels: English novels of 1719-1937, in the public domain by age, from the repositories
  computationalstylistics/100_english_novels and COST-ELTeC/ELTeC-eng (the ELTeC mark-up, CC BY, was not used).
- Stories: TinyStories (CDLA-Sharing-1.0), the copies in gusjengis/toy-RNN and Arnoochka/Transformer-Parallelism.
- Recall documents: written by the training script.

No text of the data is part of the package. The weights are under the licence of the project."""

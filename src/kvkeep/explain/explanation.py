"""The record of all runs as plain data: the content of the page and of its JSON."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from kvkeep.explain import figures, packed
from kvkeep.explain.ledger import Ledger
from kvkeep.explain.page import page
from kvkeep.explain.runs import Missed
from kvkeep.version import __version__

SCHEMA = 1
"""Version of the JSON; ``docs/explain.md`` describes it."""


@dataclass(frozen=True, eq=False)
class Run:
    """One policy.

    Attributes:
        policy: its string.
        ledger: when each head dropped each token.
        missed: what the full cache says about it.
        answer: the text of each token of the answer.
        agreement: the share of the answer's tokens that the full cache's answer has at the same place.
    """

    policy: str
    ledger: Ledger
    missed: Missed
    answer: list[str]
    agreement: float

    def data(self) -> dict[str, Any]:
        """The run as plain data."""
        ledger, ids, n = self.ledger, self.ledger.answered, self.ledger.read
        return {
            "policy": self.policy,
            "answer": self.answer,
            "answer_ids": ids.ids,
            "agreement": self.agreement,
            "budgets": ids.budgets,
            "allocated_bytes": ids.allocated_bytes,
            "full_bytes": ids.full_bytes,
            "dropped": packed.moments(ledger.dropped[:, :n]),
            "scores": packed.short_floats(ledger.scores[:, :n]),
            "rivals": packed.whole_numbers(torch.stack(ledger.rivals)),
            "rival_scores": packed.short_floats(torch.stack(ledger.rival_scores)),
            "mass": packed.shades(pad_sequence(ledger.mass, batch_first=True)),
            "total": packed.shades(ledger.total[:, :n]),
            "attended": packed.shades(torch.stack(ledger.rows)[:, :n]),
            "full": packed.shades(self.missed.full[:, :n]),
            "missed": packed.shades(self.missed.missed[:, :n]),
            "lost": packed.short_floats(self.missed.lost),
        }


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was kept, what was forgotten and why, for one text under several policies.

    Attributes:
        model: the model's name.
        question: the question.
        command: how the record was made.
        notes: remarks that a reader should know.
        tokens: the text of each token of the prompt.
        chunk: tokens of the prompt in one moment.
        budget: tokens kept per layer and KV head.
        heads: the layer and the number of each KV head, in the order of all tables.
        answer: the full cache's answer, token by token.
        runs: one record for each policy.
    """

    model: str
    question: str
    command: str
    notes: list[str]
    tokens: list[str]
    chunk: int
    budget: int
    heads: list[tuple[int, int]]
    answer: list[str]
    runs: list[Run]

    @cached_property
    def data(self) -> dict[str, Any]:
        """The content of the JSON."""
        return {
            "schema": SCHEMA,
            "kvkeep": __version__,
            "model": self.model,
            "question": self.question,
            "command": self.command,
            "notes": self.notes,
            "tokens": self.tokens,
            "chunk": self.chunk,
            "budget": self.budget,
            "heads": [list(head) for head in self.heads],
            "answer": self.answer,
            "runs": [run.data() for run in self.runs],
        }

    def to_json(self) -> str:
        """The record as JSON, of the schema in ``docs/explain.md``."""
        return json.dumps(self.data, ensure_ascii=True, separators=(",", ":"))

    def to_html(self) -> str:
        """The record as one HTML file that needs nothing else."""
        return page(self.data)

    def read(self, moment: int) -> int:
        """Tokens of the prompt and of an answer that are read when a moment is over."""
        chunks = -(-len(self.tokens) // self.chunk)
        return min(len(self.tokens), (moment + 1) * self.chunk) + max(0, moment + 1 - chunks)

    def draw(
        self, folder: str | os.PathLike[str], *, moment: int = -1, token: int | None = None, overwrite: bool = False
    ) -> list[Path]:
        """Write pictures of the record as PNG files, with matplotlib.

        ``strips.png`` shows the tokens that each head holds at a moment, ``times.png`` the share of heads that hold
        each token in all moments, ``lost.png`` the lost mass by layer and KV head. `kvkeep.explain.figures` has their
        numbers.

        Args:
            folder: the folder; it is made if it does not exist.
            moment: the moment of the strips, from 0; negative ones count from each run's end.
            token: position of a token; ``token.png`` then shows how long each head held it.
            overwrite: replace pictures that are there.

        Returns:
            The paths.

        Raises:
            InputError: matplotlib is missing, there is no such moment or token, or the files cannot be written.
        """
        return figures.write(self, Path(folder), moment=moment, token=token, overwrite=overwrite)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        style = "width:100%;height:800px;border:0"
        name = "What the cache kept"
        return f'<iframe title="{name}" style="{style}" srcdoc="{html.escape(self.to_html())}"></iframe>'

    def __repr__(self) -> str:
        names = ", ".join(run.policy for run in self.runs)
        return f"Explanation({len(self.tokens)} tokens, budget {self.budget}: {names})"

"""The record of all runs as plain data: the content of the page and of its JSON."""

from __future__ import annotations

import base64
import html
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.errors import InputError
from kvkeep.explain.runs import Ledger, Missed
from kvkeep.plots import MISSING, Heat, available, draw
from kvkeep.version import __version__

# Tables as short texts: small numbers, compressed, in base64. ``docs/explain.md`` says how to read them.

SHADES = 255
"""Steps of a shade: the largest number of a byte."""
HELD = 255
"""Stands in tables for a token that was not dropped; in a `Ledger` -1 does, which no byte holds."""
_ROWS = 8
"""Rows of a table that are turned into shades at a time, in float64."""
MOST_MOMENTS = 254
"""Moments that a drop can be told by in one byte."""


def moments(dropped: Tensor) -> dict[str, Any]:
    """Return the moments at which tokens were dropped as a table of one byte each; numbers below 0, which stand for
    tokens that were not, become `HELD`.
    """
    return _table("uint8", dropped.masked_fill(dropped < 0, HELD).to(torch.uint8))


def shades(values: Tensor) -> dict[str, Any]:
    """Return numbers of 0 or more as a table of one byte each: the square root of the share of the largest, in 255
    steps. The largest stands beside them, as ``largest``.
    """
    most = float(values.max()) if values.numel() else 0.0
    # some rows at a time, since the numbers in float64 take eight times the bytes of the table
    steps = torch.empty(values.shape, dtype=torch.uint8)
    for some, to in zip(values.split(_ROWS), steps.split(_ROWS), strict=True):
        to.copy_((some.double() / (most or 1.0)).sqrt_().mul_(SHADES).round_())
    return {**_table("uint8", steps), "largest": most}


def short_floats(values: Tensor) -> dict[str, Any]:
    """Return floats as a table of bfloat16, two bytes each: three digits, and no two numbers change their order."""
    # numpy, which gives the bytes, has no bfloat16
    return _table("bfloat16", values.to(torch.bfloat16).view(torch.int16))


def whole_numbers(values: Tensor) -> dict[str, Any]:
    """Return integers as a table of four bytes each."""
    return _table("int32", values.to(torch.int32))


def unpacked(table: dict[str, Any]) -> Tensor:
    """Return the numbers of a table of `moments`, `shades`, `short_floats` or `whole_numbers`, up to their rounding.

    `HELD` is left as it is.
    """
    # a bytearray, since torch warns of a buffer that cannot be written
    data = bytearray(zlib.decompress(base64.b64decode(table["data"])))
    kinds = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "int32": torch.int32}
    flat = torch.frombuffer(data, dtype=kinds[table["type"]]) if data else torch.zeros(0)
    found = flat.view(table["shape"])
    return (found.double() / SHADES).square() * table["largest"] if "largest" in table else found


def _table(kind: str, values: Tensor) -> dict[str, Any]:
    """Return a tensor as a JSON object: its kind, its shape, and its bytes, compressed and in base64."""
    data = zlib.compress(values.contiguous().cpu().numpy().tobytes(), 9)
    return {"type": kind, "shape": list(values.shape), "data": base64.b64encode(data).decode("ascii")}


# The page: one HTML file with its style, its script and its data. It needs no network.
#
# Whatever a text holds, it reaches the page as JSON in which ``<`` is written as an escape, and the script shows it as
# text, never as HTML.

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("colours.css", "tokens.css", "page.css")
_SCRIPTS = ("tokens.js", "parts.js", "strip.js", "data.js", "columns.js", "panels.js", "answers.js", "page.js")
# a text with </script> would end the script that holds the data
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@cache
def asset(name: str) -> str:
    """Return the text of a file in the folder of the page's parts: a style, a script, or the page without them."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def page(data: Mapping[str, Any]) -> str:
    """Return the whole HTML page of a record, with its style, scripts and data.

    Args:
        data: the record as plain data, see `Explanation.data`.
    """
    packed = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    for letter, escape in _UNSAFE.items():
        packed = packed.replace(letter, escape)
    parts = {
        "STYLE": "".join(map(asset, _STYLES)),
        "DATA": packed,
        "SCRIPT": "".join(map(asset, _SCRIPTS)),
    }
    before = asset("page.html")
    # each part is put in place once, so that a text that looks like a mark of the page is left alone
    for name, content in parts.items():
        head, _, before = before.partition(f"<!-- {name} -->")
        parts[name] = head + content
    return "".join(parts.values()) + before


# Pictures of a record for scripts: strips of heads, the text over time, maps of layers and heads.
#
# All are maps of numbers from 0 to 100 (`kvkeep.plots.Heat`), so a script may also draw them in another way.

FILES = ("strips.png", "times.png", "lost.png")
"""The pictures that need no token."""
TOKEN_FILE = "token.png"
_MOST_COLUMNS = 1000
"""Columns of a picture; more positions share one."""


def check(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder into which pictures cannot be drawn. Nothing is written.

    Raises:
        InputError: matplotlib is missing, the folder cannot be written to, or it has such pictures already and
            ``overwrite`` is not set.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    # the nearest folder that exists: the others are made in it
    above = next(ancestor for ancestor in (folder, *folder.absolute().parents) if os.path.lexists(ancestor))
    if not above.is_dir():
        raise InputError(f"{above} is no folder, so it has no room for plots. Give another name.")
    if not os.access(above, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {above}. Give another one for the plots.")
    there = [name for name in (*FILES, TOKEN_FILE) if os.path.lexists(folder / name)]
    if there and not overwrite:
        raise InputError(f"{folder / there[0]} exists. Give another folder, or `overwrite=True` to replace it.")


def write(found: Explanation, folder: Path, *, moment: int, token: int | None, overwrite: bool) -> list[Path]:
    """Write the pictures of a record into a folder, which is made if need be; return the paths.

    The arguments are those of `Explanation.draw`.

    Raises:
        InputError: see `Explanation.draw`.
    """
    pictures = dict(zip(FILES, (strips(found, moment), times(found), lost(found)), strict=True))
    if token is not None:
        pictures[TOKEN_FILE] = lives(found, token)
    check(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} for plots cannot be made: {error.strerror}.") from error
    return [draw(folder / name, maps) for name, maps in pictures.items()]


def strips(found: Explanation, moment: int = -1) -> list[Heat]:
    """Return for each run a map of the tokens that each head holds after a moment: a line for each head, 100 where it
    holds the token, else 0; NaN for tokens that were not read yet.

    Args:
        found: the record.
        moment: the moment, from 0; negative ones count from each run's end.

    Raises:
        InputError: there is no such moment.
    """
    names = [f"{layer}.{head}" for layer, head in found.heads]
    maps = []
    for run in found.runs:
        now = _index(moment, run.ledger.moments, "moment")  # runs differ in length, and so in their last moment
        maps.append(
            _wide(f"Held after moment {now + 1}, % ({run.policy})", "layer.KV head", names, _held(found, run, now))
        )
    return maps


def times(found: Explanation) -> list[Heat]:
    """Return a map for each run of the share of heads that hold each token, in percent: a line for each moment."""
    maps = []
    for run in found.runs:
        moments = range(run.ledger.moments)
        names, shares = [str(now + 1) for now in moments], (_held(found, run, now).mean(dim=0) for now in moments)
        maps.append(_wide(f"Heads that hold a token, % ({run.policy})", "moment", names, shares))
    return maps


def lost(found: Explanation) -> list[Heat]:
    """Return for each run a map of the share of attention that each head lost, in percent, as the mean over the
    answer's tokens: layers down, KV heads across.
    """
    moments = len(found.prompt_ends)  # those of the prompt are left out
    return _maps(found, "Lost mass, %", lambda run: run.missed.lost[moments:].mean(dim=0))


def lives(found: Explanation, token: int) -> list[Heat]:
    """Return for each run a map of how long each head held a token: the percentage of the moments since it was read,
    100 where it is still held. Layers are down, KV heads across.

    Args:
        found: the record.
        token: position of the token; negative ones count from each run's end.

    Raises:
        InputError: there is no such token.
    """

    def share(run: PolicyRun) -> Float[Tensor, " H"]:
        """Return in which share of a run's moments since the token was read each head held it."""
        position = _index(token, run.ledger.read, "token")
        first = next(now for now in range(run.ledger.moments) if position < found.read(now))
        dropped = run.ledger.dropped[:, position]
        # below 0: it was never dropped
        return torch.where(dropped < 0, 1.0, (dropped - first) / (run.ledger.moments - first))

    return _maps(found, f"Time that token {token} was held, %", share)


def _maps(found: Explanation, title: str, of: Callable[[PolicyRun], Float[Tensor, " H"]]) -> list[Heat]:
    """Return one map of layers and KV heads for each run: the share that ``of`` gives for each head, in percent."""
    layers, heads = sorted({layer for layer, _ in found.heads}), 1 + max(head for _, head in found.heads)
    # layers without slots have no line, and heads that a layer does not have stay NaN
    places = torch.tensor([layers.index(layer) * heads + head for layer, head in found.heads])
    maps = []
    for run in found.runs:
        table = torch.full((len(layers) * heads,), torch.nan).index_copy(0, places, 100 * of(run).float())
        across, down = [str(head) for head in range(heads)], [str(layer) for layer in layers]
        rows = table.view(-1, heads).tolist()
        maps.append(Heat(f"{title} ({run.policy})", "KV head", "layer", across, down, rows))
    return maps


def _wide(title: str, y_label: str, names: list[str], shares: Iterable[Float[Tensor, " n"]]) -> Heat:
    """Return a map of shares over positions, in percent.

    A column is the mean of several positions if there are too many of them.

    Args:
        title, y_label: words of the map.
        names: of the lines.
        shares: each line's shares, by position; NaN is left out of means.
    """
    lines, step = list[list[float]](), 1
    for share in shares:
        step = -(-len(share) // _MOST_COLUMNS)
        # NaN fills up the last column, and does not count in its mean
        whole = torch.nn.functional.pad(100 * share, (0, -len(share) % step), value=torch.nan)
        lines.append(whole.view(-1, step).nanmean(dim=-1).tolist())
    columns = [str(step * column) for column in range(len(lines[0]))]
    return Heat(title, "position", y_label, columns, names, lines, wide=True)


def _held(found: Explanation, run: PolicyRun, moment: int) -> Float[Tensor, "H n"]:
    """Return 1 where a head holds a token after a moment, 0 elsewhere, and NaN for tokens not read yet."""
    held = ~run.ledger.lacks(moment + 1)[:, : run.ledger.read]
    return held.float().masked_fill(torch.arange(run.ledger.read) >= found.read(moment), torch.nan)


def _index(wanted: int, count: int, what: str) -> int:
    """Return an index that counts from the beginning of a list of so many, from one that may be negative.

    Raises:
        InputError: the index is no whole number, or out of range.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not -count <= wanted < count:
        raise InputError(f"{what}={wanted!r:.40} is outside 0 … {count - 1}, the {what}s of this record.")
    return wanted % count


SCHEMA = 2
"""Version of the JSON; ``docs/explain.md`` describes it."""


@dataclass(frozen=True, eq=False)
class PolicyRun:
    """One policy.

    Attributes:
        policy: its string.
        ledger: when each head dropped each token.
        missed: what the full cache says about it.
        answer: the text of each token of the answer.
        agreement: the share of the answer's tokens that the full cache's answer has at the same place.
        parting: index of the first token of the answer that the full cache's answer does not have at the same place;
            ``None`` if there is none.
    """

    policy: str
    ledger: Ledger
    missed: Missed
    answer: list[str]
    agreement: float
    parting: int | None

    def data(self) -> dict[str, Any]:
        """Return the run as plain data for JSON, its tensors as tables."""
        # the tables have room for the longest answer; this one may be shorter
        ledger, ids, n = self.ledger, self.ledger.answered, self.ledger.read
        return {
            "policy": self.policy,
            "answer": self.answer,
            "answer_ids": ids.ids,
            "agreement": self.agreement,
            "parting": self.parting,
            "budgets": ids.budgets,
            "allocated_bytes": ids.allocated_bytes,
            "full_bytes": ids.full_bytes,
            "dropped": moments(ledger.dropped[:, :n]),
            "scores": short_floats(ledger.scores[:, :n]),
            "rivals": whole_numbers(torch.stack(ledger.rivals)),
            "rival_scores": short_floats(torch.stack(ledger.rival_scores)),
            "mass": shades(pad_sequence(ledger.mass, batch_first=True)),
            "total": shades(ledger.total[:, :n]),
            "attended": shades(torch.stack(ledger.rows)[:, :n]),
            "full": shades(self.missed.full[:, :n]),
            "missed": shades(self.missed.missed[:, :n]),
            "lost": short_floats(self.missed.lost),
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
        case: ``inside``: the prompt is text and question; ``later``: the text was cut before the question was read.
        chunk: tokens of the prompt in one moment, if it was read in chunks.
        prompt_ends: how many tokens of the prompt were read when each of its moments was over.
        budget: tokens kept per layer and KV head.
        heads: the layer and the number of each KV head, in the order of all tables.
        answer: the full cache's answer, token by token.
        runs: one record for each policy.
        special: the texts of the tokenizer's special tokens, such as the one that ends an answer.
    """

    model: str
    question: str
    command: str
    notes: list[str]
    tokens: list[str]
    case: str
    chunk: int | None
    prompt_ends: list[int]
    budget: int
    heads: list[tuple[int, int]]
    answer: list[str]
    runs: list[PolicyRun]
    special: frozenset[str] = frozenset()

    def text_of(self, answer: list[str]) -> str:
        """Return an answer's tokens as a text for readers: without special tokens, and without white space around."""
        return "".join(token for token in answer if token not in self.special).strip()

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return the whole record as plain data, the content of the JSON."""
        return {
            "schema": SCHEMA,
            "kvkeep": __version__,
            "model": self.model,
            "question": self.question,
            "command": self.command,
            "notes": self.notes,
            "tokens": self.tokens,
            "case": self.case,
            "chunk": self.chunk,
            "prompt_ends": self.prompt_ends,
            "budget": self.budget,
            "heads": [list(head) for head in self.heads],
            "answer": self.answer,
            "runs": [run.data() for run in self.runs],
        }

    def to_json(self) -> str:
        """Return the record as JSON, in the schema of ``docs/explain.md``."""
        return json.dumps(self.data, ensure_ascii=True, separators=(",", ":"))

    def to_html(self) -> str:
        """Return the record as one HTML file that needs nothing else."""
        return page(self.data)

    def read(self, moment: int) -> int:
        """Return how many tokens of the prompt and of an answer have been read when a moment is over."""
        # a moment of the prompt is a chunk, one of the answer a single token
        moments = len(self.prompt_ends)
        return self.prompt_ends[min(moment, moments - 1)] + max(0, moment + 1 - moments)

    def draw(
        self, folder: str | os.PathLike[str], *, moment: int = -1, token: int | None = None, overwrite: bool = False
    ) -> list[Path]:
        """Write pictures of the record as PNG files, with matplotlib.

        ``strips.png`` shows the tokens that each head holds at a moment, ``times.png`` the share of heads that hold
        each token in all moments, ``lost.png`` the lost mass by layer and KV head. `kvkeep.explain.explanation` has
        their numbers.

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
        return write(self, Path(folder), moment=moment, token=token, overwrite=overwrite)

    def _repr_html_(self) -> str:
        """Return the record's page as HTML in a frame, which notebooks show."""
        style = "width:100%;height:800px;border:0"
        name = "What the cache kept"
        return f'<iframe title="{name}" style="{style}" srcdoc="{html.escape(self.to_html())}"></iframe>'

    def __repr__(self) -> str:
        names = ", ".join(run.policy for run in self.runs)
        return f"Explanation({len(self.tokens)} tokens, budget {self.budget}: {names})"

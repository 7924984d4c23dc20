"""Millions of tokens through the embedded model: do memory, time per token and perplexity stay where they are?

    python bench/stream.py --text FILE [--text FILE ...] --output DIR [--tokens 4000000]

Three questions, each run resumable (start the same command again):
  stream   streaming_llm and h2o in slot positions, cache of 256, all tokens
  sizes    both at caches of 64, 128, 256 and 512 tokens, fed in chunks of an eighth of that, 50 000 tokens
  true     the same two with true positions, up to 20 000 tokens, and the full cache: past the trained length it breaks
The text is repeated if it is too short. Every row of DIR/stream.jsonl covers 10 000 tokens. Plot: DIR/stream.png.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lib import report
from lib.rows import save, saved

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.kv.block import Block
from kvkeep.kv.store import DenseStore
from kvkeep.models import tiny
from kvkeep.models.load import load
from kvkeep.result_files import write_whole

WINDOW = 10_000
SAVE_EVERY = 20


@dataclass(frozen=True)
class Run:
    """One stream: what is asked, and under what."""

    question: str
    policy: str
    budget: int
    positions: str
    tokens: int
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.question}-{self.policy.replace(':', '_')}-{self.budget}-{self.positions}-chunk{self.chunk}"


def runs(tokens: int, chunk: int) -> list[Run]:
    """All streams. A token also sees its own chunk, so small caches are compared under small chunks."""
    policies = ("streaming_llm", "h2o")
    tokens = -(-tokens // WINDOW) * WINDOW
    few = min(tokens, 20_000)
    short = [Run("true", p, 256, "true", few, chunk) for p in policies]
    short.append(Run("true", "full", few, "true", few, chunk))
    sizes = [
        Run("sizes", p, size, "slot", min(tokens, 50_000), max(1, min(chunk, size // 8)))
        for size in (64, 128, 256, 512)
        for p in policies
    ]
    return [*short, *sizes, *(Run("stream", p, 256, "slot", tokens, chunk) for p in policies)]


def read(files: list[Path], tokenizer) -> torch.Tensor:
    """All texts, one after the other, as one row of tokens."""
    parts = [tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0] for file in files]
    return torch.cat(parts)


class Stream:
    """A run that can be stopped and gone on with."""

    def __init__(self, run: Run, model, ids: torch.Tensor, output: Path):
        self.run, self.model, self.ids, self.chunk = run, model, ids, run.chunk
        self.output, self.state = output, output / f"{run.name}.pt"
        self.cache = kvkeep.BoundedCache(model.config, run.policy, run.budget, positions=run.positions)
        self.done = 0
        if self.state.exists():
            self._load()

    def go(self) -> None:
        while self.done < self.run.tokens:
            row = self._window()
            save(self.output / "stream.jsonl", [row])
            if (self.done // WINDOW) % SAVE_EVERY == 0 or self.done >= self.run.tokens:
                self._save()
            print(
                f"{self.run.name:36} {self.done:>9,}  {row['seconds']:.1f} s  ppl {row['perplexity']:.2f}", flush=True
            )

    @torch.inference_mode()
    def _window(self) -> dict[str, object]:
        """The next 10 000 tokens: their time, their loss and what the cache holds after them."""
        loss, count, start = 0.0, 0, time.perf_counter()
        end = self.done + WINDOW
        while self.done < end:
            n = min(self.chunk, end - self.done)
            at = torch.arange(self.done, self.done + n + 1) % len(self.ids)
            piece = self.ids[at][None]
            logits = self.model(input_ids=piece[:, :-1], **handed(self.model, self.cache)).logits[0].float()
            loss += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
            count += n
            self.done += n
        memory = self.cache.memory()
        return {
            "run": self.run.name,
            "question": self.run.question,
            "policy": self.run.policy,
            "budget": self.run.budget,
            "positions": self.run.positions,
            "tokens": self.done,
            "chunk": self.chunk,
            "seconds": time.perf_counter() - start,
            "perplexity": math.exp(min(loss / count, 50.0)) if math.isfinite(loss) else None,
            "allocated_bytes": memory.allocated_bytes,
            "full_bytes": memory.full_bytes,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _save(self) -> None:
        layers = self.cache.bounded_layers()
        file = io.BytesIO()
        torch.save({"done": self.done, "blocks": {i: layer.block for i, layer in layers.items()}}, file)
        write_whole(self.state, file.getvalue())

    def _load(self) -> None:
        """Take up what was saved; the file may name the classes of a block, and nothing else that could be run."""
        layers = self.cache.bounded_layers()
        try:
            with torch.serialization.safe_globals([Block, DenseStore, frozenset]):
                saved = torch.load(self.state, weights_only=True)
            done, blocks = int(saved["done"]), {i: saved["blocks"][i] for i in layers}
            if not all(isinstance(block, Block) for block in blocks.values()):
                raise TypeError("its blocks are something else")
        except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{self.state} is no stream that this script saved ({type(error).__name__}), so nothing of it is "
                "used. Remove it to begin this stream anew."
            ) from error
        self.done = done
        for i, layer in layers.items():
            layer.hold(blocks[i], columns=done)


def rows_of(output: Path) -> list[dict]:
    """The last row for each run and place: an interrupted window is measured again."""
    rows = {}
    for row in saved(output / "stream.jsonl", {}):
        rows[row["run"], row["tokens"]] = row
    return sorted(rows.values(), key=lambda row: (row["run"], row["tokens"]))


def summarise(output: Path) -> None:
    by_run: dict[str, list[dict]] = {}
    for row in rows_of(output):
        by_run.setdefault(row["run"], []).append(row)
    table, data = [], {}
    for name, rows in by_run.items():
        tenth = max(1, len(rows) // 10)
        first, last = (statistics.median(row["seconds"] for row in part) for part in (rows[:tenth], rows[-tenth:]))
        perplexities = [row["perplexity"] or math.inf for row in rows]
        half = len(rows) // 2
        summary = {
            "tokens": rows[-1]["tokens"],
            "seconds_first_tenth": round(first, 2),
            "seconds_last_tenth": round(last, 2),
            "perplexity": round(statistics.median(perplexities), 2),
            "perplexity_first_half": round(statistics.median(perplexities[: half or 1]), 2),
            "perplexity_second_half": round(statistics.median(perplexities[half:]), 2),
            "cache_bytes": sorted({row["allocated_bytes"] for row in rows}),
            "peak_rss_mb": [round(rows[i]["peak_rss_bytes"] / 1e6) for i in (0, -1)],
        }
        data[name] = summary
        table.append(
            [
                name,
                f"{summary['tokens']:,}",
                f"{first:.1f} → {last:.1f}",
                f"{summary['perplexity_first_half']:.1f} → {summary['perplexity_second_half']:.1f}",
                f"{rows[-1]['allocated_bytes'] / 1e6:.2f}",
                f"{rows[-1]['full_bytes'] / 1e6:,.0f}",
            ]
        )
    columns = ["run", "tokens", "s per 10 000: first → last", "perplexity: halves", "cache MB", "full cache MB"]
    report("Streams through the embedded model", columns, table, {"bench": "stream", "runs": data})
    draw(output, by_run)


def draw(output: Path, by_run: dict[str, list[dict]]) -> None:
    """Perplexity and time over the stream; perplexity over cache sizes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for rows in by_run.values():
        kind = rows[0]["question"]
        label = f"{rows[0]['policy']}, {rows[0]['positions']} positions"
        x = [row["tokens"] for row in rows]
        if kind in ("stream", "true"):
            axes[0].plot(
                x, [row["perplexity"] or math.nan for row in rows], ":" if kind == "true" else "-", label=label, lw=0.9
            )
        if kind == "stream":
            axes[1].plot(x, [row["seconds"] for row in rows], label=label, lw=0.9)
    for policy in ("streaming_llm", "h2o"):
        sizes = sorted(
            (r[0]["budget"], r) for r in by_run.values() if r[0]["question"] == "sizes" and r[0]["policy"] == policy
        )
        if sizes:
            axes[2].plot(
                [size for size, _ in sizes],
                [statistics.median(row["perplexity"] or math.inf for row in rows) for _, rows in sizes],
                "o-",
                label=policy,
            )
    for axis, title, xlabel in zip(
        axes,
        ("perplexity per 10 000 tokens", "seconds per 10 000 tokens", "perplexity over cache size"),
        ("tokens of the stream", "tokens of the stream", "cache, tokens"),
        strict=True,
    ):
        axis.set(title=title, xlabel=xlabel)
        if axis.get_legend_handles_labels()[1]:  # a run of one question leaves panels without lines
            axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set(xscale="log", yscale="log")
    axes[1].set(ylim=(0, None))
    axes[2].set(xscale="log")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130)
    write_whole(output / "stream.png", drawn.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, action="append", help="UTF-8 text; may be given several times")
    parser.add_argument("--output", type=Path, default=Path("stream-results"))
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--chunk", type=int, default=256, help="tokens per step; each is followed by eviction")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="run only what begins with this name")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(tiny.path(), dtype="float32", device="cpu")
    ids = read(options.text, tokenizer) if options.text else own_text(tokenizer)
    for run in runs(options.tokens, options.chunk):
        if not options.only or run.name.startswith(options.only):
            Stream(run, model, ids, options.output).go()
    summarise(options.output)


def own_text(tokenizer) -> torch.Tensor:
    """The package's own sentences, without a text of the user's: shows memory and time, not what a story needs."""
    import itertools
    import random

    from kvkeep.models.tiny.recall import own_filler

    text = " ".join(itertools.islice(own_filler(random.Random(0)), 5000))
    return tokenizer(text, return_tensors="pt")["input_ids"][0]


if __name__ == "__main__":
    main()

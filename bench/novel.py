"""Do speed and memory stay where they are while a whole novel is read?

    python bench/novel.py                                  # a short look: 20 000 random tokens
    python bench/novel.py --full                           # 200 000 tokens
    python bench/novel.py --text FILE [--tokens 200000]    # a text: its bytes are the tokens

One row, read in chunks under one policy as one long prompt. Each line of the table is a part of the text: its time, the
bytes of the cache after it, and the peak of the process so far, less what it held when the model was loaded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from lib import arguments, finish, kernel, policy, positive, settle_shape, show, speed_config, speed_model, with_shapes
from lib.sizes import MIB
from peers.__main__ import forget_peak, resident_bytes

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.models.prepare import fuse_modules
from kvkeep.types import Phase

COLUMNS = ["tokens read", "seconds", "tokens/s", "cache MiB", "peak MiB"]
WARM_CHUNKS = 3


def tokens_of(options: argparse.Namespace) -> torch.Tensor:
    """The text's bytes, again and again if it is too short, or random tokens: the model's weights are random, too."""
    if options.text is None:
        size = speed_config(1, options.shape).vocab_size
        return torch.randint(size, (options.tokens,), generator=torch.Generator().manual_seed(0))
    try:
        found = torch.tensor(list(options.text.read_bytes()))
    except OSError as error:
        raise SystemExit(f"{options.text} cannot be read: {error.strerror}.") from error
    if not len(found):
        raise SystemExit(f"{options.text} is empty; --text takes a file with a text.")
    return found.repeat(-(-options.tokens // len(found)))[: options.tokens]


class Reader:
    """A model that reads a text into a bounded cache."""

    def __init__(self, options: argparse.Namespace):
        self.model = speed_model(getattr(torch, options.dtype), options.layers, shape=options.shape)
        fuse_modules(self.model)
        self.options = options
        self.cache = self.fresh()

    def fresh(self) -> kvkeep.BoundedCache:
        asked = self.options
        return kvkeep.BoundedCache(self.model.config, asked.policy, asked.budget, positions=asked.positions)

    @torch.inference_mode()
    def read(self, text: torch.Tensor) -> float:
        """Feed a piece of text; the seconds that it took."""
        start = time.perf_counter()
        for chunk in text[None].split(self.options.chunk, dim=1):
            self.cache.phase = Phase.PREFILL
            self.model(input_ids=chunk, **handed(self.model, self.cache), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    parser = with_shapes(arguments(__doc__))
    parser.add_argument("--full", action="store_true", help="200 000 tokens")
    parser.add_argument("--text", type=Path, help="a file; without one the tokens are random")
    parser.add_argument("--tokens", type=positive, help="by default 20 000")
    parser.add_argument("--parts", type=positive, default=10, help="lines of the table")
    parser.add_argument("--policy", type=policy, default="h2o")
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--chunk", type=positive, default=512)
    parser.add_argument("--positions", choices=["true", "slot"], help="by default the policy's own")
    options = parser.parse_args()
    settle_shape(options)
    options.tokens = options.tokens or (200_000 if options.full else 20_000)
    return options


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Each part of the text in turn: what it took, and what is held after it."""
    text, reader = tokens_of(options), Reader(options)
    before, parts, done = resident_bytes("VmRSS"), [], 0
    reader.read(text[: WARM_CHUNKS * options.chunk])
    reader.cache = reader.fresh()
    forget_peak()
    for part in text.chunk(options.parts):
        seconds = reader.read(part)
        done += len(part)
        held, peak = reader.cache.memory().allocated_bytes, max(0, resident_bytes("VmHWM") - before)
        speed = {"seconds": seconds, "tokens_per_s": len(part) / seconds}
        parts.append({"tokens": done, **speed, "cache_bytes": held, "peak_bytes": peak})
    return parts


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    try:
        parts = measure(options)
    except kvkeep.KVKeepError as error:
        raise SystemExit(str(error)) from error
    lines = [
        [
            f"{part['tokens']:,}",
            f"{part['seconds']:.2f}",
            f"{part['tokens_per_s']:.0f}",
            f"{part['cache_bytes'] / MIB:.1f}",
            f"{part['peak_bytes'] / MIB:.0f}",
        ]
        for part in parts
    ]
    title = f"{options.policy} {options.budget}, {options.tokens:,} tokens by {options.chunk}, {options.dtype}"
    show(f"{title}, kernel: {kernel()}", COLUMNS, lines)
    finish({"bench": "novel", **vars(options), "text": options.text and str(options.text), "parts": parts})


if __name__ == "__main__":
    main()

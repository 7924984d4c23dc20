"""transformers: ``generate`` in batches of equal prompts, and its caches, filled without feeding a prompt.

Options: ``rows`` (the batch), ``chunk`` (``prefill_chunk_size``, ``None``: whole prompts). Of a GGUF file it makes a
model of unpacked weights.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

from peers import Outcome, Prompt, Run, Unavailable, Work, in_batches


class Clock(StoppingCriteria):
    """Stops nothing; notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(work: Work) -> Run:
    rows, chunk = work.options["rows"], work.options.get("chunk")
    if rows < 1:
        raise Unavailable("not one row of its cache fits into the memory")
    torch.set_num_threads(work.threads)
    place = Path(work.model)
    source = {"gguf_file": place.name} if place.suffix == ".gguf" else {}
    folder = place.parent if source else place
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, work.dtype), **source).eval()
    chunked = {} if chunk is None else {"prefill_chunk_size": chunk}

    def one(prompts: list[Prompt], new_tokens: int) -> Outcome:
        ids, clock = torch.tensor(prompts), Clock()
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **chunked,
        )
        seconds = time.perf_counter() - start
        tpot = [(clock.times[-1] - clock.times[0]) / (new_tokens - 1)] * len(ids) if new_tokens > 1 else []
        return Outcome(len(ids), seconds, out[:, ids.shape[1] :].tolist(), [clock.times[0] - start] * len(ids), tpot)

    return lambda prompts, new_tokens: in_batches(prompts, rows, work.limit_s, lambda part: one(part, new_tokens))


def dynamic_cache(model, *, rows: int, tokens: int) -> Cache:
    """A cache that grows by concatenation."""
    return _fill(DynamicCache(config=model.config), model, rows, tokens)


def static_cache(model, *, rows: int, tokens: int, room: int) -> Cache:
    """A cache of constant size, with room for so many more tokens."""
    return _fill(StaticCache(config=model.config, max_cache_len=tokens + room), model, rows, tokens)


def _fill(cache: Cache, model, rows: int, tokens: int) -> Cache:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, tokens, dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (
            torch.randn(shape, dtype=model.dtype, device=model.device).expand(rows, -1, -1, -1) for _ in range(2)
        )
        cache.update(keys, values, layer)
    return cache

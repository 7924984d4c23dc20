"""kvkeep: the engine, and a cache that is filled without feeding a prompt.

Options: ``policy``, ``budget``, ``chunk`` (prompt tokens per step, ``None``: whole), ``kv_bytes`` (memory of all rows),
``decode_every``, ``prompts_first`` and ``kv_bits`` (see `kvkeep.Engine`).
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.store import inference
from kvkeep.models.prepare import prepare_for_rows
from kvkeep.types import Phase
from peers import Outcome, Prompt, Run, Unavailable, Work


def load(work: Work) -> Run:
    torch.set_num_threads(work.threads)
    if work.model.endswith(".gguf"):
        model, _ = kvkeep.load(work.model, device="cpu")  # as the other systems
    else:  # models for speed have no tokenizer, without which kvkeep loads none
        model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).eval()
    prepare_for_rows(model, work.requests)
    options = work.options

    def run(prompts: list[Prompt], new_tokens: int) -> Outcome:
        try:
            engine = Engine(
                model,
                policy=options["policy"],
                budget=options["budget"],
                rows=len(prompts),
                kv_memory=options.get("kv_bytes"),
                prefill_chunk=options["chunk"],
                decode_every=options.get("decode_every"),
                prompts_first=options.get("prompts_first", False),
                kv_bits=options.get("kv_bits"),
            )
        except kvkeep.BudgetError as error:
            raise Unavailable(str(error)) from error
        sampling = SamplingParams(max_new_tokens=new_tokens)
        requests = [Request(prompt=prompt, sampling=sampling, ignore_end=True) for prompt in prompts]
        start = time.perf_counter()
        results = engine.generate(requests)
        return Outcome(
            rows=engine.rows,
            seconds=time.perf_counter() - start,
            tokens=[result.token_ids for result in results],
            first_s=[result.ttft_s for result in results],
            tpot_s=[result.tpot_s for result in results if result.tpot_s is not None],
        )

    return run


def filled_cache(
    model, policy: str, budget: int, *, rows: int, tokens: int, kv_bits: str | None = None
) -> kvkeep.BoundedCache:
    """A cache as it is after ``tokens`` tokens: the newest half of the budget, and older tokens drawn at random."""
    config = model.config
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = kvkeep.BoundedCache(config, policy=policy, budget=budget, kv_bits=kv_bits)
    kept = min(budget, tokens)
    newest = kept - kept // 2
    recent = torch.arange(tokens - newest, tokens).expand(rows, heads, newest)
    for layer in cache.bounded_layers().values():
        one_row = (torch.randn(1, heads, kept, dim, dtype=model.dtype) for _ in range(2))
        keys, values = (tensor.expand(rows, -1, -1, -1) for tensor in one_row)
        layer.hold(inference(layer.new_block)(keys, values), columns=tokens)
        older = torch.rand(rows, heads, tokens - newest).topk(kept - newest).indices.sort().values
        layer.store.fill(keys, values, torch.cat([older, recent], dim=-1).to(torch.int32))
        for state in layer.state.values():
            state[..., :kept] = torch.rand(rows, heads, kept)
        layer.block.advance(tokens, None, Phase.PREFILL)
    return cache

"""transformers: ``generate_batch``, continuous batching over a paged cache.

It takes its cache within the call, so that is part of the time; kvkeep's engine, and OpenVINO's and vLLM's, have theirs
before the first prompt comes.

Options: ``kv_bytes`` (memory for all pages), ``token_bytes`` (keys and values of one token in all layers).
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from peers import Outcome, Prompt, Run, Unavailable, Work

PAGE_TOKENS = 32
"""Small pages waste little of the memory; on a CPU nothing asks for larger ones."""

STEP_TOKENS = 512
"""Prompt and new tokens in one step. Each step has a dense mask over these and the whole cache."""


def load(work: Work) -> Run:
    torch.set_num_threads(work.threads)
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).eval()
    kv_bytes, token_bytes = work.options["kv_bytes"], work.options["token_bytes"]
    pages = kv_bytes // (PAGE_TOKENS * token_bytes)
    per_request = -(-(work.prompt_tokens + work.new_tokens) // PAGE_TOKENS)
    if pages < per_request:
        raise Unavailable(f"one request needs {per_request} pages, {pages} fit")

    def run(prompts: list[Prompt], new_tokens: int) -> Outcome:
        greedy = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=STEP_TOKENS)
        start = time.perf_counter()
        done = model.generate_batch(
            prompts,
            generation_config=greedy,
            continuous_batching_config=batching,
            warmup=False,
            record_timestamps=True,
        )
        seconds = time.perf_counter() - start
        found = [done[f"req_{i}"] for i in range(len(prompts))]
        times = [one.timestamps for one in found]
        tpot = [(at[-1] - at[0]) / (new_tokens - 1) for at in times] if new_tokens > 1 else []
        rows = min(len(prompts), pages // per_request)
        return Outcome(rows, seconds, [one.generated_tokens for one in found], [at[0] - start for at in times], tpot)

    return run

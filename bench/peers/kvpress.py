"""kvpress: a press cuts the prompt's cache, then tokens are decoded one by one, as in its text generation pipeline.

The pipeline takes one text at a time, and so does this. What is generated is not cut: the cache grows by it.
Options: ``press`` (a class of kvpress), ``budget`` (tokens of the prompt that stay), ``attention``.
"""

from __future__ import annotations

import os
import time

from peers import Outcome, Prompt, Run, Unavailable, Work, in_batches

try:
    import kvpress
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
except ImportError as error:
    raise Unavailable(f"{error}; `make peers` installs kvpress in an environment of its own") from error

SHORTEST = 64
"""Prompts of so many tokens or fewer are not cut: presses look at the attention of that many rows."""


def load(work: Work) -> Run:
    if work.options["attention"] == "eager":
        check_memory(work)
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=getattr(torch, work.dtype), attn_implementation=work.options["attention"]
    ).eval()

    @torch.inference_mode()
    def one(prompt: Prompt, new_tokens: int) -> Outcome:
        start = time.perf_counter()
        context, last = torch.tensor([prompt[:-1]]), torch.tensor([prompt[-1:]])
        spared = work.options["budget"] / len(prompt)
        press = getattr(kvpress, work.options["press"])(
            compression_ratio=max(0.0, 1.0 - spared) if len(prompt) > SHORTEST + 1 else 0.0
        )
        cache = DynamicCache()
        with press(model):
            model.model(input_ids=context, past_key_values=cache)
        tokens: list[int] = []
        times: list[float] = []
        for position in range(len(prompt) - 1, len(prompt) - 1 + new_tokens):
            logits = model(input_ids=last, past_key_values=cache, position_ids=torch.tensor([[position]])).logits
            last = logits[:, -1:].argmax(dim=-1)
            tokens.append(int(last))
            times.append(time.perf_counter())
        tpot = [(times[-1] - times[0]) / (new_tokens - 1)] if new_tokens > 1 else []
        return Outcome(1, times[-1] - start, [tokens], [times[0] - start], tpot)

    return lambda prompts, new_tokens: in_batches(prompts, 1, work.limit_s, lambda part: one(part[0], new_tokens))


def check_memory(work: Work) -> None:
    """Refuse what would fill the machine: eager attention makes a matrix of tokens x tokens per head, and copies."""
    heads = AutoConfig.from_pretrained(work.model).num_attention_heads
    needed = 3 * heads * work.prompt_tokens**2 * 4
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there // 2:
        raise Unavailable(f"eager attention needs about {needed / 2**30:.0f} GiB for {work.prompt_tokens} tokens")

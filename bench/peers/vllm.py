"""vLLM's build for CPUs: its engine in this process; the model is a folder.

Its cache is given room for the tokens of the work, which it takes when it starts. Else it would take gigabytes.
"""

from __future__ import annotations

import os
import time

from peers import Outcome, Prompt, Run, Unavailable, Work

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when it is imported

try:
    import torch
    from transformers import AutoConfig
    from vllm import EngineArgs, LLMEngine, SamplingParams
except ImportError as error:
    raise Unavailable(f"{error}; `make peers` installs it in an environment of its own") from error

BLOCK = 128
"""Tokens of a block of its cache on a CPU."""


def load(work: Work) -> Run:
    if work.model.endswith(".gguf"):
        raise Unavailable("it reads folders only")
    tokens = max(map(len, work.prompts())) + work.new_tokens
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            work.model,
            dtype=work.dtype,
            max_model_len=tokens,
            max_num_seqs=work.requests,
            kv_cache_memory_bytes=room(work, tokens),
            enable_prefix_caching=False,
        )
    )

    def run(prompts: list[Prompt], new_tokens: int) -> Outcome:
        asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        for row, prompt in enumerate(prompts):
            engine.add_request(str(row), {"prompt_token_ids": prompt}, asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                row, now = int(output.request_id), time.perf_counter() - start
                new = list(output.outputs[0].token_ids)[len(tokens[row]) :]
                tokens[row] += new
                times[row] += [now] * len(new)
        return Outcome.at_once(tokens, times, time.perf_counter() - start)

    return run


def room(work: Work, tokens: int) -> int:
    """The bytes of keys and values of all rows, in whole blocks, and of two more blocks for each row."""
    config = AutoConfig.from_pretrained(work.model).get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = (
        BLOCK * 2 * config.num_hidden_layers * config.num_key_value_heads * dim * getattr(torch, work.dtype).itemsize
    )
    return work.requests * (-(-tokens // BLOCK) + 2) * block

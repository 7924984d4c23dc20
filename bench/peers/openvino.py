"""OpenVINO GenAI's continuous batching on a CPU; the model is a GGUF file, which it reads itself.

Options: ``budget``: the most tokens that its cache eviction keeps of a sequence; without it nothing is evicted. Prompts
are read in whole steps of its scheduler, as it does by default.
"""

from __future__ import annotations

import time

from peers import Outcome, Prompt, Run, Unavailable, Work

try:
    import numpy
    import openvino
    import openvino_genai
except ImportError as error:
    raise Unavailable(f"{error}; `make peers` installs it in an environment of its own") from error

BLOCK = 32
"""Tokens of a block of its cache on a CPU, which it evicts as a whole."""


def load(work: Work) -> Run:
    if not work.model.endswith(".gguf"):
        raise Unavailable("it reads GGUF files, or its own format")
    scheduler = openvino_genai.SchedulerConfig()
    if (budget := work.options.get("budget")) is not None:
        scheduler.use_cache_eviction, scheduler.cache_eviction_config = True, eviction(int(budget))
    try:
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            work.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": work.threads}
        )
    except RuntimeError as error:  # e.g. an architecture that its reader does not know
        raise Unavailable(str(error).strip().splitlines()[-1]) from error

    def run(prompts: list[Prompt], new_tokens: int) -> Outcome:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        handles = [
            pipeline.add_request(row, openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
            for row, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for row, handle in enumerate(handles):
                while handle.can_read():
                    new = next(iter(handle.read().values())).generated_ids
                    tokens[row] += new
                    times[row] += [now] * len(new)
        return Outcome.at_once(tokens, times, time.perf_counter() - start)

    return run


def eviction(budget: int) -> openvino_genai.CacheEvictionConfig:
    """Its own scores, with sizes in whole blocks: the first block, a quarter of the budget for the newest tokens.

    Raises:
        Unavailable: the budget is smaller than four blocks.
    """
    blocks = budget // BLOCK
    if blocks < 4:
        raise Unavailable(f"it evicts blocks of {BLOCK} tokens, and {budget} tokens are fewer than 4 blocks")
    return openvino_genai.CacheEvictionConfig(
        start_size=BLOCK,
        recent_size=blocks // 4 * BLOCK,
        max_cache_size=blocks * BLOCK,
        aggregation_mode=openvino_genai.AggregationMode.NORM_SUM,
    )

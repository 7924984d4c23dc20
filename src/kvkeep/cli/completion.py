"""The work of ``kvkeep generate``: check everything, load the model, run, and show the result.

All that can be refused is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxtyping import Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.cache import BoundedCache
from kvkeep.cli import compare, console
from kvkeep.cli.request import DEFAULT_BUDGET, Request
from kvkeep.memory import Memory
from kvkeep.models import text
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.generation import remark
from kvkeep.models.load import Checkpoint, embedded, find, read_weights
from kvkeep.models.quiet import quiet
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec


@dataclass(frozen=True)
class Job:
    """A request that has passed all checks, with its model.

    Attributes:
        request: what the user asked for.
        checkpoint: configuration and tokenizer.
        writer: the model.
        prompt: token ids.
        policy: the eviction policy.
        budget: tokens per layer and head.
        sampling: how tokens are chosen.
    """

    request: Request
    checkpoint: Checkpoint
    writer: text.Writer
    prompt: Int[Tensor, "1 T"]
    policy: Policy
    budget: int
    sampling: text.Sampling

    @property
    def name(self) -> str:
        """The policy as the user would write it."""
        return spec(self.policy)


def serve(request: Request) -> None:
    """Do what ``kvkeep generate`` was asked for.

    Raises:
        KVKeepError: something in the request or the model cannot be used.
    """
    with quiet():
        job = prepare(request)
        if request.compare:
            _serve_comparison(job)
        else:
            _serve_one(job)


def prepare(request: Request) -> Job:
    """Check a request from the cheapest test to the dearest, and load its model.

    Raises:
        KVKeepError: something in the request or the model cannot be used.
    """
    sampling = sampling_of(request)
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    if request.keep_ratio is not None:
        budgets.from_ratio(request.keep_ratio, tokens=1)
    parse_dtype(request.dtype)
    parse_device(request.device)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    prompt = text.encode(checkpoint, request.prompt, raw=request.raw)
    text.check_length(checkpoint, prompt.shape[1], sampling.max_new_tokens)
    budget = _choose_budget(request, policy, prompt.shape[1])
    _cache(request, checkpoint, policy, budget)  # checks the numbers
    writer = text.Writer(checkpoint, read_weights(checkpoint, request.dtype, request.device))
    if left_out := remark(writer.model):
        console.note(left_out)
    return Job(request, checkpoint, writer, prompt, policy, budget, sampling)


def sampling_of(request: Request) -> text.Sampling:
    """How a request wants tokens to be chosen.

    Raises:
        InputError: a number is out of its range.
    """
    return text.Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
    )


def _choose_budget(request: Request, policy: Policy, prompt_tokens: int) -> int:
    if request.keep_ratio is not None:
        return budgets.from_ratio(request.keep_ratio, prompt_tokens)
    if request.budget is not None:
        return request.budget
    total = prompt_tokens + request.max_new_tokens
    if not policy.evicts:
        return total
    sinks, recent = policy.protected(total)
    return min(DEFAULT_BUDGET, max(total, sinks + int(recent)))  # more slots than tokens would only cost memory


def _run_bounded(job: Job, on_text: Callable[[str], object]) -> tuple[text.Completion, Memory]:
    chunk = job.request.prefill_chunk
    cache = _cache(job.request, job.checkpoint, job.policy, job.budget)
    return job.writer.complete(job.prompt, cache, job.sampling, prefill_chunk=chunk, on_text=on_text), cache.memory()


def _cache(request: Request, checkpoint: Checkpoint, policy: Policy, budget: int) -> BoundedCache:
    """An unused cache for one prompt."""
    return BoundedCache(
        checkpoint.config,
        policy,
        budget,
        prefill_chunk=request.prefill_chunk,
        layer_budget=request.layer_budget,
        positions=request.positions,
    )


def _run_full(job: Job) -> tuple[text.Completion, int]:
    cache = job.writer.full_cache()
    completion = job.writer.complete(job.prompt, cache, job.sampling, prefill_chunk=job.request.prefill_chunk)
    return completion, text.full_cache_bytes(cache)


def _ignore(piece: str) -> None:
    """Show nothing yet."""


def _serve_one(job: Job) -> None:
    if job.request.json:
        completion, memory = _run_bounded(job, _ignore)
        console.write_json({**_describe(job), **_result(completion), "memory": _measure(memory)})
        return
    with console.streamed_text() as write:
        completion, memory = _run_bounded(job, write)
    screen = console.err()
    screen.print()
    screen.print(console.facts(_summarise(job, completion, memory)))
    _remark(job, completion)


def _serve_comparison(job: Job) -> None:
    console.progress(f"running {job.name} with a budget of {job.budget} …")
    bounded, memory = _run_bounded(job, _ignore)
    console.progress("running the full cache …")
    full, full_bytes = _run_full(job)
    difference = compare.measure(bounded.token_ids, full.token_ids, job.writer.show_token)
    if job.request.json:
        console.write_json(
            {
                **_describe(job),
                **_result(bounded),
                "memory": _measure(memory),
                "full": {**_result(full), "memory": {"allocated_bytes": full_bytes}},
                "comparison": asdict(difference),
            }
        )
        return
    left = compare.Side(job.name, f"budget {job.budget}", bounded, memory.allocated_bytes)
    right = compare.Side("full cache", "keeps everything", full, full_bytes)
    compare.show(left, right, difference)
    _remark(job, bounded)


def _describe(job: Job) -> dict[str, object]:
    return {
        "model": job.checkpoint.name,
        "dtype": job.writer.dtype,
        "device": job.writer.device,
        "policy": job.name,
        "budget": job.budget,
        "prefill_chunk": job.request.prefill_chunk,
        "layer_budget": job.request.layer_budget or job.policy.layer_budget,
        "positions": _cache(job.request, job.checkpoint, job.policy, job.budget).position_mode,
        "sampling": asdict(job.sampling),
    }


def _result(completion: text.Completion) -> dict[str, object]:
    ids = completion.token_ids
    return {
        "text": completion.text,
        "token_ids": ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": len(ids),
        "ttft_s": completion.ttft_s,
        "tpot_s": completion.tpot_s,
    }


def _measure(memory: Memory) -> dict[str, object]:
    return {**asdict(memory), "compression": memory.compression}


def _summarise(job: Job, completion: text.Completion, memory: Memory) -> dict[str, str]:
    new = len(completion.token_ids)
    speed = f"{console.show_speed(completion.tpot_s)}, " if completion.tpot_s else ""
    end = "the model ended its text" if completion.finish_reason == "stop" else "stopped at --max-new-tokens"
    return {
        "policy": f"{job.name}, budget {job.budget}; {job.writer.dtype} on {job.writer.device}",
        "prompt": f"{console.count(completion.prompt_tokens, 'token')} in {console.show_seconds(completion.ttft_s)}",
        "new": f"{console.count(new, 'token')}, {speed}{end}",
        "KV memory": f"{console.show_bytes(memory.allocated_bytes)} held, "
        f"{console.show_bytes(memory.full_bytes)} in a full cache, "
        f"compression {console.show_factor(memory.compression)}",
    }


def _remark(job: Job, completion: text.Completion) -> None:
    """Notes on what a user may not expect."""
    total = completion.prompt_tokens + len(completion.token_ids)
    trained = job.checkpoint.trained_length
    if job.policy.evicts and job.budget >= total:
        console.note(
            f"nothing was evicted: the budget of {job.budget} is not smaller than the {total} tokens of this run."
        )
    if trained and total > trained:
        console.note(f"{total} tokens are more than the {trained} that the model was trained for.")

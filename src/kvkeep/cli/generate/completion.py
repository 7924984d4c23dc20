"""The work of ``kvkeep generate`` for one prompt, which the engine runs as a batch of one.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from kvkeep import budget as budgets
from kvkeep import engine as engines
from kvkeep.cli import console
from kvkeep.cli.generate import compare
from kvkeep.cli.generate.request import Request
from kvkeep.engine import Engine, Result
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import KVKeepError
from kvkeep.layout import Layout
from kvkeep.memory import Memory
from kvkeep.models import text, threads
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.generation import remark
from kvkeep.models.load import Checkpoint, embedded, find, quiet, read_weights
from kvkeep.models.quantised import check_format
from kvkeep.planning.plan import default_budget
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec


@dataclass(frozen=True)
class Job:
    """A request that has passed all checks, with its model.

    Attributes:
        request: the options of the command.
        checkpoint: the model's configuration and tokenizer.
        writer: the model.
        prompt: token ids.
        policy: the eviction policy.
        budget: tokens per layer and head.
        position_mode: ``true`` or ``slot``.
        sampling: how tokens are chosen.
    """

    request: Request
    checkpoint: Checkpoint
    writer: text.Writer
    prompt: Sequence[int]
    policy: Policy
    budget: int
    position_mode: str
    sampling: Sampling

    @property
    def name(self) -> str:
        """The policy as the user would write it."""
        return spec(self.policy)


def serve(request: Request) -> None:
    """Continue a prompt and print the text.

    Raises:
        KVKeepError: the request or the model cannot be used, or a step failed.
        Exit: the user pressed Ctrl-C; the text that was printed stays.
    """
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            job = prepare(request)
            if request.compare:
                _serve_comparison(job)
            else:
                _serve_one(job)
    except KeyboardInterrupt as interrupt:
        console.note("stopped before the end of the text")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def prepare(request: Request) -> Job:
    """Check a request, cheap tests first, and load its model.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    sampling = sampling_of(request)
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    if request.keep_ratio is not None:
        budgets.from_ratio(request.keep_ratio, tokens=1)
    parse_dtype(request.dtype)
    check_format(request.load_in)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    prompt: list[int] = text.encode(checkpoint, request.prompt, raw=request.raw)[0].tolist()
    text.check_length(checkpoint, len(prompt), sampling.max_new_tokens)
    budget = _choose_budget(request, policy, len(prompt))
    layout = Layout.of(checkpoint.config, policy, layer_budget=request.layer_budget, positions=request.positions)
    layout.slots(budget)  # checks the numbers
    writer = text.Writer(checkpoint, read_weights(checkpoint, request.dtype, request.device, load_in=request.load_in))
    threads.use(writer.model, request.threads)
    if left_out := remark(writer.model):
        console.note(left_out)
    mode = "true" if layout.rotation is None else "slot"
    return Job(request, checkpoint, writer, prompt, policy, budget, mode, sampling)


def sampling_of(request: Request) -> Sampling:
    """The sampling options of a request.

    Raises:
        InputError: a number is out of range.
    """
    return Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
    )


def engine_for(writer: text.Writer, request: Request, **options: Any) -> Engine:
    """An engine for a request, for one prompt or many.

    Args:
        writer: the model.
        request: the options of the command.
        options: options of `Engine` that replace the request's.
    """
    asked = {
        "policy": request.policy,
        "prefill_chunk": request.prefill_chunk,
        "layer_budget": request.layer_budget,
        "positions": request.positions,
    }
    return Engine(writer.model, writer.checkpoint.tokenizer, **{**asked, **options})


def _choose_budget(request: Request, policy: Policy, prompt_tokens: int) -> int:
    if request.keep_ratio is not None:
        return budgets.from_ratio(request.keep_ratio, prompt_tokens)
    if request.budget is not None:
        return request.budget
    return default_budget(policy, prompt_tokens + request.max_new_tokens)


def _run_bounded(job: Job, on_text: Callable[[str], object]) -> Result:
    return _run(job, engine_for(job.writer, job.request, budget=job.budget, rows=1), on_text)


def _run_full(job: Job) -> Result:
    """Run the same prompt with a full cache, without the request's options about the bounded one."""
    total = len(job.prompt) + job.sampling.max_new_tokens
    options = {"policy": "full", "layer_budget": None, "positions": None}
    return _run(job, engine_for(job.writer, job.request, budget=total, rows=1, **options), _ignore)


def _run(job: Job, engine: Engine, on_text: Callable[[str], object]) -> Result:
    """Continue the prompt and call ``on_text`` with each piece of text as soon as it is final.

    Raises:
        KVKeepError: the engine refuses the prompt, or a step failed.
    """
    result = None
    for event in engine.stream(engines.Request(prompt=job.prompt, sampling=job.sampling)):
        if event.text:
            on_text(event.text)
        result = event.result
    assert result is not None
    if result.finish_reason == "error":
        new = console.count(len(result.token_ids), "new token")
        raise KVKeepError(f"The text ends after {new}, since a step failed. {result.error}")
    return result


def _ignore(piece: str) -> None:
    """Print nothing."""


def _serve_one(job: Job) -> None:
    if job.request.json:
        result = _run_bounded(job, _ignore)
        console.write_json({**_describe(job), **_result(result), "memory": _measure(result.memory)})
        return
    with console.streamed_text() as write:
        result = _run_bounded(job, write)
    screen = console.err()
    screen.print()
    screen.print(console.facts(_summarise(job, result)))
    _remark(job, result)


def _serve_comparison(job: Job) -> None:
    console.progress(f"running {job.name} with a budget of {job.budget} …")
    bounded = _run_bounded(job, _ignore)
    console.progress("running the full cache …")
    full = _run_full(job)
    difference = compare.measure(bounded.token_ids, full.token_ids, job.writer.show_token)
    full_bytes = full.memory.full_bytes  # bytes of the tokens; the run's slots had room for more
    if job.request.json:
        console.write_json(
            {
                **_describe(job),
                **_result(bounded),
                "memory": _measure(bounded.memory),
                "full": {**_result(full), "memory": {"allocated_bytes": full_bytes}},
                "comparison": asdict(difference),
            }
        )
        return
    left = compare.Side(job.name, f"budget {job.budget}", bounded, bounded.memory.allocated_bytes)
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
        "layer_budget": job.request.layer_budget or job.policy.defaults.layer_budget,
        "positions": job.position_mode,
        "sampling": asdict(job.sampling),
    }


def _result(result: Result) -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
    }


def _measure(memory: Memory) -> dict[str, object]:
    return {**asdict(memory), "compression": memory.compression}


def _summarise(job: Job, result: Result) -> dict[str, str]:
    new, memory = len(result.token_ids), result.memory
    speed = f"{console.show_speed(result.tpot_s)}, " if result.tpot_s else ""
    end = "the model ended its text" if result.finish_reason == "stop" else "stopped at --max-new-tokens"
    return {
        "policy": f"{job.name}, budget {job.budget}; {job.writer.dtype} on {job.writer.device}",
        "prompt": f"{console.count(result.prompt_tokens, 'token')} in {console.show_seconds(result.ttft_s or 0.0)}",
        "new": f"{console.count(new, 'token')}, {speed}{end}",
        "KV memory": f"{console.show_bytes(memory.allocated_bytes)} held, "
        f"{console.show_bytes(memory.full_bytes)} in a full cache, "
        f"compression {console.show_factor(memory.compression)}",
    }


def _remark(job: Job, result: Result) -> None:
    """Print notes on results that the user may not expect."""
    total = result.prompt_tokens + len(result.token_ids)
    trained = job.checkpoint.trained_length
    if job.policy.evicts and job.budget >= total:
        console.note(
            f"nothing was evicted: the budget of {job.budget} is not smaller than the {total} tokens of this run."
        )
    if trained and total > trained:
        console.note(f"{total} tokens are more than the {trained} that the model was trained for.")

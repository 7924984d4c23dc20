"""The work of ``kvkeep generate`` for one prompt, which the engine runs as a batch of one.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import typer

from kvkeep import engine as engines
from kvkeep.cli import console
from kvkeep.cli.generate import compare
from kvkeep.cli.generate.prepare import Job, prepare
from kvkeep.cli.generate.prepare import engine_for as engine_for
from kvkeep.cli.generate.prepare import sampling_of as sampling_of
from kvkeep.cli.generate.request import Request
from kvkeep.cli.generate.summary import nothing_evicted, remark, summarise
from kvkeep.engine import Engine, Result
from kvkeep.errors import KVKeepError
from kvkeep.kv.memory_usage import Memory
from kvkeep.models import tensor_parallel, threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import quiet


def serve(request: Request) -> None:
    """Continue a prompt and print the text.

    Raises:
        KVKeepError: the request or the model cannot be used, or a step failed.
        Exit: the user pressed Ctrl-C; the text that was printed stays.
    """
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)), tensor_parallel.left():
            job = prepare(request)
            if request.compare:
                _serve_comparison(job)
            else:
                _serve_one(job)
    except KeyboardInterrupt as interrupt:
        console.note("stopped before the end of the text")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _run_bounded(job: Job, on_text: Callable[[str], object]) -> Result:
    return _run(job.asked, engine_for(job.writer, job.request, budget=job.budget, rows=1), on_text)


def _run_full(job: Job) -> Result:
    """Run the same prompt with a full cache, without the request's options about the bounded one."""
    total = len(job.prompt) + job.sampling.max_new_tokens
    options = dict.fromkeys(("layer_budget", "head_budget", "positions", "kv_bits", "guard"))
    asked = replace(job.asked, pins=())
    return _run(asked, engine_for(job.writer, job.request, policy="full", budget=total, rows=1, **options), _ignore)


def _run(asked: engines.Request, engine: Engine, on_text: Callable[[str], object]) -> Result:
    """Continue a prompt and call ``on_text`` with each piece of text as soon as it is final.

    Raises:
        KVKeepError: the engine refuses the prompt, or a step failed.
    """
    result = None
    for event in engine.stream(asked):
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
    screen.print(console.facts(summarise(job, result)))
    remark(job, result)


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
    left = compare.Side(job.name, f"budget {bounded.budget}", bounded, bounded.memory.allocated_bytes)
    right = compare.Side("full cache", "keeps everything", full, full_bytes)
    compare.show(left, right, difference)
    if job.policy.evicts and (reason := nothing_evicted(job, bounded)):
        console.note(f"{reason}.")
    remark(job, bounded)


def _describe(job: Job) -> dict[str, object]:
    return {
        "model": job.checkpoint.name,
        "dtype": job.writer.dtype,
        "device": job.writer.device,
        "policy": job.name,
        "budget": job.budget,
        "prefill_chunk": job.request.prefill_chunk,
        "layer_budget": job.request.layer_budget or job.policy.defaults.layer_budget,
        "head_budget": job.request.head_budget,
        "kv_bits": job.request.kv_bits,
        "positions": job.position_mode,
        "pins": job.pins,
        "guard": job.request.guard,
        "sampling": asdict(job.sampling),
        **({} if job.memory is None else {"memory_file": job.memory.file}),
    }


def _result(result: Result) -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "new_tokens": len(result.token_ids),
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        "budget": result.budget,
        "lost_mass": asdict(result.lost_mass),
        "guarded": result.guarded,
    }


def _measure(memory: Memory) -> dict[str, object]:
    return {**asdict(memory), "compression": memory.compression}

"""The summary of a finished prompt, and notes on it."""

from __future__ import annotations

from kvkeep.cli import console
from kvkeep.cli.generate.prepare import Job
from kvkeep.engine import Result


def summarise(job: Job, result: Result) -> dict[str, str]:
    """The lines of the summary: name → text."""
    new = len(result.token_ids)
    speed = f"{console.show_speed(result.tpot_s)}, " if result.tpot_s else ""
    end = "the model ended its text" if result.finish_reason == "stop" else "stopped at --max-new-tokens"
    room = _budget(job, result) if job.policy.evicts else f"room for {console.count(job.budget, 'token')}"
    lost, read = _lost(result), result.prompt_tokens - result.cached_tokens
    after = f", after {console.count(result.cached_tokens, 'remembered token')}" if result.cached_tokens else ""
    return {
        "policy": f"{job.name}, {room}; {job.writer.dtype} on {job.writer.device}",
        "prompt": f"{console.count(read, 'token')} in {console.show_seconds(result.ttft_s or 0.0)}{after}",
        "new": f"{console.count(new, 'token')}, {speed}{end}",
        "KV memory": _memory(job, result),
        **({"lost": lost} if lost and not nothing_evicted(job, result) else {}),
    }


def _budget(job: Job, result: Result) -> str:
    if result.budget == job.budget:
        return f"budget {job.budget}"
    return f"budget {result.budget} of {job.budget}, chosen by --guard"


def _lost(result: Result) -> str:
    """The share of attention that evicted tokens carried, as far as it is known."""
    lost = result.lost_mass
    parts = [] if lost.prompt is None else [f"{_percent(lost.prompt)} of the attention at the prompt's end"]
    if lost.decode is not None:
        parts.append(f"{_percent(lost.decode)} in each new token's step")
    return ", ".join(parts)


def _percent(share: float) -> str:
    if share < 1e-4:
        return "less than 0.01 %" if share > 0 else "0 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def remark(job: Job, result: Result) -> None:
    """Print notes on results that the user may not expect."""
    total = result.prompt_tokens + len(result.token_ids)
    lost, guard = result.lost_mass.prompt, job.request.guard
    if lost is not None and guard is not None and result.guarded is False:
        console.note(
            f"the whole budget of {job.budget} loses {_percent(lost)} of the attention, more than --guard {guard:g}; "
            "raise --budget."
        )
    trained = job.checkpoint.trained_length
    if trained and total > trained:
        console.note(f"{total} tokens are more than the {trained} that the model was trained for.")


def nothing_evicted(job: Job, result: Result) -> str | None:
    """Why the policy evicted nothing; ``None`` if it did, or may have."""
    fed = result.prompt_tokens + len(result.token_ids) - 1  # the last token is never fed
    if not job.policy.evicts:
        return f"{job.name} keeps every token"
    if job.layout.policy.spreads or job.layout.profile:
        return None  # a head may have less than the budget
    room = job.layout.room(result.budget)
    if room is None:
        return "nothing was evicted: every layer's sliding window fits the budget"
    if fed > room - (job.policy.grows.room if job.policy.grows else 0):
        return None
    return f"nothing was evicted: the text of {console.count(fed + 1, 'token')} is not longer than the budget"


def _memory(job: Job, result: Result) -> str:
    memory = result.memory
    held, full = console.show_bytes(memory.allocated_bytes), console.show_bytes(memory.full_bytes)
    if reason := nothing_evicted(job, result):
        return f"{held} held; {reason}"
    if memory.compression < 1:
        return f"{held} held, {full} in a full cache: so short a text needs no budget"
    return f"{held} held, {full} in a full cache, compression {console.show_factor(memory.compression)}"

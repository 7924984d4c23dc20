"""The numbers of an answer: tokens as OpenAI's API counts them, and what kvkeep kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.engine import Result
from kvkeep.openai import responses


def usage_of(results: Sequence[Result], n: int) -> dict[str, Any]:
    """The usage of an answer with ``n`` texts for each prompt."""
    return {**responses.usage(results, n), "kvkeep": kept_of(results)}


def kept_of(results: Sequence[Result]) -> dict[str, Any]:
    """The tokens that were seen and kept, summed over texts, and the mean of the attention that was lost."""
    return {
        "kept_tokens": sum(min(one.budget, _seen(one)) for one in results),
        "seen_tokens": sum(map(_seen, results)),
        "kv_bytes": sum(one.memory.allocated_bytes for one in results),
        "lost_mass": {
            "prompt": _mean([one.lost_mass.prompt for one in results]),
            "decode": _mean([one.lost_mass.decode for one in results]),
        },
    }


def _seen(result: Result) -> int:
    return result.prompt_tokens + len(result.token_ids)


def _mean(found: Sequence[float | None]) -> float | None:
    known = [one for one in found if one is not None]
    return sum(known) / len(known) if known else None

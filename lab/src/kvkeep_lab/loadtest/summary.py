"""The numbers of a run: percentiles of times, throughput, and failures by their kinds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvkeep_lab.loadtest.client import RequestOutcome
from kvkeep_lab.loadtest.percentiles import spread


def summary(outcomes: Sequence[RequestOutcome], *, seconds: float) -> dict[str, Any]:
    """All numbers of a run.

    Times count from the moment at which a request was planned, so a client that is late hides no waiting.

    Args:
        outcomes: of all requests.
        seconds: from the first request to the last answer.
    """
    good = [one for one in outcomes if one.error is None]
    written = [one for one in good if one.times]
    new, read = sum(one.tokens for one in good), sum(one.prompt_tokens or 0 for one in good)
    counted = all(one.new_tokens is not None for one in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(Counter(one.error for one in outcomes if one.error is not None).most_common()),
        "first_error": next((one.detail for one in outcomes if one.detail), None),
        "seconds": seconds,
        "ttft_s": spread([one.times[0] - one.planned for one in written]),
        "tpot_s": spread([(one.times[-1] - one.times[0]) / (one.tokens - 1) for one in written if one.tokens > 1]),
        "stall_s": spread([_longest_gap(one.times) for one in written if len(one.times) > 1]),
        "request_s": spread([one.ended - one.planned for one in good]),
        "late_s": spread([one.sent - one.planned for one in outcomes]),
        "prompt_tokens": read,
        "cached_tokens": sum(one.cached_tokens or 0 for one in good),
        "new_tokens": new,
        "tokens_counted_by": "server" if counted else "pieces of the stream",
        "requests_per_s": len(good) / seconds,
        "prompt_tokens_per_s": read / seconds,
        "new_tokens_per_s": new / seconds,
    }


def _longest_gap(times: Sequence[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(times))

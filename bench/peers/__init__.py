"""The systems that are measured side by side, each in one file.

A peer is a module with one function, ``load(work)``: bring the model of ``work`` into memory and return a `Run`, which
takes prompts and a number of new tokens, generates greedily to that length, and says what it took. It runs in a process
of its own (``python -m peers NAME``), which has its own environment if the peer wants other versions than kvkeep, so
these files import nothing but their own packages. What cannot run here raises `Unavailable` with the reason.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PEERS = ("kvkeep", "transformers", "transformers_batch", "kvpress", "llama_cpp", "openvino", "vllm")

Prompt = list[int]


class Unavailable(Exception):  # noqa: N818  a reason, not a fault
    """The peer cannot run here; the message is shown in its row of the table."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a system is asked to do.

    Attributes:
        model: folder with the configuration and the weights, or a GGUF file.
        dtype: ``float32`` or ``bfloat16``, of weights, keys and values.
        threads: how many it may use.
        vocabulary: prompts are drawn from so many tokens.
        requests: how many prompts.
        prompt_tokens: length of each.
        new_tokens: what is generated for each, whatever the tokens are.
        limit_s: who works through batches one after the other begins no new one after so many seconds.
        options: of the system: policy, budget, chunk, rows, kv_bytes.
        texts: the prompts; ``None``: random tokens.
    """

    model: str
    dtype: str
    threads: int
    vocabulary: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    limit_s: float | None = None
    options: Mapping[str, int | str | None] = field(default_factory=dict)
    texts: Sequence[Prompt] | None = None

    def prompts(self) -> list[Prompt]:
        """The texts, or random tokens, the same for every system."""
        if self.texts is not None:
            return [list(text) for text in self.texts]
        draw = random.Random(0)
        return [draw.choices(range(self.vocabulary), k=self.prompt_tokens) for _ in range(self.requests)]


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        rows: sequences that were worked on at once.
        seconds: from the first prompt token to the last new one.
        tokens: the new tokens of every request that was finished.
        first_s: per request, from the start of the run to its first token; empty where it cannot be seen.
        tpot_s: per request, time per further token.
        process: the process that holds the model; ``None``: this one.
    """

    rows: int
    seconds: float
    tokens: Sequence[Sequence[int]]
    first_s: Sequence[float] = ()
    tpot_s: Sequence[float] = ()
    process: int | None = None

    @classmethod
    def at_once(
        cls,
        tokens: Sequence[Sequence[int]],
        times: Sequence[Sequence[float]],
        seconds: float,
        process: int | None = None,
    ) -> Outcome:
        """What came out of requests that all ran at once, from the seconds at which each of their tokens came."""
        return cls(
            rows=len(times),
            seconds=seconds,
            tokens=tokens,
            first_s=[row[0] for row in times],
            tpot_s=[(row[-1] - row[0]) / (len(row) - 1) for row in times if len(row) > 1],
            process=process,
        )


Run = Callable[[list[Prompt], int], Outcome]


def in_batches(
    prompts: list[Prompt], rows: int, limit_s: float | None, run: Callable[[list[Prompt]], Outcome]
) -> Outcome:
    """Run batches one after the other until there are no more, or the time is over."""
    parts: list[Outcome] = []
    start = time.perf_counter()
    for at in range(0, len(prompts), rows):
        if parts and limit_s is not None and time.perf_counter() - start > limit_s:
            break
        before = sum(part.seconds for part in parts)
        part = run(prompts[at : at + rows])
        parts.append(Outcome(part.rows, part.seconds, part.tokens, [before + s for s in part.first_s], part.tpot_s))
    return Outcome(
        rows=max(part.rows for part in parts),
        seconds=sum(part.seconds for part in parts),
        tokens=[tokens for part in parts for tokens in part.tokens],
        first_s=[s for part in parts for s in part.first_s],
        tpot_s=[s for part in parts for s in part.tpot_s],
    )

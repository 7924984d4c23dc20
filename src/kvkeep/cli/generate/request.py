"""What a user asked ``kvkeep generate`` for, between the command that reads it and the rooms that do the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_BUDGET = 1024


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; numbers of tokens are numbers, the prompt is text, nothing else is checked yet."""

    model: str | None
    prompt: str
    raw: bool
    policy: str
    budget: int | None
    keep_ratio: float | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    positions: Literal["true", "slot"] | None
    compare: bool
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    seed: int
    dtype: str
    device: str
    allow_pickle: bool
    json: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the user asked for beside a `Request` whose prompts stand in a file.

    Attributes:
        input: JSONL file of prompts.
        output: JSONL file of completions; ``-`` is standard output.
        skip_bad: whether lines that cannot be run are set aside instead of stopping the job.
        max_rows: sequences at once.
        kv_memory: bytes that they may take together.
        compile: whether norms and feed-forward layers are compiled.
    """

    input: str
    output: str
    skip_bad: bool
    max_rows: int | None
    kv_memory: int | None
    compile: bool

"""A request to ``kvkeep generate``: read by the command, done by `completion` and `job`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvkeep.cli.model_request import ModelRequest


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
    """The options of ``kvkeep generate``. Numbers of tokens and the prompt are read; the rest is not checked.

    Attributes:
        memory: the file of a memory that prompts follow.
        json_schema: the schema that the answer follows.
        names_policy: whether the user has named the policy.
    """

    prompt: str
    system: str | None = None
    raw: bool
    policy: str
    budget: int | None
    keep_ratio: float | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    head_budget: str | None
    kv_bits: str | None
    positions: Literal["true", "slot"] | None
    pin_system: bool = False
    guard: float | None = None
    compare: bool
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    seed: int
    json: bool
    memory: str | None = None
    json_schema: str | None = None
    names_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The options of a batch job, beside a `Request` without a prompt.

    Attributes:
        input: JSONL file of prompts.
        output: JSONL file of completions; ``-`` is standard output.
        skip_bad: whether lines that cannot be run are set aside; otherwise they stop the job.
        max_rows: sequences that run at once.
        kv_memory: bytes that all sequences may take together.
        compile: whether norms and feed-forward layers are compiled.
        workers: number of workers on Ray; ``None`` for an engine in this process.
        address: of a cluster of Ray; ``None`` for one of this machine alone.
    """

    input: str
    output: str
    skip_bad: bool
    max_rows: int | None
    kv_memory: int | None
    compile: bool
    workers: int | None = None
    address: str | None = None

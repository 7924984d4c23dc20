"""A request to ``kvkeep serve``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvkeep.cli.model_request import ModelRequest


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
    """The options of ``kvkeep serve``. Sizes and numbers of tokens are read; the rest is not checked."""

    served_name: str | None
    tool_form: str
    policy: str
    budget: int
    max_rows: int | None
    kv_memory: int | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    head_budget: str | None
    kv_bits: str | None
    positions: Literal["true", "slot"] | None
    guard: float | None
    host_rows: int
    prefix_memory: int
    session_memory: int | None
    session_dir: str | None
    replicas: tuple[int, int] | None
    ray_address: str | None
    host: str
    port: int
    unix_socket: str | None
    tls_cert: str | None
    tls_key: str | None
    allow_origin: tuple[str, ...]
    key_file: str | None
    key_requests: int | None
    key_tokens: int | None
    max_new_tokens: int
    max_model_len: int | None
    max_queue: int
    queue_timeout: float
    request_timeout: float
    read_timeout: float
    grace: float
    max_body: int
    access_log: bool
    page: bool
    check: bool

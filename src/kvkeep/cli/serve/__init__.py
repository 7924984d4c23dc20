"""``kvkeep serve``: its options. The work is done by `serving`."""

from __future__ import annotations

import os
from importlib.util import find_spec

from kvkeep.cli.bits import KvBits, parse_kv_bits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.heads import HeadBudget, parse_head_budget
from kvkeep.cli.options import (
    AllowPickle,
    Debug,
    Device,
    Dtype,
    LayerBudget,
    LoadIn,
    Policy,
    Positions,
    PrefillChunk,
    Threads,
    parse_bytes,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.serve import options as own
from kvkeep.cli.serve.request import Request
from kvkeep.errors import InputError, pip_install
from kvkeep.policies import DEFAULT

_WAITING = "passive"
"""How torch's threads wait for work. Active ones spin on the cores that the web's thread and clients need."""
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@one_line_errors
def serve(
    model: own.Model = None,
    served_name: own.ServedName = None,
    tool_form: own.ToolForm = "auto",
    policy: Policy = DEFAULT,
    budget: own.Budget = "1024",
    max_rows: own.MaxRows = None,
    kv_memory: own.KvMemory = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    guard: own.Guard = None,
    host_rows: own.HostRows = 0,
    prefix_memory: own.PrefixMemory = None,
    session_memory: own.SessionMemory = None,
    session_dir: own.SessionDir = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    ray_replicas: own.RayReplicas = None,
    ray_address: own.RayAddress = None,
    host: own.Host = "127.0.0.1",
    port: own.Port = 8000,
    unix_socket: own.UnixSocket = None,
    tls_cert: own.TlsCert = None,
    tls_key: own.TlsKey = None,
    allow_origin: own.AllowOrigin = None,
    key_file: own.KeyFile = None,
    key_requests: own.KeyRequests = None,
    key_tokens: own.KeyTokens = None,
    max_new_tokens: own.MaxNewTokens = "1024",
    max_model_len: own.MaxModelLen = None,
    max_queue: own.MaxQueue = 256,
    queue_timeout: own.QueueTimeout = 60.0,
    request_timeout: own.RequestTimeout = 600.0,
    read_timeout: own.ReadTimeout = 30.0,
    grace: own.Grace = 30.0,
    max_body: own.MaxBody = "16MiB",
    access_log: own.AccessLog = True,
    page: own.LivePage = True,
    config: own.Config = None,
    check: own.Check = False,
    debug: Debug = False,
) -> None:
    """Serve a model through OpenAI's API, each conversation in a fixed amount of memory.

    Clients use http://HOST:PORT/v1 as their base URL. Every option can also stand in a variable, such as
    KVKEEP_BUDGET, or in the file of --config.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise InputError(f"The server needs {missing[0]}, which is not installed: {pip_install('server')}.")
    os.environ.setdefault("OMP_WAIT_POLICY", _WAITING)
    request = Request(
        model=model,
        served_name=served_name,
        tool_form=tool_form,
        policy=policy,
        budget=parse_tokens(budget, "--budget"),
        max_rows=max_rows,
        kv_memory=_size(kv_memory, "--kv-memory"),
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        head_budget=parse_head_budget(head_budget),
        kv_bits=parse_kv_bits(kv_bits),
        positions=parse_positions(positions),
        guard=guard,
        host_rows=host_rows,
        prefix_memory=_size(prefix_memory, "--prefix-memory") or 0,
        session_memory=_size(session_memory, "--session-memory"),
        session_dir=session_dir,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        replicas=own.parse_replicas(ray_replicas, ray_address),
        ray_address=ray_address,
        host=host,
        port=port,
        unix_socket=unix_socket,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_origin=tuple(allow_origin or ()),
        key_file=key_file,
        key_requests=key_requests,
        key_tokens=key_tokens,
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        max_model_len=None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        max_queue=max_queue,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        read_timeout=read_timeout,
        grace=grace,
        max_body=parse_bytes(max_body, "--max-body", example="16MiB"),
        access_log=access_log,
        page=page,
        check=check,
    )
    from kvkeep.cli.serve import serving  # imports torch, transformers and fastapi

    serving.run(request)


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option, example="8GiB")
